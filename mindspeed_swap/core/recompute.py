"""Recompute: which module calls can run forward again in backward, what that frees and what it takes. Pure; no torch.

The rules: a recomputed module keeps its inputs only; what it saves goes when nobody else holds it. At the first
backward read of anything that it saved it runs again: compute spends its forward time, then everything that it saved is
resident until it dies as before. While it runs it needs the working memory of its forward (``rerun_bytes``). It does
not save what an input holds, and it does not free what others save too. Two modules of a plan free nothing in common,
and none frees what one inside it is run from: that would be kept for it. Of two that are not inside one another, one
may be run from what the other one frees, which then runs first (``as_they_run``).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from mindspeed_swap.core.trace import (
    ENTER,
    EXIT,
    FORWARD,
    OUTSIDE,
    POINTWISE,
    Key,
    ModuleKey,
    ModuleRecord,
    SavedRecord,
    StepTrace,
)

WHOLE_LAYER = "layer"
# What a call that is recomputed takes the host beyond one that is not: as it runs, to be able to run again, and then.
# And what each tensor takes of which only the name is kept. Like what is moved (lanes.py) it shows as far as the device
# waits for the host; as there it is several times what a loop of nothing else takes. (H200: about 20 calls of 3 to 20
# tensors take 17 and 28 ms of a step's forward.)
CALL_HOST_MS = 0.8
DROP_HOST_MS = 0.03
# Of the time in a forward that the device waited for the host in, so much is the host's: it is not in the way when the
# module runs again in backward, as far as the host is ahead there. (H200: a layer of experts took 6.0 ms, 3.5 of them
# so, and 2.2 when it ran again.)
HOSTS_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Module:
    """A module record in indices, as far as recomputing it frees something."""

    record: ModuleRecord
    run: int  # the point at which it runs again
    frees: tuple[int, ...]  # record numbers
    keeps: tuple[int, ...]
    away: tuple[tuple[int, int, int], ...]  # of those in ``frees``: number, first and last interval off the device
    freed_bytes: int
    working_bytes: int  # what the interval after ``run`` needs above its own base

    @property
    def hull(self) -> tuple[int, int]:
        """First and last interval in which anything is off the device."""
        return min(first for _, first, _ in self.away), self.run


def modules_of(trace: StepTrace) -> list[Module]:
    """Those that recorded modules (failing that: whole layers) could free something with, in the order of the step."""
    number = {record.key: i for i, record in enumerate(trace.saved)}
    found, dying, hosts = [], _dying(trace), _hosts_ms(trace)
    for record in trace.modules or whole_layers(trace):
        freed = [number[key] for key in record.frees]
        reads = [trace.saved[i].first_read for i in freed]
        run = min((read for read in reads if read is not None and read > record.end), default=None)
        if run is None:
            continue
        away = []
        for i in freed:
            saved = trace.saved[i]
            last = run if saved.died is None else min(run, saved.died - 1)
            if saved.sole is not None and saved.nbytes and saved.sole < last:
                away.append((i, saved.sole + 1, last))
        if away:
            freed_bytes = sum(trace.saved[i].nbytes for i, _, _ in away)
            keeps = tuple(number[key] for key in record.keeps)
            if record.rerun_bytes is None:
                frees, inputs = ([trace.saved[i] for i in numbers] for numbers in (freed, keeps))
                record = replace(record, rerun_bytes=rerun_bytes(trace, record.begin, record.end, frees, inputs))
            host_ms = CALL_HOST_MS + DROP_HOST_MS * len(freed)
            again_ms = _again_ms(trace, record, hosts)
            record = replace(record, forward_ms=again_ms + host_ms * trace.forward_waits)
            working = _working_bytes(trace, record, run, dying)
            found.append(Module(record, run, tuple(freed), keeps, tuple(away), freed_bytes, working))
    return found


def _hosts_ms(trace: StepTrace) -> list[float]:
    """Of the time up to each point, what the device waited for the host in."""
    waited = (
        max(0.0, after.time_ms - point.time_ms) if point.waits_for_host else 0.0
        for point, after in pairwise(trace.points)
    )
    return list(accumulate(waited, initial=0.0))


def _again_ms(trace: StepTrace, record: ModuleRecord, hosts_ms: Sequence[float]) -> float:
    """What running again takes."""
    if record.again_ms is not None:
        return record.again_ms
    took = trace.points[record.end].time_ms - trace.points[record.begin].time_ms
    if took <= 0.0:
        return record.forward_ms
    waited = min(1.0, (hosts_ms[record.end] - hosts_ms[record.begin]) / took)
    return record.forward_ms * (1.0 - HOSTS_SHARE * waited * (1.0 - trace.backward_waits))


def rerun_bytes(
    trace: StepTrace, begin: int, stop: int, frees: Iterable[SavedRecord], inputs: Iterable[SavedRecord],
    left_out: Sequence[tuple[int, int, list[SavedRecord]]] = (), gone: Mapping[Key, int] = MappingProxyType({}),
) -> int:  # fmt: skip
    """What running forward again from point ``begin`` to point ``stop`` needs at most, beyond what is allocated when it
    begins and all of ``frees``. ``left_out``: begins, ends and saved outputs of calls inside that do not run again.
    ``gone``: by which point saved tensors had been given up, in the step that was recorded, so that they were never
    resident through an interval."""
    change = [0] * (stop - begin + 1)

    def counts(nbytes: int, after: int, until: int) -> None:
        if after < until:
            change[after - begin] += nbytes
            change[until - begin] -= nbytes

    def last(record: SavedRecord) -> int:
        """Until then base has it, if it is there: what forward makes, and inputs in what was allocated at its begin."""
        return gone.get(record.key, record.saved)

    for record in frees:
        counts(-record.nbytes, begin, min(last(record), stop))
    for record in inputs:
        if record.saved > begin:
            counts(record.nbytes, last(record), stop)
    for _, end, outputs in left_out:
        for record in outputs:
            counts(-record.nbytes, end, min(last(record), stop))
    over = zip(range(begin + 1, stop + 1), accumulate(change), strict=False)
    needs = (
        trace.base_bytes(i) + more for i, more in over if not any(left < i <= back for left, back, _ in left_out)
    )
    there = trace.points[begin].allocated_bytes - trace.points[begin].resident_bytes
    return max(0, max(needs, default=0) - there)


def _working_bytes(trace: StepTrace, record: ModuleRecord, run: int, dying: Mapping[int, int]) -> int:
    """``dying``: point -> bytes of the saved tensors that die in the interval before it."""
    if run + 1 >= len(trace.points):
        return 0
    assert record.rerun_bytes is not None
    now = trace.points[run]
    there = now.allocated_bytes - now.resident_bytes + dying.get(run + 1, 0)
    return max(0, there + record.rerun_bytes - trace.base_bytes(run + 1))


def _dying(trace: StepTrace) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in trace.saved:
        if record.died is not None:
            found[record.died] = found.get(record.died, 0) + record.nbytes
    return found


def as_they_run(trace: StepTrace, modules: Sequence[Module]) -> list[Module]:
    """The modules of a plan: each runs when it would by itself, or already when one that is run from what it frees
    does. Several run one after the other there: the most that one of them needs is what they need."""
    freed_by = {i: m for m, module in enumerate(modules) for i in module.frees}
    runs = [module.run for module in modules]
    left = [m for m, module in enumerate(modules) if not freed_by.keys().isdisjoint(module.keeps)]
    while left:
        m = left.pop()
        for other in {freed_by[i] for i in modules[m].keeps if i in freed_by}:
            if runs[m] < runs[other]:
                runs[other] = runs[m]
                left.append(other)
    earlier = [m for m, module in enumerate(modules) if runs[m] < module.run]
    if not earlier:
        return list(modules)
    needed: dict[int, int] = {}  # run -> working bytes
    for module in modules:
        needed[module.run] = max(needed.get(module.run, 0), module.working_bytes)
    found, dying = list(modules), _dying(trace)
    # A pointwise part asks for what modules inside it made in the middle of its own forward: no more than both.
    amid = {
        freed_by[i] for module in modules if module.record.key.name.endswith(POINTWISE)
        for i in module.keeps if i in freed_by and _inside(modules[freed_by[i]], module)
    }  # fmt: skip
    for m in earlier:
        module, run = modules[m], runs[m]
        away = tuple((i, first, min(last, run)) for i, first, last in module.away if first <= run)
        working, before = _working_bytes(trace, module.record, run, dying), needed[run]
        needed[run] = max(working, before)
        more = working if m in amid else max(0, working - before)
        found[m] = replace(module, run=run, away=away, working_bytes=more)
    return found


def whole_layers(trace: StepTrace) -> Iterator[ModuleRecord]:
    """Every layer as a module, from its borders: full recompute as Megatron has it. The layer's input is what it saves
    first. Times are those of the borders, so without what runs between layers."""
    saves: dict[tuple[int, ...], list[int]] = {}
    for i, saved in enumerate(trace.saved):
        if saved.key.layer != OUTSIDE:
            saves.setdefault(saved.key[:3], []).append(i)
    begins: dict[tuple[int, ...], int] = {}
    for end, point in enumerate(trace.points):
        phase, microbatch, chunk, layer, ordinal = point.position
        where = (microbatch, chunk, layer)
        if phase != FORWARD or where not in saves:
            continue
        if ordinal == ENTER:
            begins[where] = end
        elif ordinal == EXIT and where in begins:
            begin = begins.pop(where)
            frees: list[Key] = []
            keeps: list[Key] = []
            for i in saves[where]:
                saved = trace.saved[i]
                if not keeps:
                    keeps.append(saved.key)
                elif saved.last_use <= end and saved.first_read is not None:
                    frees.append(saved.key)
            spent = point.time_ms - trace.points[begin].time_ms
            yield ModuleRecord(ModuleKey(microbatch, chunk, layer, WHOLE_LAYER), spent, begin, end, frees, keeps)


class Chosen:
    """A set of modules to recompute in which no two conflict."""

    def __init__(self, modules: list[Module], flags: Iterable[bool] = ()) -> None:
        self.modules = modules
        self.flags = [False] * len(modules)
        self._freed_by: dict[int, int] = {}
        self._kept_by: dict[int, list[int]] = {}
        for m, on in enumerate(flags):
            if on:
                self.add(m)

    def conflicts(self, m: int) -> list[int]:
        """The members that have to go before ``m`` can join."""
        module, by = self.modules[m], self._freed_by
        found = {by[i] for i in module.frees if i in by}
        found.update(by[i] for i in module.keeps if i in by and _inside(module, self.modules[by[i]]))
        inner = (other for i in module.frees for other in self._kept_by.get(i, ()))
        found.update(other for other in inner if _inside(self.modules[other], module))
        return sorted(found - {m})

    def chained(self, m: int) -> bool:
        """``m`` would be run from what a member frees, or a member from what ``m`` does."""
        module = self.modules[m]
        return any(i in self._freed_by for i in module.keeps) or any(self._kept_by.get(i) for i in module.frees)

    def add(self, m: int) -> None:
        """``m`` joins, and what conflicts with it leaves."""
        for other in self.conflicts(m):
            self.remove(other)
        self.flags[m] = True
        for i in self.modules[m].frees:
            self._freed_by[i] = m
        for i in self.modules[m].keeps:
            self._kept_by.setdefault(i, []).append(m)

    def remove(self, m: int) -> None:
        self.flags[m] = False
        for i in self.modules[m].frees:
            del self._freed_by[i]
        for i in self.modules[m].keeps:
            self._kept_by[i].remove(m)

    def members(self) -> list[Module]:
        return [module for module, on in zip(self.modules, self.flags, strict=True) if on]


def _inside(inner: Module, outer: Module) -> bool:
    return outer.record.begin <= inner.record.begin and inner.record.end <= outer.record.end


def full_recompute(modules: list[Module], *, chains: bool = True) -> list[Module]:
    """As much as can be recomputed at once: what frees most comes first. ``chains``: also from what others free, which
    then is back earlier: a peak in backward may be higher for it."""
    chosen = Chosen(modules)
    for m in sorted(range(len(modules)), key=lambda m: -modules[m].freed_bytes):
        if not chosen.conflicts(m) and (chains or not chosen.chained(m)):
            chosen.add(m)
    return chosen.members()


def by_price(modules: list[Module]) -> list[tuple[int, int]]:
    """The order in which modules are worth recomputing: (module, bytes that it frees beyond those it replaces).

    Prices (ms per byte) are those of kinds, the calls of one name in one chunk, so that identical layers are treated
    alike whatever their measured times; a kind may replace cheaper ones inside it. In a kind the last layers come
    first: theirs are the shortest windows for a copy."""
    kinds: dict[tuple[int, str], list[int]] = {}
    for m, module in enumerate(modules):
        kinds.setdefault((module.record.key.chunk, module.record.key.name), []).append(m)
    chosen = Chosen(modules)
    order: list[tuple[int, int]] = []
    while kinds:
        best: tuple[float, tuple[int, str]] | None = None
        for kind, calls in kinds.items():
            replaced = [modules[other] for other in {other for m in calls for other in chosen.conflicts(m)}]
            freed = sum(modules[m].freed_bytes for m in calls) - sum(other.freed_bytes for other in replaced)
            spent = sum(modules[m].record.forward_ms for m in calls)
            spent -= sum(other.record.forward_ms for other in replaced)
            if freed > 0 and (best is None or (spent / freed, kind) < best):
                best = spent / freed, kind
        if best is None:
            break
        calls = kinds.pop(best[1])
        for m in sorted(calls, key=lambda m: (-modules[m].record.key.layer, m)):
            gained = modules[m].freed_bytes - sum(modules[other].freed_bytes for other in chosen.conflicts(m))
            chosen.add(m)
            order.append((m, gained))
    return order


def first_reads(trace: StepTrace, modules: Iterable[Module]) -> dict[int, int]:
    """Record number -> the point at which a recomputed module needs it back, where that is before its own read."""
    needed: dict[int, int] = {}
    for module in modules:
        for i in module.keeps:
            read = trace.saved[i].first_read
            if module.run < needed.get(i, len(trace.points) if read is None else read):
                needed[i] = module.run
    return needed
