"""``mindspeed-swap what-if``: the table, from a trace or a report folder, and what it says of wrong input."""
from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_swap.cli import main

FIXTURES = Path(__file__).parents[1] / "core" / "fixtures"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank, name in enumerate(("pp4_first", "pp4_last")):
        (tmp_path / f"rank{rank}").mkdir()
        text = gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes())
        (tmp_path / f"rank{rank}" / "step_trace.json").write_bytes(text)
    return tmp_path


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(folder), "--budgets", "1MiB", "4MiB", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"floor of keep\|swap: [\d.]+ MiB; no plan below [\d.]+ MiB, reached in phase [FBO]", out)
    rows = out.splitlines()[-3:]
    assert rows[0].startswith("1.0 GiB") and rows[0].endswith("(none needed)")
    assert "--smart-swap  # MINDSPEED_SWAP_DEVICE_CAPACITY=" in rows[1]
    assert rows[2].startswith("1.0 MiB") and rows[2].endswith("(below the floor)")


def test_one_budget_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(folder), "--budgets", "4MiB"]) == 0
    out = capsys.readouterr().out.split("\nkeep|swap:\n")[1]
    assert re.search(r"^  phase F: peak [\d.]+ MiB -> [\d.]+ MiB", out)
    assert re.search(r"^  swap \d+ of \d+ of layers [\d-]+: ", out, re.MULTILINE)
    assert "\n+recompute:\n" in out


def test_ranks_of_different_models_are_refused_by_the_first_difference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rank1" / "step_trace.json"
    file.write_text(file.read_text().replace("seq_length=128", "seq_length=256"))
    assert main(["what-if", str(folder)]) != 0
    assert "rank1/step_trace.json: of another model: seq_length=256, " in capsys.readouterr().err


def test_without_budgets_a_curve_from_the_floor_to_the_plain_peak(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(folder / "rank0" / "step_trace.json")]) == 0
    rows = capsys.readouterr().out.split("flags\n")[1].splitlines()
    assert len(rows) >= 8 and "(below" not in rows[-1]
    assert [row for row in rows if row.endswith("(the very least: a run may need more)")] == rows[-1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: cannot be read: No such file or directory; give what --swap-report-dir named"),
        (["."], r"no rank<N>/step_trace\.json"),
        (["rank0/step_trace.json", "--budgets", "much"], "--budgets='much'"),
        (["damaged.json"], "damaged"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder / "rank0" if arguments == ["."] else folder)
    (folder / "damaged.json").write_text("{")
    assert main(["what-if", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e300", "much"])
def test_host_memory_is_a_number_as_it_is_for_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["what-if", str(folder), "--host-memory", text])
    assert ended.value.code == 2 and "expected a number of GB (1024^3 bytes) above 0" in capsys.readouterr().err


def test_a_step_without_optimizer_state_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "recorded before the optimizer had its state"
    assert main(["what-if", str(folder), "--budgets", "1GiB"]) == 0
    assert told not in capsys.readouterr().out
    file = folder / "rank1" / "step_trace.json"
    file.write_text(re.sub(r'("has_optimizer_state": ?)true', r"\1false", file.read_text()))
    assert main(["what-if", str(folder), "--budgets", "1GiB"]) == 0
    assert told in capsys.readouterr().out


def test_a_picture_without_matplotlib_is_one_line_and_torch_is_not_needed(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None\n"
        "from mindspeed_swap.cli import main\n"
        f"assert main(['what-if', {str(folder)!r}, '--budgets', '4MiB']) == 0\n"
        f"sys.exit(main(['what-if', {str(folder)!r}, '--picture', 'a.png']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "need matplotlib: pip install" in done.stderr


def test_the_picture(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["what-if", str(folder), "--picture", str(folder / "a.png")]) == 0
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
