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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, islice

from mindspeed_swap.core.choose import choose
from mindspeed_swap.core.plan import Plan, Prediction, Swap
from mindspeed_swap.core.simulate import NEGLIGIBLE_MS, Placed, memory_curve, phase_peaks, plain_step_ms, run_lanes
from mindspeed_swap.core.timing import NOT_NEEDED, lay_out
from mindspeed_swap.core.trace import EXIT, FORWARD, OUTSIDE, StepTrace
from mindspeed_swap.core.windows import RangeMin, View, Window, is_candidate, windows
from mindspeed_swap.units import format_bytes

# A copy back is planned to be over this share of its duration before it is read: the measured bandwidth varies by about
# that much when both lanes are busy (55 against 47 GB/s).
PREFETCH_HEADROOM = 0.2
# Work per target, in points and tensors visited per sweep: it bounds the time of an answer (seconds) for any trace.
# Small traces, which are the irregular ones, get a local search out of it.
SEARCH_WORK = 100_000
# Tensors looked at for dropping, per target: each costs a pass over its window.
PRUNE_LIMIT = 200
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
        order = sorted(self.jobs, key=lambda job: (job.prefetch, job.read, job.record))
        self.farthest = [Placed(job.record, job.release, job.prefetch) for job in order]
        self.least = self.curve(self.farthest)

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

    def curve(self, placed: Iterable[Placed]) -> list[int]:
        """``memory_curve``, quicker, for legal swaps."""
        delta = [0] * (len(self.keep) + 1)
        saved = self.trace.saved
        for number, release, prefetch in placed:
            nbytes = saved[number].nbytes
            delta[release + 1] -= nbytes
            delta[prefetch + 1] += nbytes
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
        lower one leaves the common path downwards, to peaks below those that the higher one goes on to.

        A target within the budget fits by construction, so it is planned only when it comes to the answer: the taken
        node with the highest peak, which a later target decides unless its peak is below an earlier target."""
        low, high = max(self.least), max(self.keep)
        taken = [low]
        plans: dict[int, tuple[int, list[Placed]]] = {}
        for _ in range(TREE_DEPTH):
            if high - low <= 1:
                break
            target = (low + high) // 2
            if target > budget:
                plans[target] = self._measured(target)
            if target <= budget or plans[target][0] <= budget:
                low = target
                taken.append(target)
            else:
                high = target
        best_peak, best = -1, []
        for target in reversed(taken):
            if best_peak >= target:
                break
            peak, placed = plans.get(target) or self._measured(target)
            if peak > best_peak:
                best_peak, best = peak, placed
        return best

    def _measured(self, target: int) -> tuple[int, list[Placed]]:
        placed = self.attempt(target)
        return max(self.curve(placed)), placed

    def attempt(self, target: int) -> list[Placed]:
        """A plan whose peak is at most ``target``, which must be reachable: the first without a wait, else the best
        that a bounded amount of work finds."""
        search = _Search(self, target)
        tries = max(1, SEARCH_WORK // (len(self.keep) + 2 * len(self.jobs)))
        search.compares = tries > 1
        for chosen in islice(self._choices(target, first_margin=0 if tries > 1 else 1), tries):
            search.look(chosen)
            tries -= 1
            if search.stall <= NEGLIGIBLE_MS:
                break
        else:
            search.climb(tries)
        search.prune()
        return search.placed

    def _choices(self, target: int, first_margin: int) -> Iterator[list[bool]]:
        """Ways to choose, most promising first. A copy under way frees nothing until it is over, which ``choose``
        does not see: so aim below the target by some tensors."""
        low, largest = max(self.least), max(job.nbytes for job in self.jobs)
        for ahead_first, margin in ((True, first_margin), (True, 1), (False, 0), (True, 4), (False, 2)):
            aim = max(low, target - margin * largest)
            over = [value - aim for value in self.keep] + [-1]
            chosen = [False] * len(self.jobs)
            sweeps = [(self.views[0], over), (self.views[1], over[::-1])]
            for view, excess in sweeps if ahead_first else reversed(sweeps):
                choose(view, excess, chosen)
            yield chosen
        yield [True] * len(self.jobs)

    def lay_out(self, over: list[int], chosen: list[bool]) -> list[Placed]:
        """Points for the chosen, in the order in which their copies back are queued."""
        ahead, astern = self.views
        last = len(self.keep) - 1
        releases = lay_out(ahead, over, chosen, ahead.until, 0.0)
        chosen = [release != NOT_NEEDED for release in releases]
        until = [last - release for release in releases]
        prefetches = lay_out(astern, over[::-1], chosen, until, PREFETCH_HEADROOM)
        placed = [
            (last - mirrored, job.read, job.record, release)
            for job, release, mirrored in zip(self.jobs, releases, prefetches, strict=True)
            if release != NOT_NEEDED and mirrored != NOT_NEEDED
        ]
        placed.sort()
        return [Placed(record, release, prefetch) for prefetch, _, record, release in placed]

    def _plan(self, budget: int, placed: list[Placed]) -> Plan:
        trace = self.trace
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


class _Search:
    """The best plan so far for one target: least wait, then fewest bytes moved, then fewest copies."""

    def __init__(self, solver: _Solver, target: int) -> None:
        self.solver = solver
        self.target = target
        self.over = [value - target for value in solver.keep] + [-1]
        # Always there: everything away as long as it may be. It fits, because the target is reachable.
        self.placed = solver.farthest
        self.curve = solver.least
        self.chosen = [True] * len(solver.jobs)
        self.compares = True  # False: the one choice is taken unjudged, which saves half the work
        self.rank = (float("inf"), 0, 0)  # not worth the work of knowing: the first choice that fits beats it

    @property
    def stall(self) -> float:
        return self.rank[0]

    def _rank(self, placed: list[Placed]) -> tuple[float, int, int]:
        trace = self.solver.trace
        moved = sum(trace.saved[item.record].nbytes for item in placed)
        return run_lanes(trace, placed).stall_ms, moved, len(placed)

    def look(self, chosen: list[bool]) -> bool:
        """Take this choice if it fits and is better."""
        placed = self.solver.lay_out(self.over, chosen)
        curve = self.solver.curve(placed)
        return max(curve) <= self.target and self._take(placed, chosen, curve)

    def _take(self, placed: list[Placed], chosen: list[bool], curve: list[int]) -> bool:
        rank = self.rank
        if self.compares:
            rank = self._rank(placed)
            slower = rank[0] - self.rank[0]
            if slower > NEGLIGIBLE_MS or (slower > -NEGLIGIBLE_MS and rank >= self.rank):
                return False
        self.placed, self.chosen, self.curve, self.rank = placed, chosen, curve, rank
        return True

    def climb(self, tries: int) -> None:
        """Local search: add, drop or exchange single tensors while that helps and ``tries`` last."""
        count = len(self.chosen)
        improved = True
        while improved and tries > 0:
            improved = False
            singles = ((j, j) for j in range(count))
            for a, b in chain(singles, combinations(range(count), 2)):
                if a != b and self.chosen[a] == self.chosen[b]:
                    continue
                if tries <= 0 or self.stall <= NEGLIGIBLE_MS:
                    return
                tries -= 1
                chosen = self.chosen.copy()
                chosen[a] = not chosen[a]
                if a != b:
                    chosen[b] = not chosen[b]
                improved |= self.look(chosen)

    def prune(self) -> None:
        """Drop what memory can do without, least bytes times time first."""
        solver, trace = self.solver, self.solver.trace
        room = [self.target - value for value in self.curve]
        least_room = RangeMin(room)
        times = solver.views[0].times
        candidates = [
            (trace.saved[number].nbytes * (times[prefetch] - times[release]), number, release, prefetch)
            for number, release, prefetch in self.placed
            if least_room(release + 1, prefetch) >= trace.saved[number].nbytes
        ]
        dropped: set[int] = set()
        for _, number, release, prefetch in sorted(candidates)[:PRUNE_LIMIT]:
            nbytes = trace.saved[number].nbytes
            span = slice(release + 1, prefetch + 1)
            if min(room[span]) >= nbytes:
                room[span] = [value - nbytes for value in room[span]]
                dropped.add(number)
        if dropped:
            curve = [self.target - value for value in room]
            self._take([item for item in self.placed if item.record not in dropped], self.chosen, curve)
