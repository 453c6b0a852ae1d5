"""Attempt: the best plan found for one target of memory, by a bounded amount of work. Pure; no torch.

1. *Swap alone* (scene.py): if nobody waits, that is it.
2. *Recompute*, cheapest second per byte first: a first part of the modules in the order of their prices, swaps for the
   rest, as far as that pays; and everything recomputed, which no answer is slower than.
3. *Climb*: on small traces, which are the irregular ones, single changes and exchanges.
4. *Prune* what turned out to be needless.
"""
from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, islice

from mindspeed_swap.core.lanes import NEGLIGIBLE_MS, Placed, run_lanes
from mindspeed_swap.core.recompute import Chosen
from mindspeed_swap.core.scene import Stage
from mindspeed_swap.core.windows import RangeMin, link_rates

# Work per target, in points and tensors visited per sweep: it bounds the time of an answer (seconds) for any trace.
SEARCH_WORK = 100_000
# Sets of modules tried per target: at least, and one in so many tries.
FEWEST_SETS, TRIES_PER_SET = 2, 20
# Points visited by dropping single tensors, per target.
PRUNE_WORK = 4_000_000
# A copy costs the host as much time as the link needs for so many bytes (10 us at 55 GB/s): fewer, larger ones.
COPY_BYTES = 500_000

_UNKNOWN = float("inf")


@dataclass(frozen=True, slots=True)
class Corner:
    """A plan that needs no choice: everything of a kind."""

    flags: tuple[bool, ...]
    placed: list[Placed]
    curve: list[int]
    peak: int


def corners(stage: Stage) -> list[Corner]:
    """All swapped; all recomputed; all recomputed and what is left swapped."""
    found: list[Corner] = []
    for flags in dict.fromkeys((stage.nothing, stage.full)):
        scene = stage.scene(flags)
        for placed in [scene.farthest] + ([[]] if any(flags) else []):
            curve = scene.curve(placed)
            found.append(Corner(flags, placed, curve, max(curve)))
    return found


class Attempt:
    """Least extra time, then fewest bytes moved and fewest copies. Of ``corners`` one must fit into ``target``."""

    def __init__(self, stage: Stage, corners: list[Corner], target: int) -> None:
        self.stage = stage
        self.target = target
        self.least = min(corner.peak for corner in corners)
        self.extra_ms = _UNKNOWN
        self._moved = 0
        self._tries = max(1, SEARCH_WORK // (len(stage.plain.keep) + 2 * len(stage.plain.jobs)))
        self._large = self._tries == 1
        self._compares = bool(stage.modules) or not self._large  # else the one choice is taken unjudged: half the work
        fitting = [corner for corner in corners if corner.peak <= target]
        self.flags, self.placed, self.curve = fitting[0].flags, fitting[0].placed, fitting[0].curve
        self._swap(stage.nothing)
        if self._compares and self.extra_ms > NEGLIGIBLE_MS:
            for corner in fitting:
                if not corner.placed or not self._large:
                    self._take(corner.flags, corner.placed, corner.curve)
            self._recompute()
            self._climb()
        self._prune()
        self.peak = max(self.curve)

    # -- taking -------------------------------------------------------------------------------------------------------

    def _look(self, flags: tuple[bool, ...], wanted: set[int]) -> float:
        """Take this choice if it fits and is better. Returns its extra time."""
        self._tries -= 1
        scene = self.stage.scene(flags)
        placed = scene.lay_out(self.target, wanted)
        curve = scene.curve(placed)
        return self._take(flags, placed, curve) if max(curve) <= self.target else _UNKNOWN

    def _take(self, flags: tuple[bool, ...], placed: list[Placed], curve: list[int]) -> float:
        trace = self.stage.trace
        extra_ms, moved = self.extra_ms, self._moved
        if self._compares:
            extra_ms = run_lanes(trace, placed, self.stage.members(flags)).extra_ms
            moved = sum(trace.saved[item.record].nbytes for item in placed) + COPY_BYTES * len(placed)
            slower = extra_ms - self.extra_ms
            if slower > NEGLIGIBLE_MS or (slower > -NEGLIGIBLE_MS and moved >= self._moved):
                return extra_ms
        self.flags, self.placed, self.curve = flags, placed, curve
        self.extra_ms, self._moved = extra_ms, moved
        return extra_ms

    # -- swap and recompute -------------------------------------------------------------------------------------------

    def _swap(self, flags: tuple[bool, ...]) -> float:
        """Several ways to swap with these modules. Returns the least extra time among them."""
        choices = self.stage.scene(flags).choices(self.target, self.least, int(self._large))
        best = _UNKNOWN
        for wanted in islice(choices, 1 if self._large else None):
            best = min(best, self._look(flags, wanted))
            if self.extra_ms <= NEGLIGIBLE_MS:
                break
        return best

    def _recompute(self) -> None:
        """First parts of the price order: each of them if they are few, else where the waits that are left point to."""
        stage, count = self.stage, len(self.stage.order)
        sets = max(FEWEST_SETS, self._tries // TRIES_PER_SET)
        gained = [0, *accumulate(nbytes for _, nbytes in stage.order)]
        rate = link_rates(stage.trace)[0]
        low, high, wait_ms = 0, count, self.extra_ms
        for k in range(1, sets + 1):
            if low >= high:
                break
            if count > sets:
                if wait_ms > NEGLIGIBLE_MS:
                    k = max(low + 1, min(high, bisect_left(gained, gained[low] + wait_ms * rate)))
                else:
                    k = (low + high + 1) // 2
            flags = stage.first(k)
            wait_ms = self._swap(flags) - sum(module.record.forward_ms for module in stage.members(flags))
            if count <= sets or wait_ms > NEGLIGIBLE_MS:
                low = k
            else:
                high = k - 1

    def _climb(self) -> None:
        """Add, drop or exchange single tensors and modules while that helps and tries last."""
        stage = self.stage
        items = [(False, job.record) for job in stage.plain.jobs] + [(True, m) for m in range(len(stage.modules))]
        improved = True
        while improved:
            improved = False
            for pair in chain(((item, item) for item in items), combinations(items, 2)):
                if self._tries <= 0 or self.extra_ms <= NEGLIGIBLE_MS:
                    return
                before = self.extra_ms, self._moved
                wanted = {item.record for item in self.placed}
                chosen = Chosen(stage.modules, self.flags)
                on = [chosen.flags[n] if is_module else n in wanted for is_module, n in pair]
                if pair[0] != pair[1] and on[0] == on[1]:
                    continue
                for (is_module, n), was in zip(pair[: 1 + (pair[0] != pair[1])], on, strict=False):
                    if not is_module:
                        wanted.symmetric_difference_update({n})
                    elif not was:
                        chosen.add(n)
                    elif chosen.flags[n]:  # the other of the pair may have replaced it
                        chosen.remove(n)
                self._look(tuple(chosen.flags), wanted)
                improved |= (self.extra_ms, self._moved) != before

    # -- pruning ------------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop what memory can do without: the most expensive modules first, then least bytes times time first."""
        stage, trace = self.stage, self.stage.trace
        room = [self.target - value for value in self.curve]
        least_room = RangeMin(room)
        flags = list(self.flags)
        for m in sorted((m for m, on in enumerate(flags) if on), key=lambda m: -stage.modules[m].record.forward_ms):
            module = stage.modules[m]
            if least_room(*module.hull) >= module.freed_bytes and _fill(room, *module.hull, module.freed_bytes):
                flags[m] = False
        if tuple(flags) != self.flags:
            curve = stage.scene(tuple(flags)).curve(self.placed)
            if max(curve) <= self.target:
                self._take(tuple(flags), self.placed, curve)
            room = [self.target - value for value in self.curve]
            least_room = RangeMin(room)
        candidates = [
            (trace.saved[item.record].nbytes * (item.prefetch - item.release), item)
            for item in self.placed
            if least_room(item.release + 1, item.prefetch) >= trace.saved[item.record].nbytes
        ]
        dropped: set[int] = set()
        work = PRUNE_WORK
        for _, (number, release, prefetch) in sorted(candidates):
            work -= prefetch - release
            if work > 0 and _fill(room, release + 1, prefetch, trace.saved[number].nbytes):
                dropped.add(number)
        if dropped:
            curve = [self.target - value for value in room]
            self._take(self.flags, [item for item in self.placed if item.record not in dropped], curve)


def _fill(room: list[int], first: int, last: int, nbytes: int) -> bool:
    """Use up room in these intervals, if there is enough."""
    span = slice(first, last + 1)
    if min(room[span]) < nbytes:
        return False
    room[span] = [value - nbytes for value in room[span]]
    return True
