"""mindspeed-swap report: one page that opens offline, names escaped, pictures beside it."""
import re
import sys

import pytest

from mindspeed_swap import cli

EVIL = '<script>alert("1")</script><img src=http://evil.example/x>'


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="the pictures need matplotlib (extra: report)")


def make(directory, *arguments):
    code = cli.main(["report", str(directory), *arguments])
    file = directory / "report.html"
    return code, file.read_text() if file.exists() else ""


def test_a_page_and_pictures(write_run, matplotlib, capsys):
    directory = write_run(ranks=2)
    code, page = make(directory)
    assert code == 0
    for title in ("Ranks side by side", "Predicted and measured", "Device memory over the step", "Link against compute",
                  "What went where, by layer", "Biggest tensors", "Plans that were tried"):  # fmt: skip
        assert title in page
    assert page.count("<svg") == 2 * (1 + 2 * 4)  # for both widths: all ranks' and four per rank
    pictures = sorted(p.name for p in directory.glob("*.png"))
    assert pictures == [f"report_rank{r}_{n}.png" for r in (0, 1) for n in ("lanes", "layers", "memory", "tensors")]
    assert str(directory / "report.html") in capsys.readouterr().out


def test_nothing_is_loaded_from_anywhere(write_run, matplotlib):
    _, page = make(write_run())
    assert "://" not in page
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b", page)
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!["']?#)""", page)
    assert not re.search(r"@import|url\((?!['\"]?#)", page)
    assert "default-src 'none'" in page


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # such names leave no room for a picture
def test_names_are_escaped_wherever_they_stand(write_run, matplotlib):
    def change(name, data):
        if name != "summary.json":
            return
        data.update(device=EVIL, phase=EVIL)
        data["versions"][EVIL] = EVIL
        data["layout"] = {EVIL: EVIL}
        data["step"]["notes"] = [EVIL]
        data["step"]["phases"][EVIL] = data["step"]["phases"].pop("forward")
        data["step"]["layers"][0]["layer"] = EVIL
        data["step"]["tensors"][0]["tensor"] = EVIL

    _, page = make(write_run(run_id=EVIL, change=change))
    assert "alert" in page and "&lt;script&gt;" in page
    assert not re.search(r"<(script|img)\b", page)


def test_what_is_missing_stands_on_the_page_too(write_run, matplotlib, capsys):
    directory = write_run(ranks=3, only=(0, 2))
    (directory / "rank2" / "trace.json").unlink()
    code, page = make(directory)
    assert code == 1
    assert "no summary.json of rank 1: 2 of 3 ranks are shown" in page and "no pictures over time" in page
    assert capsys.readouterr().out.count("missing: ") == 2


@pytest.mark.parametrize("phase", ["WarmUp", "off"])
def test_without_a_recorded_step(write_run, matplotlib, phase):
    def change(name, data):
        if name == "summary.json":
            virtual = {"mode": "streamed", "moved_bytes": 3 << 20}
            data.update(step=None, tries=[], phase=phase, virtual_optimizer=virtual)

    directory = write_run(change=change)
    (directory / "rank0" / "trace.json").unlink()
    code, page = make(directory)
    assert code == 0 and f"no step has been recorded{'' if phase == 'off' else ' yet'}</div>" in page
    assert "<td>moved_bytes</td><td>3.0 MiB</td>" in page


@pytest.mark.parametrize(("feature", "shown"), [
    ("smart-swap", "smart-swap: Stable"), ("adaptive memory", "adaptive memory: Stable"), (None, "plans: Stable"),
])  # fmt: skip
def test_whose_plans_they_are_is_said(write_run, matplotlib, feature, shown):
    def change(name, data):
        if name == "summary.json":
            assert data["feature"] == "smart-swap"
            data["feature"] = feature

    assert f" · {shown} after " in make(write_run(change=change))[1]


def test_another_place(write_run, matplotlib, tmp_path):
    out = tmp_path / "else" / "where.html"
    assert make(write_run(), "--out", str(out))[0] == 0
    assert out.exists() and (out.parent / "where_rank0_memory.png").exists()


def test_a_place_that_cannot_be_written(write_run, matplotlib, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert make(write_run(), "--out", str(tmp_path / "file" / "x.html"))[0] == 2
    assert "the report cannot be written" in capsys.readouterr().err


def test_two_runs_are_chosen_from(write_run, matplotlib, capsys):
    write_run(ranks=2, run_id="older")
    directory = write_run(run_id="newer")
    assert make(directory)[0] == 2
    assert "choose one with --run ID" in capsys.readouterr().err
    code, page = make(directory, "--run", "newer")
    assert code == 0 and "newer" in page and "older" not in page


def test_without_matplotlib_one_line_says_what_to_install(write_run, monkeypatch, capsys):
    directory = write_run()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("mindspeed_swap.report.pictures", "mindspeed_swap.report.page"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("mindspeed_swap.report.pictures", raising=False)
    assert make(directory)[0] == 2
    assert "pip install 'mindspeed-swap[report]'" in capsys.readouterr().err
