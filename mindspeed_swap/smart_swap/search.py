"""SmartSwap's phases. WarmUp records, SearchPolicy tries plans and measures them, Stable runs the best one.

Pure: steps come in as counters and traces, decisions go out. Out of memory in any phase is survived by eviction, so
the worst a plan can do is to be slow.
"""
from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import memory_curve
from mindspeed_swap.core.solve import Floor, floor
from mindspeed_swap.core.step import ExecutedStep, StepStats
from mindspeed_swap.core.trace import Key, StepTrace
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.log import say
from mindspeed_swap.smart_swap.outcomes import (
    NoPlan,
    Phase,
    StableCounters,
    StepOrder,
    Try,
    WarmUp,
    best_of,
    promises_more,
    trouble_of,
)
from mindspeed_swap.smart_swap.peers import Facts, Peers, state_of
from mindspeed_swap.smart_swap.plan_cache import digest
from mindspeed_swap.smart_swap.planning import host_need, make_plan
from mindspeed_swap.smart_swap.policy import LEAST_RESERVE_SHARE, MAX_TRIES, RESERVE_SHARE, Policy
from mindspeed_swap.smart_swap.timing import Timing
from mindspeed_swap.smart_swap.unrecorded import Unrecorded
from mindspeed_swap.units import format_bytes

# A try that took this much longer than promised is measured once more: something else may have been in its way.
SURPRISE_SHARE = 0.05
# One bad step may be an evaluation or a checkpoint in between; two in a row are a change of the workload.
DRIFT_STEPS = 2
# Each time that a search follows for that, the next one needs twice as many, up to so many doublings: where steps
# differ for ever (experts on a full device), a plan with some trouble is better than one search after the other.
MORE_PATIENT = 5
# How often the room is enlarged for one try before its plan is taken to be the only one. AUTO doubles it each time.
ROOM_TRIES = 3
# By how much steps differ in the bytes that they save is seen over so many: experts save more or less each time.
SPREAD_STEPS = 32


def tell(message: str) -> None:
    """Once per pipeline stage: within one, all do the same."""
    say(message, every_stage=True)


_DECIDED = (  # what deciding changes, of a search
    "plan", "phase", "target_bytes", "_extra_bytes", "_learned_reserve_bytes", "_accepted_trouble", "_kept_try",
    "_told", "_lines",
)  # fmt: skip


@dataclass(slots=True)
class SmartSwap:
    """One per rank and shape of step. ``next_step`` before a step, ``after_step`` after it."""

    capacity_bytes: int
    policy: Policy = Policy()
    peers: Peers = field(default_factory=Peers)
    name: int = 0  # of the shape; peers with another one decide for themselves
    tell: Callable[[str], None] = tell
    host_bytes: int | None = None  # that swap may take; None: no limit
    settles: bool = False  # see Note [Steps before the one that is recorded] in timing.py
    pipelined: bool = False  # a recorded step is longer for what other stages record, where this one waits for them
    phase: Phase = Phase.WARM_UP
    steps: int = 0
    plan: Plan | None = None
    target_bytes: int = 0
    peak_bytes: int = 0  # what the step would need if nothing were swapped
    floor: Floor | None = None
    warm_up: WarmUp | None = None
    tries: list[Try] = field(default_factory=list)
    stable: StableCounters = field(default_factory=StableCounters)
    failed: set[str] = field(default_factory=set)  # digests of plans that did not fit when they were tried
    shown: ExecutedStep | None = None  # for reports: the step of the try that Stable runs; before that, the last one
    _read_order: Mapping[Key, int] = field(default_factory=dict)
    _extra_bytes: int = 0  # below the target: learned from tries
    _learned_reserve_bytes: int | None = None  # what AUTO leaves free, once a try has shown how exact predictions are
    _peer_lacks_more: float = 0.0  # than we do: bytes of the step without swap above the target
    _accepted_trouble: int = 0  # of the plan that Stable runs: no plan without was found if it is above 0
    _saves: int = 0  # in the step that the plan was made from
    _bad_steps: int = 0
    _changes: int = 0  # of the workload, seen so far
    _afresh: bool = True  # the next recorded step is planned from as if it were the first
    _timing: Timing = field(default_factory=Timing.none)  # of the plan's steps before the one that is recorded
    _unrecorded: Unrecorded = field(default_factory=Unrecorded)
    _spread_bytes: int = 0  # what the steps before it needed beyond the one that the first plan is made from
    _told: str = ""
    _waited: bool = False
    _kept_try: int | None = None  # number of the try whose plan Stable runs
    _lines: list[str] = field(default_factory=list)  # to be told
    _saved_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=SPREAD_STEPS))  # most at once, by step

    def __post_init__(self) -> None:
        self.settles &= self.policy.tries is None  # else whoever says when Stable begins counts steps

    def run_saved(self, plan: Plan) -> SmartSwap:
        """No WarmUp, no search: this plan, from the first step on."""
        self.plan, self.phase, self.target_bytes = plan, Phase.STABLE, plan.budget_bytes
        return self

    def next_step(self) -> StepOrder:
        host_bytes = host_need(self.plan) if self.plan else 0
        record = self.phase is not Phase.STABLE and self._timing.over
        return StepOrder(self.plan, record, self._read_order, host_bytes)

    @property
    def times(self) -> bool:  # the next step
        return self._timing.times

    def after_step(self, stats: StepStats, trace: StepTrace | None, *timed: Any) -> bool:
        """Take a step in; ``timed``: as of Timing.add, if it ``times``. True: phase or plan changed. Raises NoPlan."""
        changed = self._took(stats, trace, *timed)
        return self.peers.tell() or changed

    def _took(self, stats: StepStats, trace: StepTrace | None, *timed: Any) -> bool:
        self.steps += 1
        if trace is not None:  # all was in the books
            self._saved_bytes.append(stats.most_saved_bytes)
        if self.phase is Phase.STABLE:
            return self._watch(stats)
        if not self._timing.over:
            self._timing.add(trouble_of(stats, self.plan), *timed)
            facts = self._agree(self._timing.wants_more, 0, 0, 0, self._timing.slowness)
            self._timing.agree(not facts.unready, facts.step_ms)
            if facts.apart:
                self._timing = self._new_timing()
            return False
        assert trace is not None, "WarmUp and SearchPolicy steps are recorded"
        if self._timing.ms is not None and not self.pipelined:
            trace = self._unrecorded.told(trace, self._timing.ms, self.plan)
        self._read_order = {r.key: r.first_read for r in trace.saved if r.first_read is not None}
        self.shown = ExecutedStep(self.plan or Plan(trace.model, self.capacity_bytes), stats, trace)
        self._saves = stats.saves
        changed = self._plan_afresh(trace) if self._afresh else self._tried(stats, trace)
        self._timing = self._new_timing()
        return changed

    def _trouble(self, stats: StepStats) -> int:
        """Of the plan, in this step or in most before it."""
        return max(self._timing.trouble, trouble_of(stats, self.plan))

    def _new_timing(self) -> Timing:
        if not self.settles or self.phase is Phase.STABLE:
            return Timing.none()
        return Timing.before_recorded(self.steps == 1, self._afresh, self.pipelined)

    @property
    def best_plan(self) -> Plan | None:
        """What ``Stable`` runs or, before that, would run if the search ended here. None: nothing tried went well."""
        if self.phase is Phase.STABLE:
            return self.plan
        best = best_of(self.tries) if self.tries else None
        return best.plan if best and not best.rank[0] else None

    # ---- with the other ranks
    def _figures(self, *own: float) -> list[float]:
        tries = 0 if self.phase is Phase.STABLE else len(self.tries)
        phase, timing = list(Phase).index(self.phase), self._timing
        state = state_of(phase, tries, self._afresh, timing.steps, timing.over)
        return [float(self.name), state, -float(self.name), -state, *own, -float(self.host_bytes or 0)]

    def _agree(self, *own: float) -> Facts:
        """The worst of all peers; ours where they are in another state. Of steps that are not Stable, once."""
        figures = self._figures(*own)
        return Facts.of(figures, self.peers.worst(figures))

    def _must_wait(self, facts: Facts) -> bool:
        """Modules that talk to other ranks must run again on all of them or on none: then nobody decides alone."""
        waits = self.policy.recomputes and self.peers.entangled and not facts.together
        if waits and not self._waited:
            self._waited = True
            self.tell(f"{self.policy.feature}: ranks with the same layers ran steps of different sizes: nothing is "
                      "decided from those")  # fmt: skip
        return waits

    def _decide(self, facts: Facts, decide: Callable[[], None]) -> None:
        """Of ranks that are together the leader decides, once, and all follow: what each knows by itself (plans that
        did not fit, what it tried while it was alone) may differ. Raises NoPlan."""
        decided: tuple[dict[str, Any], str] | None = None
        if self.peers.leader or not facts.together:
            error = ""
            try:
                decide()
            except NoPlan as none:
                error = str(none)
            decided = {name: getattr(self, name) for name in _DECIDED}, error
        if facts.together:
            decided = self.peers.share(decided)
        assert decided is not None
        state, error = decided
        for name, value in state.items():
            setattr(self, name, value)
        self._tell_lines()
        if error:
            raise NoPlan(error)
        if self.phase is Phase.STABLE and self._kept_try is not None:
            self.shown = self.tries[self._kept_try].step

    # ---- WarmUp
    def _plan_afresh(self, trace: StepTrace) -> bool:
        self.peak_bytes = max(memory_curve(trace, ()))
        self._spread_bytes = max(self._spread_bytes, self._timing.beyond(trace.peak_bytes))
        soft, _ = self.policy.targets(self.capacity_bytes, self.peak_bytes)
        # The first step allocates optimizer state: its memory is not that of the next.
        unready = not trace.has_optimizer_state or self.steps < self.policy.warmup_step
        own = self.peak_bytes + self._spread_bytes - soft
        facts = self._agree(unready, 0, own, self.peak_bytes, trace.step_ms)
        if facts.unready or self._must_wait(facts):
            return False
        self._afresh, self._extra_bytes, self._peer_lacks_more = False, 0, max(0.0, facts.over - own)
        self._learned_reserve_bytes = None
        self.floor = floor(trace, self.policy.verbs)
        candidates = [record.nbytes for record in trace.saved if is_candidate(record)]
        self.warm_up = WarmUp(
            self.steps, trace.evicted_bytes, trace.stall_ms, len(trace.saved), len(candidates), sum(candidates),
            trace.peak_bytes,
        )  # fmt: skip
        self._decide(facts, lambda: self._first_plan(trace, facts))
        return True

    def _first_plan(self, trace: StepTrace, facts: Facts) -> None:
        self._kept_try, self._accepted_trouble = None, 0
        self._replan(trace, facts)
        if self.plan is not None and digest(self.plan) in self.failed:
            self._extra_bytes = self._reserve()
            with contextlib.suppress(NoPlan):
                self._replan(trace, facts)
        assert self.plan is not None and self.floor is not None
        if self.plan.text:
            self._enter(Phase.SEARCH, self.plan.text)
        elif facts.over <= self._spread_bytes and not self.policy.moves_all:
            self._enter(Phase.STABLE, f"everything fits: nothing to swap, floor {format_bytes(self.floor.bytes)}")
        else:
            self._enter(Phase.STABLE, "nothing can be moved")

    def _replan(self, trace: StepTrace, facts: Facts) -> None:
        """Raises NoPlan. Where peers are together it is for the one that lacks most."""
        soft, hard = self.policy.targets(self.capacity_bytes, self.peak_bytes)
        # What a peer lacks more than we do. (An expert's share of the tokens differs from rank to rank.)
        shift = -int(self._peer_lacks_more) if facts.together else 0
        if self._learned_reserve_bytes is not None:
            soft = hard - self._learned_reserve_bytes
        spread = max(self._spread_bytes, max(self._saved_bytes) - min(self._saved_bytes))
        self.target_bytes = min(soft, hard - spread)
        # The reserve and what tries have added are caution, not need: without is still better than not at all.
        budgets = sorted({each + shift for each in (self.target_bytes - self._extra_bytes, soft, hard)})
        host = None if self.host_bytes is None else int(-facts.host_missing)
        planned = make_plan(trace, self.policy, budgets, host)
        if planned.plan is None:
            raise NoPlan(planned.text)
        if planned.text and planned.text != self._told:
            self._told = planned.text
            self._lines.append(f"{self.policy.feature}: {planned.text}")
        self.plan = planned.plan

    def _tell_lines(self) -> None:
        while self._lines:
            self.tell(self._lines.pop(0))

    def _enter(self, phase: Phase, why: str) -> None:
        self._lines.append(
            f"{self.policy.feature}: {self.phase.value} -> {phase.value} at step {self.steps}, "
            + (f"peak {format_bytes(self.peak_bytes)}, " if self.peak_bytes else "")  # not known of a given plan
            + f"target {format_bytes(self.target_bytes)}; {why}"
        )
        self.phase = phase

    # ---- SearchPolicy
    def _tried(self, stats: StepStats, trace: StepTrace) -> bool:
        assert self.plan is not None and self.shown is not None
        peak = max(self._timing.peak_bytes, trace.peak_bytes)
        _, most = self.policy.targets(self.capacity_bytes, self.peak_bytes)
        over = 0 if self.policy.moves_all else max(0, peak - most)
        took_ms = trace.step_ms if self._timing.ms is None else self._timing.ms
        facts = self._agree(0, self._trouble(stats), over, peak, took_ms)
        if self._must_wait(facts):
            return False
        trouble, over = int(facts.trouble), int(facts.over)
        how = facts.step_ms, self.shown, self._timing.error_share
        self.tries.append(Try(self.plan, trouble, over, int(facts.peak), *how))
        if trouble or over:
            self.failed.add(digest(self.plan))
        self._decide(facts, lambda: self._go_on_or_end(trace, facts))
        return True

    def _go_on_or_end(self, trace: StepTrace, facts: Facts) -> None:
        most = MAX_TRIES if self.policy.tries is None else self.policy.tries
        if len(self.tries) < most and (self._again() or self._next_try(trace, facts)):
            return
        best = best_of(self.tries)
        self.plan, self._accepted_trouble = best.plan, best.trouble
        self._kept_try = next(number for number, tried in enumerate(self.tries) if tried is best)
        if self.policy.tries is not None and len(self.tries) < self.policy.tries:
            return  # nothing else to try, but the setting says when Stable begins
        self._enter(
            Phase.STABLE,
            f"best of {len(self.tries)} tries: {best.step_ms:.0f} ms, peak {format_bytes(best.peak_bytes)}, "
            + best.plan.text
            + (f", {best.trouble} evictions and loads on demand" if best.trouble else "")
            + (f", {format_bytes(best.over_bytes)} ABOVE the target" if best.over_bytes else ""),
        )

    def _again(self) -> bool:
        """The same plan once more: it was without fault and much slower than it promised."""
        *before, last = self.tries
        first = all(tried.plan is not last.plan for tried in before)
        return first and not self._timing.often and not last.rank[0] and last.surprise > SURPRISE_SHARE

    def _next_try(self, trace: StepTrace, facts: Facts) -> bool:
        """Plan again, from the try's own trace: it knows the times better. False if there is nothing else to try."""
        tried = [each.plan.decisions for each in self.tries]
        self._learned_reserve_bytes = self._learn_reserve(facts)
        if facts.over and (promised := self.tries[-1].plan.prediction):  # it did not promise to need all it might
            self._extra_bytes += max(0, self.tries[-1].plan.budget_bytes - promised.peak)
            self._extra_bytes += self._timing.beyond(trace.peak_bytes)
        for _ in range(ROOM_TRIES):
            if facts.trouble:
                # The step needed more than the plan thought, or the allocator could not use all of the room
                # (fragments). By how much, the evicted bytes do not say: one that comes back pushes out the next.
                more = self.policy.adjust_memory
                self._extra_bytes += self._reserve() + self._extra_bytes if more is None else more
            self._extra_bytes += int(facts.over)
            try:
                self._replan(trace, facts)
            except NoPlan:
                return False
            if self.plan is not None and self.plan.decisions not in tried:
                return self.policy.tries is not None or self.tries[-1].rank[0] or promises_more(self.tries, self.plan)
            if not (facts.trouble or facts.over):
                return False
        return False

    def _learn_reserve(self, facts: Facts) -> int | None:
        """Bytes to stay free: few after a try that needed what was predicted. None, after trouble: AUTO's first."""
        assert self.plan is not None
        soft, hard = self.policy.targets(self.capacity_bytes, self.peak_bytes)
        if facts.trouble or facts.over or soft == hard or self.plan.prediction is None:
            return None
        wrong = abs(int(facts.peak) - self.plan.prediction.peak)
        # For what the allocator cannot use (fragments) there is also what lies between the target and the device's end.
        least = max(0, int(hard * LEAST_RESERVE_SHARE) - (self.capacity_bytes - hard))
        return min(hard - soft, least + 2 * wrong)

    def _reserve(self) -> int:
        """Room that was left so far: what AUTO adds after trouble."""
        soft, hard = self.policy.targets(self.capacity_bytes, self.peak_bytes)
        return hard - soft or int(hard * RESERVE_SHARE)

    # ---- Stable
    def _watch(self, stats: StepStats) -> bool:
        self.stable.add(stats)
        if not self._saves:
            self._saves = stats.saves  # a loaded plan does not know
        other = abs(stats.saves - self._saves) > self.policy.op_diff_thresh * self._saves
        self.peers.worst_later(self._figures(other, trouble_of(stats, self.plan), 0, 0, 0), self.judge)
        return False

    def judge(self, facts: Facts) -> bool:
        """Of a Stable step of ours, when they are known: another shape may have run one since."""
        bad = facts.trouble > self._accepted_trouble or facts.unready
        self._bad_steps = self._bad_steps + 1 if bad and not self._must_wait(facts) else 0
        if self._bad_steps < DRIFT_STEPS << min(self._changes, MORE_PATIENT):
            return False
        self._bad_steps, self._afresh, self._changes = 0, True, self._changes + 1
        self.tries.clear()
        self.peers.forget(self.judge)
        self._enter(Phase.SEARCH, "the workload has changed" if self.peak_bytes else "the given plan does not fit")
        self._timing = self._new_timing()
        self._tell_lines()
        return True
