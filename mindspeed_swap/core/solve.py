"""Solve: the plan with the least predicted step time whose simulated peak stays under the budget. Pure; no torch.

Verbs: keep and swap. The way, for one target of memory (``_Solver.attempt``):

1. *Choose* (choose.py): sweep the step once; where memory is short, take the tensor with the furthest next use whose
   copy still finds an idle lane (so that nobody waits), else any that helps. Sweep once more backwards in time, for the
   copies back: mirrored, they obey the same rules.
2. *Time* (timing.py): release when the copy is expected to be complete, prefetch as late as hides the copy; only where
   memory is short, earlier releases and later prefetches, at the price of a wait.
3. *Prune* what turned out to be needless.

The answer for a budget is found by walking a fixed binary tree of targets (``_Solver.descend``): which targets are
tried depends on the trace alone, so a lower budget never gets a plan with a higher peak.

A third verb (recompute) would be a second kind of window: away from its save at once, back at its read at the price of
compute instead of a lane. ``choose`` then weighs the two prices where it now takes "any that helps".
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindspeed_swap.core.choose import choose
from mindspeed_swap.core.plan import Plan, Prediction, Swap
from mindspeed_swap.core.simulate import Placed, memory_curve, phase_peaks, plain_step_ms, run_lanes
from mindspeed_swap.core.timing import NOT_NEEDED, lay_out
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, StepTrace
from mindspeed_swap.core.windows import View, Window, is_candidate, windows
from mindspeed_swap.units import format_bytes

# A copy back is planned to be over this share of its duration before it is read: the measured bandwidth varies by about
# that much when both lanes are busy (55 against 47 GB/s).
PREFETCH_HEADROOM = 0.2
# Targets tried per answer. Each halves the step of the tree: 2^-10 of what swap can move is 15 MB of 15 GB, 0.3 ms.
TREE_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Floor:
    """The least memory that a rank needs, as design.md defines it, and what the simulation of this very step says."""

    bytes: int  # the sum of the next four
    phase: str  # where ``reachable_bytes`` is reached
    static_bytes: int
    unmovable_bytes: int  # held at the end of a microbatch's forward, and not movable
    layers_bytes: int  # movable bytes of the two largest layers
    transient_bytes: int  # largest request in any interval
    reachable_bytes: int  # simulated peak when everything movable is away as long as it may be


class Infeasible(ValueError):
    """No plan fits the budget."""

    def __init__(self, floor: Floor, phase: str, message: str) -> None:
        super().__init__(message)
        self.floor = floor
        self.phase = phase
        self.message = message


def floor(trace: StepTrace) -> Floor:
    """Raises ValueError for a trace without points."""
    return _Solver(trace).floor()


def solve(trace: StepTrace, budget_bytes: int) -> Plan:
    """The plan for ``budget_bytes`` (peak of allocated bytes, all phases); empty when everything fits.

    Raises Infeasible when no plan fits, ValueError for a trace without points or without measured bandwidths.
    """
    return _Solver(trace).solve(budget_bytes)


class _Solver:
    def __init__(self, trace: StepTrace) -> None:
        if not trace.points:
            raise ValueError("the trace has no points: nothing was recorded")
        self.trace = trace
        self.keep = memory_curve(trace, ())
        self.jobs: list[Window] = windows(trace)
        self.least = self._curve([(job.release, job.prefetch) for job in self.jobs], range(len(self.jobs)))

    def solve(self, budget: int) -> Plan:
        trace = self.trace
        if max(self.keep) <= budget:
            return self._plan(budget, [])
        if min(trace.d2h_bytes_per_ms, trace.h2d_bytes_per_ms) <= 0:
            raise ValueError("the trace has no measured bandwidth; record a step first")
        if max(self.least) > budget:
            bound = self.floor()
            raise Infeasible(
                bound,
                bound.phase,
                f"infeasible: the floor is {format_bytes(bound.reachable_bytes)}, reached in phase {bound.phase} "
                f"(budget {format_bytes(budget)}; {len(self.jobs)} tensors may be swapped)",
            )
        self.views = View(trace, self.jobs, backwards=False), View(trace, self.jobs, backwards=True)
        return self._plan(budget, self.descend(budget))

    # -- memory ---------------------------------------------------------------------------------------------------

    def _curve(self, spans: Sequence[tuple[int, int]], which: Sequence[int]) -> list[int]:
        """Peak bytes by interval when ``which[k]`` is released and prefetched at ``spans[k]``."""
        delta = [0] * (len(self.keep) + 1)
        for j, (release, prefetch) in zip(which, spans, strict=True):
            delta[release + 1] -= self.jobs[j].nbytes
            delta[prefetch + 1] += self.jobs[j].nbytes
        return [held + change for held, change in zip(self.keep, accumulate(delta), strict=False)]

    def floor(self) -> Floor:
        trace = self.trace
        reachable = max(self.least)
        phase = trace.points[self.least.index(reachable)].position.phase
        candidates = [is_candidate(record) for record in trace.saved]
        layers: dict[tuple[int, ...], int] = {}
        stuck = [0] * (len(trace.points) + 1)  # saved bytes that stay, by interval
        for record, movable in zip(trace.saved, candidates, strict=True):
            if movable:
                layers[record.key[:3]] = layers.get(record.key[:3], 0) + record.nbytes
            else:
                stuck[min(record.saved + 1, len(trace.points))] += record.nbytes
                stuck[len(trace.points) if record.died is None else max(record.died, record.saved + 1)] -= record.nbytes
        largest: dict[tuple[int, ...], int] = {}
        for (_, chunk, layer), nbytes in layers.items():
            largest[chunk, layer] = max(largest.get((chunk, layer), 0), nbytes)
        stuck = list(accumulate(stuck))
        held = [
            point.allocated_bytes - point.resident_bytes - trace.static_bytes + stuck[i]
            for i, point in enumerate(trace.points)
            if point.position.phase == FORWARD and point.position[3:] == (OUTSIDE, EXIT)
        ]
        unmovable = max(0, max(held, default=max(stuck)))
        two = sum(sorted(largest.values(), reverse=True)[:2])
        transient = max(point.request_bytes for point in trace.points)
        total = trace.static_bytes + unmovable + two + transient
        return Floor(total, phase, trace.static_bytes, unmovable, two, transient, reachable)

    # -- search ---------------------------------------------------------------------------------------------------

    def descend(self, budget: int) -> list[Placed]:
        """Walk the tree of targets between what is reachable and what keeping everything takes. A node's plan is taken
        when its peak fits the budget, and only plans with a higher peak are looked for after it: so of two budgets the
        lower one leaves the common path downwards, to peaks below those that the higher one goes on to."""
        low, high = max(self.least), max(self.keep)
        best = self.attempt(low)
        best_peak = max(memory_curve(self.trace, best))
        for _ in range(TREE_DEPTH):
            if high - low <= 1:
                break
            target = (low + high) // 2
            placed = self.attempt(target)
            peak = max(memory_curve(self.trace, placed))
            if max(peak, best_peak) <= budget:
                low = target
                if peak >= best_peak:
                    best, best_peak = placed, peak
            else:
                high = target
        return best

    def attempt(self, target: int) -> list[Placed]:
        """A plan whose peak is at most ``target``, which must be reachable."""
        over = [value - target for value in self.keep] + [-1]
        chosen = [False] * len(self.jobs)
        choose(self.views[0], over, chosen)
        choose(self.views[1], over[::-1], chosen)
        return self.prune(self.lay_out(over, chosen), target)

    def lay_out(self, over: list[int], chosen: list[bool]) -> list[Placed]:
        ahead, astern = self.views
        last = len(self.keep) - 1
        releases = lay_out(ahead, over, chosen, ahead.until, 0.0)
        chosen = [release != NOT_NEEDED for release in releases]
        until = [last - release for release in releases]
        prefetches = lay_out(astern, over[::-1], chosen, until, PREFETCH_HEADROOM)
        return [
            Placed(job.record, release, last - mirrored)
            for job, release, mirrored in zip(self.jobs, releases, prefetches, strict=True)
            if release != NOT_NEEDED and mirrored != NOT_NEEDED
        ]

    def prune(self, placed: list[Placed], target: int) -> list[Placed]:
        return placed

    def _plan(self, budget: int, placed: list[Placed]) -> Plan:
        trace = self.trace
        # The order in which the copies back are queued where several prefetches share a point.
        placed = sorted(placed, key=lambda p: (p.prefetch, trace.saved[p.record].first_read or 0, p.record))
        curve = memory_curve(trace, placed)
        stall = run_lanes(trace, placed).stall_ms
        swaps = tuple(
            Swap(
                trace.saved[number].key,
                trace.saved[number].nbytes,
                trace.points[release].position,
                trace.points[prefetch].position,
            )
            for number, release, prefetch in placed
        )
        prediction = Prediction(phase_peaks(trace, curve), plain_step_ms(trace) + stall, stall)
        return Plan(trace.model, budget, swaps, prediction)
