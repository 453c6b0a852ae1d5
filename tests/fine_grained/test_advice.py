"""What is said about values that are too small or too large, and the list of names."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from layer_steps import Step, layer_names

from mindspeed_swap.cli import main
from mindspeed_swap.core.trace import CopyRecord, StepTrace
from mindspeed_swap.fine_grained.advice import advice
from mindspeed_swap.fine_grained.parts import Parts
from mindspeed_swap.fine_grained.planning import Planning
from mindspeed_swap.fine_grained.schema import read_swap_config

LAYERS = tuple(range(8))


@pytest.fixture
def planned(written):
    def plan(value: int) -> Planning:
        trace = Step((LAYERS,)).trace()
        entry = f"{{op_name: attention, backward_prefetch: {value}, layers: [2]}}"
        text = f"swap_config: {{swap: True, op_swap: [{entry}]}}"
        return Planning(trace, Parts(read_swap_config(written(text), 8), layer_names(trace), [LAYERS]))

    return plan


def executed(planning: Planning, copy_ms: float) -> StepTrace:
    """The step of the plan, with copies back that take so long."""
    points = planning.trace.points
    copies = []
    for placed in planning.placed:
        start = points[placed.prefetch].time_ms
        copies.append(CopyRecord(placed.record.key, placed.record.nbytes, False, start, start + copy_ms))
    return replace(planning.trace, copies=copies)


def test_late_says_what_would_do(planned):
    planning = planned(2)
    (line,) = advice(planning, executed(planning, 9.0))
    assert line.startswith("layer 2: self_attention came ") and " ms late, " in line and line.endswith(" would do")
    would = int(line.split(", ")[1].split()[0])
    assert would > 2
    better = planned(would)
    assert not [line for line in advice(better, executed(better, 9.0)) if "late" in line]
    worse = planned(would - 1)
    assert [line for line in advice(worse, executed(worse, 9.0)) if "late" in line]


def test_early_says_what_would_do(planned):
    planning = planned(12)
    (line,) = advice(planning, executed(planning, 0.5))
    assert " ms early, " in line
    would = int(line.split(", ")[1].split()[0])
    assert would < 12
    assert advice(planned(would), executed(planned(would), 0.5)) == []


def test_too_late_for_any_value(planned):
    planning = planned(2)
    (line,) = advice(planning, executed(planning, 1e6))
    assert line.endswith("late, no value would do")


def test_without_copies_there_is_nothing_to_say(planned):
    planning = planned(2)
    assert advice(planning, planning.trace) == []


def test_names_are_listed_by_layer_over_all_ranks(tmp_path, capsys):
    for rank, layers in enumerate([(0, 1), (2, 3)]):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "step_trace.json").write_text(Step((layers,), microbatches=2).trace().to_json())
    assert main(["ops", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("layers 0, 1, 2, 3\n")
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert rows["mlp"] == ["feed_forward", "7.0", "MiB", "7.0", "MiB", "3"]
    assert rows["mlp.linear_fc2"] == ["*", "feed_forward.w2", "2.0", "MiB", "2.0", "MiB", "1"]
    assert main(["ops", str(tmp_path / "rank1" / "step_trace.json")]) == 0
    assert capsys.readouterr().out.startswith("layers 2, 3\n")


@pytest.mark.parametrize("what", ["nothing", "damaged", "no modules"])
def test_nothing_to_list_is_one_line(tmp_path, capsys, what):
    if what != "nothing":
        trace = replace(Step().trace(), modules=[])
        (tmp_path / "rank0").mkdir()
        text = "{" if what == "damaged" else trace.to_json()
        (tmp_path / "rank0" / "step_trace.json").write_text(text)
    assert main(["ops", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mindspeed-swap: ") and error.count("\n") == 1


def test_planning_and_listing_import_no_torch():
    code = (
        "import sys, mindspeed_swap.report.list_operators, mindspeed_swap.fine_grained.front_end; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
