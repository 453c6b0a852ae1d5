"""Attempt: the best plan found for one target of memory, by a bounded amount of work. Pure; no torch.

1. *Swap alone* (scene.py): if nobody waits, that is it.
2. *Recompute*, cheapest second per byte first: a first part of the modules in the order of their prices, swaps for the
   rest, as far as that pays; and everything recomputed, which no answer is slower than.
3. *Climb*: on small traces, which are the irregular ones, single changes and exchanges.
4. *Prune* what turned out to be needless.
"""
from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, chain, combinations, islice, product
from typing import NamedTuple

from mindspeed_swap.core.lanes import NEGLIGIBLE_MS, Placed, run_lanes
from mindspeed_swap.core.recompute import Chosen
from mindspeed_swap.core.scene import Order, Stage
from mindspeed_swap.core.simulate import plain_step_ms
from mindspeed_swap.core.windows import link_rates

# Work per target, in points and tensors visited per sweep: it bounds the time of an answer (seconds) for any trace.
SEARCH_WORK = 40_000
# Sets of modules tried per target until it is known with how many of them nothing waits: at least, at most, and one in
# so many tries.
FEWEST_SETS, SETS, TRIES_PER_SET = 3, 8, 4
# Ways to swap that are tried with each: one per direction of the sweeps. Which is better depends on the schedule.
FIRST_WAYS = 2
# Of those known then, that every way to swap is tried with. And with which ends are moved, last.
BEST_SETS = 2
# What waits for a full lane would not wait if about as much left as the lane carries meanwhile. A little less: what is
# still missing shows, and the next module may be of a kind that costs far more.
FIRST_PACE = 0.9
# With fewer tries one way to choose has to do, and no search follows.
FEWEST_TRIES = 10
# What moving single ends must gain, of the step: they then have no headroom left.
SHIFT_SHARE = 0.002
# Points visited by dropping single tensors, per target.
PRUNE_WORK = 4_000_000
# A copy costs the host as much time as the link needs for so many bytes (10 us at 55 GB/s): fewer, larger ones.
COPY_BYTES = 500_000


class Rank(NamedTuple):
    extra_ms: float
    moved_bytes: int  # and so many more per copy
    stall_ms: float  # of the extra: waits for copies


_UNKNOWN = Rank(float("inf"), 0, float("inf"))


def _better(one: Rank, other: Rank) -> bool:
    faster = other.extra_ms - one.extra_ms
    return faster > NEGLIGIBLE_MS or (faster > -NEGLIGIBLE_MS and one.moved_bytes < other.moved_bytes)


class Corner(NamedTuple):
    """A plan that needs no choice: everything of a kind."""

    flags: tuple[bool, ...]
    placed: list[Placed]
    curve: list[int]
    peak: int


def corners(stage: Stage) -> list[Corner]:
    """All swapped; all recomputed; all recomputed and what is left swapped."""
    found: list[Corner] = []
    for flags in dict.fromkeys((stage.nothing, stage.full_without_chains, stage.full)):
        scene = stage.scene(flags)
        for placed in [scene.farthest] + ([[]] if any(flags) else []):
            curve = scene.curve(placed)
            found.append(Corner(flags, placed, curve, max(curve)))
    return found


def tries(stage: Stage) -> int:
    """How many choices a target is worth."""
    return max(1, SEARCH_WORK // (len(stage.plain.keep) + 2 * len(stage.plain.jobs)))


class Attempt:
    """Least extra time, then fewest bytes moved and fewest copies. Of ``corners`` one must fit into ``target``."""

    def __init__(self, stage: Stage, corners: list[Corner], target: int) -> None:
        self.stage = stage
        self.target = target
        self.least = min(corner.peak for corner in corners)
        self._rank = _UNKNOWN
        self._with: dict[tuple[bool, ...], tuple[Rank, list[Placed]]] = {}  # the best with each set of modules
        self._tries = tries(stage)
        self._large = self._tries < FEWEST_TRIES
        fitting = [corner for corner in corners if corner.peak <= target]
        self.flags, self.placed, self.curve = fitting[0].flags, fitting[0].placed, fitting[0].curve
        alone = self._swap(stage.nothing).stall_ms
        if self.extra_ms > NEGLIGIBLE_MS:
            for corner in fitting:
                if not corner.placed or not self._large:
                    self._take(corner.flags, corner.placed, corner.curve)
            order, other = stage.order(target), stage.order(target, largest=False)
            looked_at = slice(self._recompute(alone, order))
            if order[looked_at] != other[looked_at] and not (self._large and any(self.flags)):
                self._recompute(alone, other)
            if not self._large:
                self._search()
                self._shift()
        self._prune()
        self.peak = max(self.curve)

    # -- taking -------------------------------------------------------------------------------------------------------

    def _look(self, flags: tuple[bool, ...], wanted: set[int]) -> Rank:
        """Take this choice if it fits and is better."""
        self._tries -= 1
        scene = self.stage.scene(flags)
        placed = scene.lay_out(self.target, wanted)
        curve = scene.curve(placed)
        return self._take(flags, placed, curve) if max(curve) <= self.target else _UNKNOWN

    def _take(self, flags: tuple[bool, ...], placed: list[Placed], curve: list[int]) -> Rank:
        moved = sum(self.stage.trace.saved[item.record].nbytes for item in placed) + COPY_BYTES * len(placed)
        timeline = run_lanes(self.stage.trace, placed, self.stage.scene(flags).modules)
        rank = Rank(timeline.extra_ms, moved, timeline.stall_ms)
        if _better(rank, self._with.get(flags, (_UNKNOWN, placed))[0]):
            self._with[flags] = rank, placed
        if _better(rank, self._rank):
            self.flags, self.placed, self.curve, self._rank = flags, placed, curve, rank
        return rank

    @property
    def extra_ms(self) -> float:
        return self._rank.extra_ms

    # -- swap and recompute -------------------------------------------------------------------------------------------

    def _swap(self, flags: tuple[bool, ...], ways: int | None = None) -> Rank:
        """Several ways to swap with these modules. Returns the fastest."""
        choices = self.stage.scene(flags).choices(self.target, self.least, int(self._large))
        spent = self.stage.spent_ms(flags)
        best = _UNKNOWN
        for wanted in islice(choices, 1 if self._large else ways):
            best = min(best, self._look(flags, wanted))
            if best.extra_ms <= spent + NEGLIGIBLE_MS:  # moves cost nothing
                break
        return best

    def _recompute(self, wait_ms: float, order: Order) -> int:
        """First parts of the price order. With each more of one kind about as much less is waited for, so what is best
        lies where nothing waits any more, or where a kind begins that costs more than the waits that it saves.
        ``wait_ms``: that of swap alone. Returns how many of the order it went to.

        What moves take the host is no wait: it is left however much is recomputed, as long as anything moves."""
        stage, kinds = self.stage, [self.stage.modules[m].record.key.name for m, _ in order]
        gained = [0, *accumulate(nbytes for _, nbytes in order)]
        seen: dict[int, Rank] = {}  # by how many are recomputed, with the first ways to swap
        sets = FEWEST_SETS if self._large else max(FEWEST_SETS, min(SETS, self._tries // TRIES_PER_SET))

        def waits(k: int) -> float:
            """Endless where that does not fit."""
            if k not in seen:
                seen[k] = self._swap(stage.first(order, k), ways=FIRST_WAYS)
            return seen[k].stall_ms

        def walk(more: bool) -> int:
            """``more``: what does not fit is followed by what recomputes more, else by what recomputes less."""
            low, high = 0, len(order) + 1  # something waits; nothing does, or that is not known
            pace = FIRST_PACE * link_rates(stage.trace)[0]  # bytes to free per ms of wait
            waited = left = wait_ms
            for number in range(sets):
                if high - low <= 1:
                    break
                guess = (low + high) // 2
                if left > NEGLIGIBLE_MS and waited < _UNKNOWN.stall_ms and (number < FEWEST_SETS or number % 2):
                    guess = bisect_left(gained, gained[low] + waited * pace)
                k = max(low + 1, min(high - 1, guess))
                left = waits(k)
                if left > NEGLIGIBLE_MS and (more or left < _UNKNOWN.stall_ms):
                    if left < waited < _UNKNOWN.stall_ms:
                        pace = (gained[k] - gained[low]) / (waited - left)
                    low, waited = k, left
                else:
                    high = k
            return high

        high = walk(True)
        if not self._large:
            if wait_ms < _UNKNOWN.stall_ms and _UNKNOWN in seen.values():
                walk(False)  # swap alone fits, so fewer may: less comes back at once
            for k in [k for k in range(1, min(high, len(order))) if kinds[k] != kinds[k - 1]][-BEST_SETS:]:
                waits(k)
            for k in sorted(seen, key=lambda k: seen[k].extra_ms)[:BEST_SETS]:
                self._swap(stage.first(order, k))
        return high

    def _search(self) -> None:
        """Of few tensors and modules all sets. Else climb from the best so far, from everything, and from everything
        but one tensor of the best."""
        stage = self.stage
        everything = {job.record for job in stage.plain.jobs}
        if 2 ** (len(everything) + len(stage.modules)) <= self._tries:
            for on in product((False, True), repeat=len(stage.modules)):
                flags = tuple(Chosen(stage.modules, on).flags)
                left = [job.record for job in stage.scene(flags).jobs] if flags == on else []  # else two conflict
                for some in chain.from_iterable(combinations(left, count) for count in range(1, len(left) + 1)):
                    self._look(flags, set(some))
            return
        placed = {item.record for item in self.placed}
        starts = [(self.flags, placed), (stage.nothing, everything), (stage.full, everything)]
        for flags, wanted in chain(starts, ((self.flags, everything - {number}) for number in sorted(placed))):
            if self._tries <= 0:
                break
            self._climb(flags, wanted)

    def _climb(self, flags: tuple[bool, ...], wanted: set[int]) -> None:
        """From a choice on add, drop or exchange single tensors and modules while that helps and tries last."""
        stage = self.stage
        items = [(False, job.record) for job in stage.plain.jobs] + [(True, m) for m in range(len(stage.modules))]
        here, improved = self._look(flags, wanted), True
        while improved:
            improved = False
            for one, other in chain(((item, None) for item in items), combinations(items, 2)):
                if self._tries <= 0 or self.extra_ms <= NEGLIGIBLE_MS:
                    return
                on = [flags[n] if is_module else n in wanted for is_module, n in (one, other or one)]
                if other and on[0] == on[1]:
                    continue
                changed, modules = set(wanted), Chosen(stage.modules, flags)
                for (is_module, n), was in zip((one, other) if other else (one,), on, strict=False):
                    if not is_module:
                        changed ^= {n}
                    elif not was:
                        modules.add(n)
                    elif modules.flags[n]:  # the other one may have replaced it
                        modules.remove(n)
                rank = self._look(tuple(modules.flags), changed)
                if _better(rank, here):
                    flags, wanted, here, improved = tuple(modules.flags), changed, rank, True

    def _shift(self) -> None:
        """The last word on when things leave and come back, where it gains enough."""
        best = sorted(self._with.items(), key=lambda item: item[1][0])[:BEST_SETS]
        for flags, (_, there) in best:
            scene = self.stage.scene(flags)
            placed = scene.shifted(there, self.target, tries(self.stage))
            spent = run_lanes(self.stage.trace, placed, scene.modules).extra_ms
            if spent < self.extra_ms - SHIFT_SHARE * plain_step_ms(self.stage.trace):
                self._take(flags, placed, scene.curve(placed))

    # -- pruning ------------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop what memory can do without: the most expensive modules first, then least bytes times time first."""
        stage, trace = self.stage, self.stage.trace
        room = [self.target - value for value in self.curve]
        flags = list(self.flags)
        for m in sorted((m for m, on in enumerate(flags) if on), key=lambda m: -stage.modules[m].record.forward_ms):
            if _fill(room, *stage.modules[m].hull, stage.modules[m].freed_bytes):
                flags[m] = False
        if tuple(flags) != self.flags:
            curve = stage.scene(tuple(flags)).curve(self.placed)
            if max(curve) <= self.target:
                self._take(tuple(flags), self.placed, curve)
            room = [self.target - value for value in self.curve]
        sizes = [(trace.saved[item.record].nbytes * (item.prefetch - item.release), item) for item in self.placed]
        dropped: set[int] = set()
        work = PRUNE_WORK
        for _, (number, release, prefetch) in sorted(sizes):
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
