"""What is made from the sources and from measured files is up to date; every error text has its entry."""
import re

import pytest
from pages import ROOT, generator

_ENTRY = re.compile(r"^\| (`+) ?(.*?) ?\1 \|", re.MULTILINE)
_NO_ERRORS = "## Lines that are no errors"


def test_generated_parts_are_up_to_date():
    """If not: python scripts/docs.py"""
    stale = [p.name for p, text in generator().wanted() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    assert stale == []


def test_a_change_is_noticed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: aliases -->\n<!-- end -->\n")
    monkeypatch.setattr(generator(), "pages", lambda: [page])
    ((path, text), *_) = generator().wanted()
    assert path == page and "`flash_attention`" in text
    page.write_text("<!-- generated: no-such-block -->\n<!-- end -->\n")
    with pytest.raises(KeyError):
        next(generator().wanted())


def test_the_table_of_combinations():
    from mindspeed_swap.patches.compat import FEATURES

    head, rule, *rows = generator().compatibility().splitlines()
    flags = "`--smart-swap` | `--adaptive-memory-optimization` | `--swap-config` | `--virtual-optimizer`"
    assert head == f"| Megatron | {flags} |"
    assert rule == "|---|---|---|---|---|"
    assert len(rows) == len(FEATURES)
    full = next(row for row in rows if row.startswith("| full recompute | "))
    assert full.startswith("| full recompute | works: the inputs of the recomputed layers are swapped | error: ")
    assert "| FSDP | not tested | not tested | not tested | error: it owns the optimizer's state |" in rows
    assert any(row.startswith("| CUDA graphs | error: ") for row in rows)


def entries():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").partition(_NO_ERRORS)[0]
    return [entry for _, entry in _ENTRY.findall(text)]


def test_every_error_text_has_an_entry():
    """And no entry is of an error that is gone. The list: python scripts/docs.py --errors"""
    texts, listed = set(generator().error_texts()), entries()
    assert len(texts) > 100, "the collector has lost something"
    assert sorted(texts - set(listed)) == []
    assert sorted(set(listed) - texts) == []
    assert len(listed) == len(set(listed))


def test_the_collector_sees_each_way_of_raising(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        'FLAG = "--flag"\n'
        "def f(path, size):\n"
        '    name = f"{FLAG} {path}"\n'
        '    raise SettingError(f"{name}: {size} bytes are too many: "\n'
        '        "give less")\n'
        'def g(self, key):\n    raise self._error(key, f"expected {key}")\n'
        'def h():\n    raise SettingError("plain" + hint)\n'
    )
    assert set(generator("docs_errors")._texts_of(source)) == {
        "--flag …: … bytes are too many: give less", "expected …", "plain",
    }  # fmt: skip


def test_figures_are_of_a_run_that_went_well():
    runs = generator()._figures()["runs"]
    plain = runs["plain"]
    assert runs["capped"]["code"] != 0 and runs["capped"]["last_line"].startswith("out of memory")
    for name in ("smart-swap", "adaptive", "recompute", "virtual-optimizer"):
        assert runs[name]["code"] == 0 and runs[name]["sha256"] == plain["sha256"], name
    for name in ("smart-swap", "adaptive"):
        assert runs[name]["summary"]["phase"] == "Stable" and runs[name]["peak_bytes"] <= runs[name]["cap"]
    activation = generator()._figures()["one_activation"]
    assert {name: run["code"] for name, run in activation.items()} == {
        "own streams": 0, "same stream": 0, "late prefetch": 1,
    }  # fmt: skip


def test_sentences_of_the_report_hold_for_its_figures():
    """What section 7 says of the tables. After --measure: change the sentence, or find out why."""
    runs = generator()._figures()["runs"]
    swap, adaptive = (runs[name]["summary"] for name in ("smart-swap", "adaptive"))
    for summary in (swap, adaptive):
        assert summary["stable"]["on_demand_loads"] == 0
        peaks = [phase["peak_allocated_bytes"] for phase in summary["step"]["phases"].values()]
        assert max(peak["measured"] for peak in peaks) <= max(peak["predicted"] for peak in peaks)
    assert adaptive["plan"]["swap_bytes"] == swap["plan"]["swap_bytes"]
    assert adaptive["plan"]["prediction"]["recompute_ms"] == 0
    plain, virtual = runs["plain"], runs["virtual-optimizer"]
    moments = virtual["summary"]["virtual_optimizer"]["moments_bytes"]
    assert abs(plain["static_bytes"] - virtual["static_bytes"] - moments) < 64 << 10
    assert abs(plain["held_bytes"] - virtual["held_bytes"]) < 64 << 10
    assert runs["recompute"]["held_bytes"] < plain["held_bytes"] / 4
