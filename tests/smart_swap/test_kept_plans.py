"""Plans that outlive a run, in the file of --swap-plan-save and in the cache: which, when, and what is said."""
from __future__ import annotations

import re
from functools import partial

import pytest
from steps import executed
from test_phases import Board, ThreadPeers, on_both
from traces import Shape, megatron_trace

from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.errors import SettingError
from mindspeed_swap.kept_plans import KeptPlans, check_places, loaded_plans
from mindspeed_swap.options import Options
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.search import SmartSwap
from mindspeed_swap.smart_swap.shapes import Shapes
from mindspeed_swap.virtual_optimizer.amount import VirtualOptions

TRACE = megatron_trace(Shape(layers=4))
CAPACITY = (floor(TRACE).reachable_bytes + max(point.peak_bytes for point in TRACE.points)) // 2
SAVED = len(TRACE.saved)
BROUGHT_TROUBLE = StepStats(saves=SAVED, evictions=1)


class Run:
    """A search that goes on, step by step, and ends when the test says so."""

    def __init__(self, file=None, cache=None, settles=False) -> None:
        self.options = Options(
            True, None, None, TRACE.model, plan_save=file and str(file), plan_cache=cache and str(cache)
        )
        self.kept = KeptPlans(self.options, "sim", CAPACITY)
        search = partial(SmartSwap, failed=self.kept.failed, settles=settles)
        self.shapes = Shapes(CAPACITY, Policy(), self.kept.plans, search)

    def step(self, stats=None, microbatches=1):
        """Returns the plan that the step ran."""
        self.shapes.begin(microbatches, CAPACITY, 1 << 40)
        self.shapes.meet(4096)
        search = self.shapes.current
        order = search.next_step()
        trace = executed(TRACE, order.plan) if order.record else None
        if search.after_step(stats or StepStats(saves=SAVED), trace, 100.0 if search.times else None):
            self.kept.save(self.shapes)
        return order.plan

    def warm_up(self) -> None:
        while self.shapes.current.phase is Phase.WARM_UP:
            self.step()

    def until_stable(self, microbatches=1):
        """Returns the plan that was found."""
        self.step(microbatches=microbatches)
        while self.shapes.current.phase is not Phase.STABLE:
            self.step(microbatches=microbatches)
        return self.shapes.current.plan

    def drift(self, microbatches=1) -> None:
        for _ in range(2):
            self.step(BROUGHT_TROUBLE, microbatches)
        assert self.shapes.current.phase is Phase.SEARCH

    def end(self) -> None:
        self.kept.save_unfinished(self.shapes)


def written(file):
    """What the plans of the file do, by microbatches per step."""
    plans = loaded_plans(Options(True, None, None, TRACE.model, plan_file=str(file)))
    return {shape[0]: plan.decisions for shape, plan in plans.items()}


def cached(cache):
    return {shape[0]: plan.decisions for shape, plan in Run(cache=cache).kept.plans.items()}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "plan.json"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_a_search_that_training_ended_before_leaves_its_best_plan(file, cache, capsys):
    run = Run(file, cache)
    run.warm_up()
    good = run.step()
    assert run.shapes.current.phase is Phase.SEARCH
    run.step(BROUGHT_TROUBLE)
    assert run.shapes.current.phase is Phase.SEARCH and not file.exists()
    capsys.readouterr()
    run.end()
    assert written(file) == {1: good.decisions}
    assert "--swap-plan-save: training ended before the search did" in capsys.readouterr().out
    assert not cached(cache), "the next run searches on"


@pytest.mark.parametrize("tried", [False, True], ids=["not_tried", "in_trouble"])
def test_nothing_that_went_well_is_no_file_and_one_line(tried, file, capsys):
    run = Run(file)
    run.warm_up()
    if tried:
        run.step(BROUGHT_TROUBLE)
    assert run.shapes.current.phase is Phase.SEARCH
    capsys.readouterr()
    run.end()
    assert not file.exists()
    assert "--swap-plan-save: no plan was found, nothing is written" in capsys.readouterr().out


def test_a_search_that_is_over_is_written_at_once_and_not_again(file, capsys):
    run = Run(file)
    assert written_by(run, file) == {1: run.shapes.current.plan.decisions}
    file.unlink()
    capsys.readouterr()
    run.end()
    assert not file.exists() and capsys.readouterr().out == ""


def written_by(run, file):
    run.until_stable()
    return written(file)


def test_a_plan_out_of_the_cache_is_written_to_the_file_that_was_asked_for(file, cache, capsys):
    plan = Run(cache=cache).until_stable()
    run = Run(file, cache)
    for _ in range(3):
        assert run.step().decisions == plan.decisions
    capsys.readouterr()
    run.end()
    assert written(file) == {1: plan.decisions} and capsys.readouterr().out == ""


def test_what_this_run_does_not_meet_stays_in_the_cache(cache):
    first = Run(cache=cache)
    found = {1: first.until_stable(1).decisions, 2: first.until_stable(2).decisions}
    found[4] = Run(cache=cache).until_stable(4).decisions
    assert cached(cache) == found


def test_a_shape_that_is_searched_for_anew_keeps_its_plan_until_that_is_over(file, cache, capsys):
    run = Run(file, cache)
    found = {1: run.until_stable(1).decisions, 2: run.until_stable(2).decisions}
    run.step()
    run.drift()
    capsys.readouterr()
    run.end()
    assert written(file) == cached(cache) == found and capsys.readouterr().out == ""
    run.until_stable()
    assert written(file) == cached(cache) == found | {1: run.shapes.current.plan.decisions}


@pytest.mark.parametrize(
    "path, why", [("/proc/nowhere/plan", "cannot be written to"), ("", "is a folder; give a file")]
)
def test_a_file_that_cannot_be_written_is_an_error_at_the_start(path, why, tmp_path):
    given = path or str(tmp_path)
    with pytest.raises(SettingError, match=f"^--swap-plan-save {re.escape(given.removesuffix('/plan'))}: {why}"):
        check_places(Options(True, None, None, TRACE.model, plan_save=given))


def test_a_file_that_can_no_longer_be_written_is_said_once(file, capsys):
    run = Run(file)
    run.warm_up()
    file.parent.joinpath(file.name).mkdir(parents=True)
    run.until_stable()
    run.drift()
    run.until_stable()
    run.end()
    assert capsys.readouterr().out.count("--swap-plan-save: not written, training goes on: Is a directory") == 1


def test_a_file_that_cannot_be_written_does_not_keep_the_cache_from_it(cache, capsys):
    run = Run("/proc/nowhere/plan.json", cache)
    plan = run.until_stable()
    assert "--swap-plan-save: not written, training goes on: " in capsys.readouterr().out
    assert cached(cache) == {1: plan.decisions}
    cache.joinpath("no folder").write_text("")
    Run(cache=cache / "no folder" / "x").until_stable()
    assert "--swap-plan-cache: not written, training goes on: " in capsys.readouterr().out


def test_after_a_saved_plan_a_search_is_one_like_any_other(cache):
    plan = Run(cache=cache).until_stable()
    run = Run(cache=cache, settles=True)
    assert run.step().decisions == plan.decisions
    run.drift()
    search = run.shapes.current
    assert search.settles and search.failed is run.kept.failed
    while search.phase is Phase.SEARCH:
        run.step(BROUGHT_TROUBLE)
    assert Run(cache=cache).kept.failed == search.failed != set()


@pytest.mark.parametrize(
    "other",
    [{"virtual_optimizer": VirtualOptions((None,))}, {"host_memory_gib": 1.0}, {"policy": Policy(recomputes=True)}],
)
def test_another_setting_has_a_cache_of_its_own(other, cache):
    Run(cache=cache).until_stable()
    given = {"host_memory_gib": None, "report_dir": None, "model": TRACE.model, "plan_cache": str(cache), **other}
    options = Options(True, **given)
    assert not KeptPlans(options, "sim", CAPACITY).plans


def test_another_megatron_has_a_cache_of_its_own(monkeypatch, cache):
    run = Run(cache=cache)
    run.until_stable()
    assert KeptPlans(run.options, "sim", CAPACITY).plans
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    assert not KeptPlans(run.options, "sim", CAPACITY).plans


def test_a_rank_that_lacks_its_file_takes_the_leaders_plans(cache):
    """With one that searches and one that does not, modules would run again on one rank only."""
    plan = Run(cache=cache).until_stable()
    board = Board(2)
    caches, found = (cache, cache.parent / "elsewhere"), {}

    def rank(number: int) -> None:
        run = Run(cache=caches[number])
        run.kept.plans = run.shapes.follow(ThreadPeers(board, number))
        found[number] = run.step(), dict(run.kept.plans)

    on_both(rank)
    assert found[0] == found[1] and plan in found[1][1].values()
