"""--swap-plan-save: the plan that Stable runs or, where training ends before the search, the best one so far."""
from __future__ import annotations

import pytest
from steps import executed
from traces import Shape, megatron_trace

from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.kept_plans import KeptPlans, loaded_plans
from mindspeed_swap.options import Options
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.search import Phase
from mindspeed_swap.smart_swap.shapes import Shapes

SHAPE = Shape(layers=4)
BROUGHT_TROUBLE = StepStats(evictions=1)


class Run:
    """A search that goes on, step by step, and ends when the test says so."""

    def __init__(self, file, cache=None) -> None:
        trace = megatron_trace(SHAPE)
        peak = max(point.peak_bytes for point in trace.points)
        self._capacity = (floor(trace).reachable_bytes + peak) // 2
        options = Options(True, None, None, trace.model, plan_save=str(file), plan_cache=cache)
        self.kept, self.shapes = KeptPlans(options, "sim", self._capacity), Shapes(self._capacity, Policy())
        self._read = Options(True, None, None, trace.model, plan_file=str(file))

    def step(self, stats=None):
        """Returns the plan that the step ran."""
        search = self.shapes.begin(1, self._capacity, 1 << 40)
        self.shapes.meet(4096)
        plan = search.plan
        trace = executed(megatron_trace(SHAPE), plan) if plan else megatron_trace(SHAPE)
        if search.after_step(stats or StepStats(), trace):
            self.kept.save(self.shapes)
        return plan

    def warm_up(self) -> None:
        while self.shapes.current.phase is Phase.WARM_UP:
            self.step()

    def written(self):
        (plan,) = loaded_plans(self._read).values()
        return plan


@pytest.fixture
def file(tmp_path):
    return tmp_path / "plan.json"


def test_a_search_that_training_ended_before_leaves_its_best_plan(file, tmp_path, capsys):
    run = Run(file, str(tmp_path / "cache"))
    run.warm_up()
    good = run.step()
    assert run.shapes.current.phase is Phase.SEARCH
    run.step(BROUGHT_TROUBLE)
    assert run.shapes.current.phase is Phase.SEARCH and not file.exists()
    capsys.readouterr()
    run.kept.save_unfinished(run.shapes)
    assert run.written().decisions == good.decisions
    assert "--swap-plan-save: training ended before the search did" in capsys.readouterr().out
    assert not Run(file, str(tmp_path / "cache")).kept.plans, "the next run searches on: the cache has none"


@pytest.mark.parametrize("tried", [False, True], ids=["not_tried", "in_trouble"])
def test_nothing_that_went_well_is_no_file_and_one_line(tried, file, capsys):
    run = Run(file)
    run.warm_up()
    if tried:
        run.step(BROUGHT_TROUBLE)
    assert run.shapes.current.phase is Phase.SEARCH
    capsys.readouterr()
    run.kept.save_unfinished(run.shapes)
    assert not file.exists()
    assert "--swap-plan-save: no plan was found, nothing is written" in capsys.readouterr().out


def test_a_search_that_is_over_is_written_at_once_and_not_again(file, capsys):
    run = Run(file)
    while run.shapes.current.phase is not Phase.STABLE:
        run.step()
    assert run.written().decisions == run.shapes.current.plan.decisions
    file.unlink()
    capsys.readouterr()
    run.kept.save_unfinished(run.shapes)
    assert not file.exists() and capsys.readouterr().out == ""
