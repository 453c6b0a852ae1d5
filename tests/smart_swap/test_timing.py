"""How many steps are timed, by what they take, and what of them counts."""
from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat

import pytest
from steps import executed, peak, run
from test_phases import CAPACITY, FIRST, SAVED, TRACE, search
from traces import MIB

from mindspeed_swap.core.host_pace import MOST_SLOWNESS
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.timing import MOST, MOST_WARMING, NOISY_WINDOW, Timing


def timed(timing: Timing, *took_ms: float) -> int:
    """How many of these were asked for; the last one goes on for ever."""
    for steps, each in enumerate(chain(took_ms, repeat(took_ms[-1])), 1):
        timing.add(0, each if timing.times else None)
        if not timing.wants_more:
            timing.over = True
            return steps
        assert steps < 100
    return 0


@pytest.mark.parametrize("took_ms, steps, ms", [
    ((100.0, 101.0), 2, 100.5),
    ((100.0, 101.5), 2, 100.75),
    ((100.0, 103.0, 101.0), 3, 101.0),
    ((150.0, 100.0, 100.0), 3, 100.0),  # something was in its way
    ((130.0, 190.0, 140.0, 180.0, 150.0, 170.0, 160.0, 155.0, 165.0, 160.0, 130.0, 190.0), MOST, 160.0),
])  # fmt: skip
def test_as_many_as_their_noise_asks_for(took_ms, steps, ms):
    timing = Timing()
    assert timed(timing, *took_ms) == steps and timing.ms == ms
    assert timing.often and not timing.times


SLOW = 1.01 * MOST_SLOWNESS


def add(timing: Timing, ms: float, undisturbed: bool) -> None:
    assert timing.wants_more
    timing.add(0, ms, 0, MOST_SLOWNESS if undisturbed else SLOW)


def added(*steps: tuple[float, bool]) -> Timing:
    timing = Timing()
    for ms, undisturbed in steps:
        add(timing, ms, undisturbed)
    return timing


def test_steps_of_a_slower_host_do_not_count():
    timing = added((150.0, False), (160.0, False), (100.0, True), (155.0, False))
    assert timing.wants_more and timing.ms == 152.5, "one that counts is not enough"
    add(timing, 100.5, True)
    assert not timing.wants_more and timing.ms == 100.25 and timing.error_share < 0.01


def test_not_even_where_they_are_most():
    """A host is slow for some ten steps at a time, and they are alike."""
    timing = added((100.0, True), (150.0, False), (150.5, False))
    add(timing, 100.0, True)
    assert not timing.wants_more and timing.ms == 100.0
    timing = Timing(warms_up=True)
    for ms, undisturbed in [(150.0, False), (140.0, False), (100.0, True), (150.0, False), (150.2, False)]:
        add(timing, ms, undisturbed)
    add(timing, 100.1, True)
    assert not timing.warms_up
    add(timing, 100.0, True)
    assert not timing.wants_more and timing.ms == pytest.approx(100.05)


def test_a_rank_waits_for_the_slowest_host():
    """So its own steps were slower too, though its own host was not."""
    ours, theirs = Timing(), Timing()
    steps = [(100.0, True), (150.0, False), (151.0, False), (100.2, True)]
    for ms, undisturbed in steps:
        add(ours, ms, undisturbed)
        theirs.add(0, ms, 0, 1.0)
        slowest = max(ours.slowness, theirs.slowness)
        for each in (ours, theirs):
            each.agree(not (ours.wants_more or theirs.wants_more), slowest)
    assert ours.over and theirs.over and ours.ms == theirs.ms == pytest.approx(100.1)


def test_where_steps_do_not_differ_the_host_does_not_matter():
    timing = added((150.0, False), (150.5, False))
    assert not timing.wants_more and timing.ms == 150.25
    timing = added((150.0, True), (151.0, False))
    assert not timing.wants_more and timing.ms == 150.5


def test_a_host_that_is_never_as_fast_as_it_can_be():
    timing = added(*[(150.0, False), (170.0, False), (160.0, False)] * (MOST // 3))
    assert not timing.wants_more and timing.ms == 160.0


def test_a_pipeline_does_not_wait_for_the_host():
    timing = Timing.before_recorded(first=False, afresh=False, pipelined=True)
    timing.add()
    add(timing, 150.0, False)
    assert not timing.wants_more and timing.ms == 150.0


def test_the_first_steps_of_a_plan_do_not_count():
    timing = Timing(unready=1)
    assert timed(timing, 1000.0, 100.0, 100.0) == 3 and timing.ms == 100.0 and timing.error_share == 0.0


@pytest.mark.parametrize("took_ms, steps, ms", [
    ((100.0,), 6, 100.0),
    ((97.5, 97.5, 97.5, 95.0, 95.0, 95.0), 6, 95.0),
    ((330.0, 216.0, 172.0, 187.0, 158.0, 158.0, 147.0, 144.0, 143.0, 145.0, 144.0, 144.0), 11, 144.0),
    ([1000.0 * 0.98**i for i in range(40)], MOST_WARMING + MOST - NOISY_WINDOW, None),  # for ever
])  # fmt: skip
def test_what_gets_shorter_is_waited_for(took_ms, steps, ms):
    timing = Timing(warms_up=True)
    assert timed(timing, *took_ms) == steps and ms in (None, timing.ms)


def test_after_a_warm_up_too_noise_asks_for_more():
    timing = Timing(warms_up=True)
    assert timed(timing, *[200.0, 100.0, 110.0, 120.0] * 10) == NOISY_WINDOW + MOST and timing.ms == 115.0


def test_noisy_steps_are_compared_over_more_of_them():
    """Three medians of three are alike by chance where the whole falls by a tenth."""
    falls = [180.0, 150.0, 165.0, 175.0, 155.0, 165.0, 170.0, 160.0] + [145.0, 130.0, 155.0, 140.0] * 20
    assert timed(Timing(warms_up=True), *falls) > 2 * NOISY_WINDOW


def test_one_step_where_all_stages_do_alike():
    timing = Timing.before_recorded(first=True, afresh=True, pipelined=True)
    assert timed(timing, 400.0, 300.0, 200.0, 100.0) == 4 and timing.ms == 100.0
    assert not timing.often and timing.error_share == 0.0
    assert timed(Timing.before_recorded(first=False, afresh=False, pipelined=True), 200.0, 100.0) == 2
    assert timed(Timing.before_recorded(first=False, afresh=True, pipelined=True), 100.0) == 1


def test_without_a_time_there_is_none():
    timing = Timing()
    timing.add()
    assert timing.ms is None and timing.wants_more and timing.error_share == 0.0
    zero = Timing()
    zero.add(0, 0.0)
    zero.add(0, 0.0)
    assert not zero.wants_more and zero.ms == 0.0


def test_a_noisy_plan_is_not_chosen_for_one_fast_step():
    """The median of a try counts, not the one step that a search would have seen."""
    it, noise = search(settles=True), iter(chain([100.0] * 6, [80.0, 120.0, 118.0, 119.0, 121.0, 120.0], repeat(119.0)))
    while not it.tries:
        step = (executed(TRACE, it.plan) if it.steps else FIRST) if it.next_step().record else None
        it.after_step(StepStats(saves=SAVED), step, next(noise) if it.times else None)
    assert it.tries[0].step_ms == 118.5


def test_the_most_that_a_step_needed_is_of_those_that_count():
    timing = Timing(warms_up=True)
    for number, peak_bytes in enumerate([900, 800, 700, 500, 600, 500]):
        timing.add(0, 100.0 - number // 3, peak_bytes)
    assert not timing.wants_more and timing.peak_bytes == 600
    timing = Timing(unready=1)
    timing.add()
    timing.add(0, 100.0, 7)
    timing.add(0, 100.0, 5)
    assert timing.peak_bytes == 7 and Timing.none().peak_bytes == 0


def run_needing(it, more_bytes: int) -> None:
    """A step like those of TRACE that needs so much more where it is not recorded (an expert got more tokens)."""
    step = executed(TRACE, it.plan) if it.steps else FIRST
    timed_as = (step.step_ms, peak(step) + more_bytes) if it.times else ()
    it.after_step(StepStats(saves=SAVED), step if it.next_step().record else None, *timed_as)


def test_the_first_plan_leaves_room_for_what_other_steps_needed():
    more, plans = CAPACITY // 16, []
    for each in (0, more):
        it = search({"target_mode": True, "target_memory": CAPACITY}, 10 * peak(TRACE), settles=True)
        while it.phase is Phase.WARM_UP:
            run_needing(it, each)
        plans.append(it.plan)
    without, room = plans
    assert room.budget_bytes == CAPACITY - more < without.budget_bytes


def test_a_try_is_above_its_target_if_one_step_of_it_was():
    it = search({"target_mode": True, "target_memory": CAPACITY}, 10 * peak(TRACE), settles=True)
    while it.phase is Phase.WARM_UP:
        run_needing(it, 0)
    more = CAPACITY - it.plan.prediction.peak + (1 << 20)
    while not it.tries:
        run_needing(it, more)
    (first,) = it.tries
    assert first.over_bytes == 1 << 20 and first.peak_bytes == CAPACITY + (1 << 20)
    assert it.phase is Phase.SEARCH and it.plan.budget_bytes <= first.plan.budget_bytes - (1 << 20)
    while it.phase is Phase.SEARCH:
        run_needing(it, more)
    assert it.tries[it._kept_try].over_bytes == 0 and it.plan is not first.plan


@pytest.mark.parametrize("more, recorded_less", [(24, 8), (24, 40), (40, 16), (64, 64)])
def test_another_plan_is_tried_though_the_recorded_step_needed_less(more, recorded_less):
    """In MiB: what steps of a try needed beyond the plan, and by how much less the recorded one needed at all."""
    it = search({"target_mode": True, "target_memory": CAPACITY}, 10 * peak(TRACE), settles=True)
    less = [replace(point, peak_bytes=point.peak_bytes - recorded_less * MIB) for point in TRACE.points]
    while it.phase is not Phase.STABLE:
        warm, of = it.phase is Phase.WARM_UP, (TRACE if it.steps else FIRST)
        step = executed(of if warm else replace(TRACE, points=less), it.plan)
        needed = peak(executed(of, it.plan)) + (0 if warm else more * MIB)
        timed_as = (step.step_ms, needed) if it.times else ()
        it.after_step(StepStats(saves=SAVED), step if it.next_step().record else None, *timed_as)
    assert it.tries[0].over_bytes > 0 and it.tries[it._kept_try].over_bytes == 0


def test_trouble_of_timed_steps_is_trouble_of_the_plan():
    it = search(settles=True)
    while it.phase is Phase.WARM_UP:
        run(it, TRACE if it.steps else FIRST)
    while not it.tries:
        stats = StepStats(saves=SAVED, evictions=0 if it.next_step().record else 5)
        run(it, TRACE, stats)
    assert it.tries[0].trouble == 5
    timing = Timing()
    for trouble in (0, 5, 0):
        timing.add(trouble, 100.0)
    assert timing.trouble == 0, "one odd step is none of the plan"


def test_room_for_other_steps_stays_when_the_search_begins_again():
    more = 8 * MIB
    it = search({"target_mode": True, "target_memory": CAPACITY}, 10 * peak(TRACE), settles=True)
    while it.phase is Phase.WARM_UP:
        run_needing(it, more)
    assert it._spread_bytes == more
    while it.phase is not Phase.STABLE:
        run_needing(it, 0)
    while it.phase is Phase.STABLE:
        run(it, TRACE, StepStats(saves=SAVED, evictions=1))
    while it._afresh:
        run_needing(it, 0)
    assert it._spread_bytes == more


def test_what_fits_is_told_as_that_though_steps_differ(capfd):
    target = int(peak(TRACE) / 0.975)  # 2 % of it are for what is not known
    it = search({"target_mode": True, "target_memory": target}, 10 * peak(TRACE), settles=True)
    while it.phase is Phase.WARM_UP:
        run_needing(it, int(0.015 * target))
    told = capfd.readouterr().out
    assert it.phase is Phase.STABLE and "everything fits" in told and "nothing can be moved" not in told
