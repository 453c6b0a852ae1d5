"""What a search says of its steps: how the next one is to run, what tries did, how good the first record was. Pure."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.step import ExecutedStep, StepStats
from mindspeed_swap.core.trace import Key

# Steps of the same work differ by about this much, at least.
NOISE_SHARE = 0.01
# Promises are off by less than that: a plan that promises to take this much longer than a try did is not tried.
MOST_DEARER = 1.25
# Of so many swaps one may be loaded on demand.
ALL_PER_FEW = 20


class NoPlan(ValueError):
    """What was asked for cannot be had. The message says how much there is at least, or what is missing."""


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
    host_bytes: int  # that the plan needs


@dataclass(frozen=True, slots=True)
class Try:
    """A plan and what it did, on the rank that fared worst."""

    plan: Plan
    trouble: int  # see trouble_of
    over_bytes: int  # measured peak above the target
    peak_bytes: int
    step_ms: float
    step: ExecutedStep  # of this rank
    error_share: float = 0.0  # to what part of it step_ms is known

    @property
    def rank(self) -> tuple[bool, int, float]:
        return self.trouble > 0 or self.over_bytes > 0, self.over_bytes, self.step_ms

    @property
    def promised_ms(self) -> float:
        """Of the plan; what it took, if that promised nothing."""
        promised = self.plan.prediction
        return promised.step_ms if promised and promised.step_ms else self.step_ms

    @property
    def surprise(self) -> float:
        """By what share the step took longer than promised; below 0: shorter."""
        return self.step_ms / self.promised_ms - 1 if self.promised_ms else 0.0


def best_of(tries: Sequence[Try]) -> Try:
    """As measured; of those that do not differ by more than steps do anyway what was promised counts as much."""
    best = min(tries, key=lambda tried: tried.rank)
    most_ms = best.step_ms * (1 + max(NOISE_SHARE, best.error_share))
    alike = [tried for tried in tries if tried.rank[:2] == best.rank[:2] and tried.step_ms <= most_ms]
    return min(alike, key=lambda tried: tried.step_ms + tried.promised_ms)


def promises_more(tries: Sequence[Try], plan: Plan) -> bool:
    """The last of the tries was faster than all before it, or the next, this plan, should be, by more than steps differ
    anyway; and the next does not promise to be far slower."""
    good = [tried for tried in tries if not tried.rank[0]]
    # One that was measured twice is no worse for it.
    last = min(tried.step_ms for tried in good if tried.plan is good[-1].plan)
    best = min((tried.step_ms for tried in good if tried.plan is not good[-1].plan), default=float("inf"))
    promised = plan.prediction.step_ms if plan.prediction else min(best, last)
    less = 1 - max(NOISE_SHARE, tries[-1].error_share)
    if promised > min(best, last) * MOST_DEARER:
        return False
    return last < best * less or promised < min(best, last) * less


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How good the trace is that the first plan is made from."""

    steps: int
    evicted_bytes: int  # while it was recorded
    stall_ms: float  # its times are without that
    saved: int
    candidates: int
    candidate_bytes: int
    peak_measured_bytes: int


def trouble_of(stats: StepStats, plan: Plan | None) -> int:
    """Few loads on demand among many planned ones are none: what experts save and read differs from step to step, and
    how long a step took is measured anyway."""
    few = len(plan.swaps) // ALL_PER_FEW if plan else 0
    return max(0, stats.on_demand_loads - few) + stats.skipped_prefetches + stats.evictions


@dataclass(slots=True)
class StableCounters:
    steps: int = 0
    on_demand_loads: int = 0
    late_loads: int = 0
    evictions: int = 0
    skipped_prefetches: int = 0

    def add(self, stats: StepStats) -> None:
        self.steps += 1
        self.on_demand_loads += stats.on_demand_loads
        self.late_loads += stats.late_loads
        self.evictions += stats.evictions
        self.skipped_prefetches += stats.skipped_prefetches
