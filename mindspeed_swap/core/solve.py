"""Solve: the plan with the least predicted step time whose simulated peak stays under the budget. Pure; no torch.

The plan for one target of memory is found in attempt.py. The answer for a budget is found by walking a fixed binary
tree of targets (``_Solver.descend``): which targets are tried depends on the trace alone, so a lower budget never gets
a plan with a higher peak.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

from mindspeed_swap.core.attempt import FEWEST_TRIES, Attempt, Corner, corners, tries
from mindspeed_swap.core.lanes import NEGLIGIBLE_MS, Placed, run_lanes
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.recompute import Module, as_they_run, full_recompute, modules_of
from mindspeed_swap.core.scene import Stage
from mindspeed_swap.core.simulate import memory_curve, outcome, plain_step_ms, plan_of, predicted
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, StepTrace
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.units import format_bytes

KEEP, SWAP, RECOMPUTE = "keep", "swap", "recompute"
KEEP_SWAP = (KEEP, SWAP)
ALL_VERBS = (KEEP, SWAP, RECOMPUTE)

# Targets tried per answer. Each halves the step of the tree: 2^-12 of what can be moved is 4 MB of 15 GB.
TREE_DEPTH = 12
# Targets, evenly spaced, whose plans others above them begin with.
ANCHORS = 16


@dataclass(frozen=True, slots=True)
class Floor:
    """What a rank needs at least, and the one rule for stating it: ``bytes`` is the floor. It is the sum of the four
    parts, or ``reachable_bytes`` where some phase needs more than that (temporaries of a foreach optimizer are in no
    part), so that a plan for it always exists; but no more than the step takes with everything kept.

    Plans exist below it, down to ``reachable_bytes``, and are not refused. But there each tensor is read the moment it
    is back and nothing overlaps: with Llama-7B-shaped layers steps take 1.5 to 2.2 times as long, and 1.0 to 1.12 times
    at the floor (all verbs). The sum has two layers in it because one works while the other is on its way; that makes
    the difference: 3-10 % where parameters and optimizer state are most of the memory, 10-40 % for models of toy size
    and for very long sequences."""

    bytes: int
    phase: str  # where ``reachable_bytes`` is reached
    static_bytes: int
    unmovable_bytes: int  # held at the end of a microbatch's forward, and not movable
    layers_bytes: int  # movable bytes of the two largest layers
    transient_bytes: int  # largest request in any interval
    reachable_bytes: int  # simulated peak when everything that may leave is away as long as it may be


class Infeasible(ValueError):
    """No plan fits the budget."""

    def __init__(self, floor: Floor, message: str) -> None:
        super().__init__(message)
        self.floor = floor


def floor(trace: StepTrace, verbs: Collection[str] = KEEP_SWAP, host_budget_bytes: int | None = None) -> Floor:
    """Raises ValueError for a trace without points."""
    return _Solver(trace, verbs, host_budget_bytes).floor()


def solve(
    trace: StepTrace, budget_bytes: int, verbs: Collection[str] = KEEP_SWAP, host_budget_bytes: int | None = None
) -> Plan:
    """The plan for ``budget_bytes`` (peak of allocated bytes, all phases); empty when everything fits.

    ``verbs``: what whoever executes the plan can do; KEEP_SWAP or ALL_VERBS. ``host_budget_bytes``: most bytes on the
    host at once. Raises Infeasible when no plan fits, ValueError for a trace without points or, where something has
    to be swapped, without measured bandwidths.
    """
    return _Solver(trace, verbs, host_budget_bytes).solve(budget_bytes)


def told_of(trace: StepTrace, plan: Plan, verbs: Collection[str] = KEEP_SWAP) -> Plan:
    """A plan of ``solve`` with what it is predicted to do in another step, of the same tensors and points."""
    told = predicted(trace, plan)
    return told if RECOMPUTE in verbs else _with_full_recompute(trace, told)


def _full_recompute(trace: StepTrace) -> tuple[list[Module], int]:
    """Everything recomputed, and its peak."""
    modules = modules_of(trace)
    sets = [as_they_run(trace, full_recompute(modules, chains=chains)) for chains in (True, False)]
    return min(((each, max(memory_curve(trace, (), each))) for each in sets), key=lambda found: found[1])


def _with_full_recompute(trace: StepTrace, plan: Plan) -> Plan:
    """It says how long a step would take that recomputes everything instead, where that fits and is faster."""
    prediction, plain_ms = plan.prediction, plain_step_ms(trace)
    assert prediction is not None
    if prediction.step_ms - plain_ms <= NEGLIGIBLE_MS:
        return plan
    modules, peak = _full_recompute(trace)
    took_ms = plain_ms + sum(module.record.forward_ms for module in modules)
    if not modules or peak > plan.budget_bytes or took_ms >= prediction.step_ms:
        return plan
    return replace(plan, prediction=replace(prediction, faster_recompute_ms=took_ms))


class _Solver:
    def __init__(self, trace: StepTrace, verbs: Collection[str] = KEEP_SWAP, host_budget: int | None = None) -> None:
        if not trace.points:
            raise ValueError("the trace has no points: nothing was recorded")
        self.trace = trace
        self.recomputes = RECOMPUTE in verbs
        self.host_budget = host_budget
        self.stage = Stage(trace, swap=SWAP in verbs, recompute=self.recomputes, host_budget=host_budget)
        self.keep = self.stage.plain.keep
        self.corners: list[Corner] = corners(self.stage)
        self.least = min(self.corners, key=lambda corner: corner.peak)
        self._attempts: dict[int, Attempt] = {}
        self._lower: dict[int, Attempt] = {}

    def solve(self, budget: int) -> Plan:
        trace, stage = self.trace, self.stage
        if max(self.keep) <= budget:
            return self._plan(budget, stage.nothing, [])
        if stage.plain.jobs and min(trace.d2h_bytes_per_ms, trace.h2d_bytes_per_ms) <= 0:
            raise ValueError("the trace has no measured bandwidth; record a step first")
        if self.least.peak > budget:
            raise self._infeasible(budget)
        found = self.descend(budget)
        return self._plan(budget, found.flags, self._relaxed(found))

    def _relaxed(self, found: Attempt) -> list[Placed]:
        """What it swaps, with headroom where that costs neither time nor memory."""
        scene = self.stage.scene(found.flags)
        for later, sooner in ((True, True), (True, False), (False, True)):
            placed = scene.relaxed(found.placed, found.peak, later, sooner)
            if run_lanes(self.trace, placed, scene.modules).extra_ms <= found.extra_ms + NEGLIGIBLE_MS:
                return placed
        return found.placed

    def attempt(self, target: int) -> Attempt:
        if target not in self._attempts:
            self._attempts[target] = Attempt(self.stage, [*self.corners, *self._anchor(target)], target)
        return self._attempts[target]

    def _anchor(self, target: int) -> list[Corner]:
        """The plan of the next lower one of ANCHORS targets, if one is below. What is found for a target is not always
        found for a higher one, though it fits there too. Which target depends on this one alone, see ``descend``."""
        if tries(self.stage) < FEWEST_TRIES:
            return []
        low, high = self.least.peak, max(self.keep)
        step = max(1, (high - low) // ANCHORS)
        lower = low + (target - low) // step * step
        if lower <= low:
            return []
        if lower not in self._lower:
            self._lower[lower] = Attempt(self.stage, self.corners, lower)
        found = self._lower[lower]
        return [Corner(found.flags, found.placed, found.curve, found.peak)]

    def descend(self, budget: int) -> Attempt:
        """Walk the tree of targets between what is reachable and what keeping everything takes. A node's plan is taken
        when its peak fits the budget, and only plans with a higher peak are looked for after it: so of two budgets the
        lower one leaves the common path downwards, to peaks below those that the higher one goes on to.

        The first node is the peak of recomputing everything: every plan from there on was compared with that.

        A target within the budget fits by construction, so it is planned only when it comes to the answer: the taken
        node with the highest peak, which a later target decides unless its peak is below an earlier target. Nor does a
        target far above the budget need a plan: pruning leaves less room than the largest thing that is moved. Where a
        plan takes long, targets lie further apart than that, and none above the budget is looked at."""
        low, high = self.least.peak, max(self.keep)
        sizes = [job.nbytes for job in self.stage.plain.jobs] + [m.freed_bytes for m in self.stage.modules]
        spare = max(sizes, default=0)
        finest = 1
        if tries(self.stage) == 1:
            finest, spare = 2 * spare, 0
        full = next((corner.peak for corner in self.corners if not corner.placed and low < corner.peak < high), None)
        taken = [low]
        for depth in range(TREE_DEPTH):
            if high - low <= finest:
                break
            first = depth == 0 and full is not None
            target = full if first and full is not None else (low + high) // 2
            if target <= budget or (target - spare <= budget and self.attempt(target).peak <= budget):
                low = target
                taken = [target] if first else [*taken, target]
            else:
                high = target
        best = self.attempt(taken.pop())
        for target in reversed(taken):
            if best.peak >= target:
                break
            best = max(best, self.attempt(target), key=lambda attempt: attempt.peak)
        return best

    def _plan(self, budget: int, flags: tuple[bool, ...], placed: list[Placed]) -> Plan:
        trace, modules = self.trace, self.stage.scene(flags).modules
        prediction = outcome(trace, placed, modules).prediction
        plan = replace(plan_of(trace, budget, placed, modules), prediction=prediction)
        return plan if self.recomputes else _with_full_recompute(trace, plan)

    # -- what cannot be had -------------------------------------------------------------------------------------------

    def _infeasible(self, budget: int) -> Infeasible:
        bound = self.floor()
        reason = f"{len(self.stage.plain.jobs)} tensors may be swapped"
        if self.recomputes:
            reason += f", {len(self.stage.modules)} module calls recomputed"
        elif _full_recompute(self.trace)[1] <= budget:
            reason += "; recomputing every layer would fit"
        if self.host_budget is not None and _Solver(self.trace, KEEP_SWAP).least.peak < bound.reachable_bytes:
            reason += f"; the host budget of {format_bytes(self.host_budget)} limits them"
        message = (
            f"infeasible: the floor is {format_bytes(bound.bytes)} with two layers at a time, and no plan, however "
            f"slow, is below {format_bytes(bound.reachable_bytes)}, reached in phase {bound.phase} "
            f"(budget {format_bytes(budget)}; {reason})"
        )
        return Infeasible(bound, message)

    def floor(self) -> Floor:
        trace = self.trace
        curve, reachable = self.least.curve, self.least.peak
        phase = trace.points[curve.index(reachable)].position.phase
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
        activations = trace.static_bytes + unmovable + two + transient
        least = min(max(activations, reachable), max(self.keep))
        return Floor(least, phase, trace.static_bytes, unmovable, two, transient, reachable)
