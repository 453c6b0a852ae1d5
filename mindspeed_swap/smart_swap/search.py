"""SmartSwap's phases. WarmUp records, SearchPolicy tries plans and measures them, Stable runs the best one.

Pure: steps come in as counters and traces, decisions go out. Out of memory in any phase is survived by eviction, so
the worst a plan can do is to be slow.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import Floor, Infeasible, floor, solve
from mindspeed_swap.core.step import ExecutedStep, StepStats
from mindspeed_swap.core.trace import Key, StepTrace
from mindspeed_swap.log import say
from mindspeed_swap.units import format_bytes

# Room the plan leaves below the capacity: what a step needs varies by a little from one to the next.
RESERVE_SHARE = 0.02
# A plan is tried at most so often before the best one measured is kept.
MAX_TRIES = 8
# Steps of the same work differ by about this much.
NOISE_SHARE = 0.01
# One bad step may be an evaluation or a checkpoint in between; two in a row are a change of the workload.
DRIFT_STEPS = 2
# By how much steps differ in the bytes that they save is seen over so many: experts save more or less each time.
SPREAD_STEPS = 32


class Phase(Enum):
    WARM_UP = "WarmUp"
    SEARCH = "SearchPolicy"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class StepOrder:
    """How the next step is to run."""

    plan: Plan | None
    record: bool
    read_order: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Try:
    """A plan and what it did."""

    plan: Plan
    trouble: int  # loads that were not prefetched, prefetches without room, evictions
    peak_bytes: int
    step_ms: float
    step: ExecutedStep


def _trouble(stats: StepStats) -> int:
    return stats.on_demand_loads + stats.skipped_prefetches + stats.evictions


@dataclass(slots=True)
class StableCounters:
    steps: int = 0
    on_demand_loads: int = 0
    late_loads: int = 0
    evictions: int = 0
    skipped_prefetches: int = 0


@dataclass(slots=True)
class SmartSwap:
    """One per rank. ``next_step`` before a step, ``after_step`` after it."""

    capacity_bytes: int
    phase: Phase = Phase.WARM_UP
    steps: int = 0
    plan: Plan | None = None
    target_bytes: int = 0
    peak_bytes: int = 0  # what the step would need if nothing were swapped
    floor: Floor | None = None
    tries: list[Try] = field(default_factory=list)
    stable: StableCounters = field(default_factory=StableCounters)
    shown: ExecutedStep | None = None  # for reports: the step of the try that Stable runs; before that, the last one
    _read_order: Mapping[Key, int] = field(default_factory=dict)
    _reserve_bytes: int = 0
    _accepted_trouble: int = 0  # of the plan that Stable runs: no plan without was found if it is above 0
    _bad_steps: int = 0
    _saved_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=SPREAD_STEPS))  # most at once, by step

    def __post_init__(self) -> None:
        self._reserve_bytes = int(self.capacity_bytes * RESERVE_SHARE)

    def next_step(self) -> StepOrder:
        return StepOrder(self.plan, self.phase is not Phase.STABLE, self._read_order)

    def after_step(self, stats: StepStats, trace: StepTrace | None) -> bool:
        """Take a step's outcome in. True if the phase or the plan changed. Raises Infeasible."""
        self.steps += 1
        self._saved_bytes.append(stats.most_saved_bytes)
        if self.phase is Phase.STABLE:
            return self._watch(stats)
        assert trace is not None, "WarmUp and SearchPolicy steps are recorded"
        self._read_order = {r.key: r.first_read for r in trace.saved if r.first_read is not None}
        self.shown = ExecutedStep(self.plan or Plan(trace.model, self.capacity_bytes), stats, trace)
        if self.phase is Phase.WARM_UP:
            return self._warmed_up(trace)
        return self._tried(stats, trace)

    # ---- WarmUp
    def _warmed_up(self, trace: StepTrace) -> bool:
        if not trace.has_optimizer_state:
            return False  # the first step allocates optimizer state: its memory is not that of the next
        self.floor = floor(trace)
        self.peak_bytes = max(simulate(trace, Plan(trace.model, 0)).peak_bytes.values())
        self._replan(trace)
        assert self.plan is not None
        if not self.plan.swaps:
            self._enter(
                Phase.STABLE, f"everything fits: nothing to swap, floor {format_bytes(self.floor.bytes)}"
            )
        else:
            self._enter(
                Phase.SEARCH,
                f"swap {format_bytes(self.plan.swap_bytes)} in {len(self.plan.swaps)} tensors",
            )
        return True

    def _replan(self, trace: StepTrace) -> None:
        spread = max(self._saved_bytes) - min(self._saved_bytes)
        self._reserve_bytes = max(self._reserve_bytes, spread)
        self.target_bytes = self.capacity_bytes - self._reserve_bytes
        try:
            self.plan = solve(trace, self.target_bytes)
        except Infeasible:
            # The reserve is caution, not need: without it is still better than not at all.
            self.plan = solve(trace, self.capacity_bytes)

    def _enter(self, phase: Phase, why: str) -> None:
        say(
            f"smart-swap: {self.phase.value} -> {phase.value} at step {self.steps}, "
            f"peak {format_bytes(self.peak_bytes)}, target {format_bytes(self.target_bytes)}; {why}",
            every_stage=True,
        )
        self.phase = phase

    # ---- SearchPolicy
    def _tried(self, stats: StepStats, trace: StepTrace) -> bool:
        assert self.plan is not None
        trouble = _trouble(stats)
        peak = max(point.peak_bytes for point in trace.points)
        assert self.shown is not None
        self.tries.append(Try(self.plan, trouble, peak, trace.step_ms, self.shown))
        best = min(self.tries, key=lambda tried: (tried.trouble > 0, tried.step_ms))
        if len(self.tries) < MAX_TRIES and (trouble or self._improved()) and self._next_try(trace, trouble > 0):
            return True
        self.plan, self._accepted_trouble, self.shown = best.plan, best.trouble, best.step
        self._reserve_bytes = self.capacity_bytes - best.plan.budget_bytes
        self._enter(
            Phase.STABLE,
            f"best of {len(self.tries)} tries: {best.step_ms:.0f} ms, peak {format_bytes(best.peak_bytes)}, "
            f"swap {format_bytes(best.plan.swap_bytes)} in {len(best.plan.swaps)} tensors"
            + (f", {best.trouble} evictions and loads on demand" if best.trouble else ""),
        )
        return True

    def _improved(self) -> bool:
        """The last try was faster than all before it, by more than steps differ anyway."""
        *before, last = [tried.step_ms for tried in self.tries if not tried.trouble]
        return not before or last < min(before) * (1 - NOISE_SHARE)

    def _next_try(self, trace: StepTrace, more_room: bool) -> bool:
        """Plan again from the try's own trace: it knows the times better than the one before. False if there is
        nothing else to try."""
        tried = self.plan
        if more_room:
            # The step needed more than the plan thought, or the allocator could not use all of the room (fragments).
            # By how much, the evicted bytes do not say: one that comes back pushes out the next.
            self._reserve_bytes *= 2
        try:
            self._replan(trace)
        except Infeasible:
            return False  # no plan leaves more room
        return self.plan is not None and tried is not None and self.plan.swaps != tried.swaps

    # ---- Stable
    def _watch(self, stats: StepStats) -> bool:
        counters = self.stable
        counters.steps += 1
        counters.on_demand_loads += stats.on_demand_loads
        counters.late_loads += stats.late_loads
        counters.evictions += stats.evictions
        counters.skipped_prefetches += stats.skipped_prefetches
        self._bad_steps = self._bad_steps + 1 if _trouble(stats) > self._accepted_trouble else 0
        if self._bad_steps < DRIFT_STEPS:
            return False
        self._bad_steps = 0
        self.tries.clear()
        self._enter(Phase.SEARCH, "the workload has changed")
        return True
