"""From a recorded step and the setting to a Plan, and to what of the setting had no effect. Pure; imports no torch.

What an operator saved first is the operator's: that is what its setting moves. Recompute wins over swap in two ways:
1. what is saved inside a recomputed module is not swapped (most of it is not there);
2. nor is anything of an operator whose output a recomputed module runs from again.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_swap.core import lanes
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.recompute import WHOLE_LAYER, Chosen, Module, as_they_run, first_reads, modules_of
from mindspeed_swap.core.simulate import plan_of
from mindspeed_swap.core.trace import OUTSIDE, Key, ModuleRecord, SavedRecord, StepTrace, plain_name
from mindspeed_swap.core.windows import is_candidate, points_to_act
from mindspeed_swap.fine_grained.operators import Operators, operators
from mindspeed_swap.fine_grained.parts import Parts
from mindspeed_swap.fine_grained.schema import Entry
from mindspeed_swap.smart_swap.stages import predicted
from mindspeed_swap.units import format_bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """A swap as the setting wants it. ``part``: of the layer, that it is set for."""

    number: int  # of the record in the trace
    record: SavedRecord
    entry: Entry
    part: str
    read: int  # point at which it must be back
    release: int
    prefetch: int


def _inside(record: SavedRecord, calls: list[ModuleRecord]) -> list[ModuleRecord]:
    """Those in which it was saved first."""
    return [call for call in calls if call.begin < record.saved < call.end]


@dataclass(slots=True)
class _Why:
    """Something without effect: one line per part of a layer, whatever the number of tensors and microbatches."""

    nbytes: int = 0
    most: int | None = None  # largest value that would do


@dataclass(slots=True)
class Planning:
    """``reasons``: what of the setting had no effect, by layer."""

    trace: StepTrace
    parts: Parts
    plan: Plan = field(init=False)
    placed: list[Placed] = field(init=False)
    reasons: list[str] = field(init=False)
    ops: Operators = field(init=False)
    calls: dict[tuple[int, int, int], list[ModuleRecord]] = field(init=False)  # by microbatch, chunk, layer
    acts: list[int] = field(init=False)  # points at which the manager acts
    why: dict[tuple[int, str, str], _Why] = field(init=False)  # by layer, part, text

    def __post_init__(self) -> None:
        self.ops = operators(self.trace)
        self.acts = points_to_act(self.trace)
        self.why = defaultdict(_Why)
        self.calls = defaultdict(list)
        for module in self.trace.modules:
            self.calls[module.key[:3]].append(module)
        again = as_they_run(self.trace, self._recomputed())
        self.placed = sorted(self._placed(again), key=lambda p: (p.prefetch, p.read, p.record.saved))
        self.plan = self._plan(again)
        self.reasons = self._reasons()

    def _plan(self, again: list[Module]) -> Plan:
        trace = self.trace
        placed = [lanes.Placed(each.number, each.release, each.prefetch) for each in self.placed]
        plan = plan_of(trace, trace.capacity_bytes, placed, again)
        chosen = Chosen(again, [True] * len(again))
        # Two that free the same (the output of one, which the other saves) run well, but nobody can say how long.
        return predicted(trace, plan) if all(chosen.flags) else plan

    # ---- recompute
    def _recomputed(self) -> list[Module]:
        """Of modules inside one another the outermost."""
        known = {module.record.key: module for module in modules_of(self.trace)}
        found = []
        until = {}
        for record in sorted(self.trace.modules, key=lambda m: (m.begin, -m.end)):
            layer, name = record.key.layer - 1, plain_name(record.key)
            whole = name == WHOLE_LAYER and layer in self.parts.full
            if not whole and (layer in self.parts.full or not self.parts.recomputes(layer, name)):
                continue
            if record.begin < until.get(record.key[:3], -1):
                continue
            if record.key in known:
                until[record.key[:3]] = record.end
                found.append(known[record.key])
            else:
                self._add((layer, name), "cannot run again, or frees nothing: not recomputed")
        return found

    # ---- swap
    def _placed(self, again: Sequence[Module]) -> Iterator[Placed]:
        trace = self.trace
        freed = {number for module in again for number in module.frees}
        again_there = defaultdict(list)
        for module in again:
            again_there[module.record.key[:3]].append(module.record)
        shared = self._outputs_used_by({key for module in again for key in module.record.keeps})
        needed = first_reads(trace, again)
        for number, record in enumerate(trace.saved):
            if record.key.layer == OUTSIDE:
                continue
            inside = _inside(record, self.calls[record.key[:3]])
            found = self.parts.entry(record.key.layer - 1, {plain_name(call.key) for call in inside})
            if found is None:
                continue
            entry, part = found
            where = record.key.layer - 1, part
            if number in freed or _inside(record, again_there[record.key[:3]]):
                self._add(where, "recomputed, so not swapped", record)
            elif (owner := self.ops.owner.get(record.saved, record.key)) in shared:
                name = plain_name(trace.modules[owner].key) if isinstance(owner, int) else part
                self._add((where[0], name), "a recomputed operator runs from its output, so not swapped", record)
            elif not is_candidate(record):
                self._add(where, f"cannot be moved ({record.reason or 'not its only holder'})", record)
            else:
                read = needed.get(number, record.first_read)
                assert read is not None
                window = self.window(record, read, entry, entry.value)
                if window is not None:
                    yield Placed(number, record, entry, part, read, *window)
                else:
                    self._too_large(record, read, entry, where)

    def _outputs_used_by(self, inputs: set[Key]) -> set[int | Key]:
        """The calls of leaves, and saves outside any, whose output is among ``inputs`` of recomputed modules."""
        owner, found = self.ops.owner, set[int | Key]()
        if not inputs:
            return found
        for record in self.trace.saved:
            if record.key in inputs:
                call = owner.get(record.saved)
                if call is None:
                    found.add(record.key)
                elif record.key not in self.trace.modules[call].keeps:
                    found.add(call)  # saved where it was made
        for call in set(owner.values()):
            module = self.trace.modules[call]
            if not inputs.isdisjoint(module.frees):
                found.add(call)
        return found

    def window(self, record: SavedRecord, read: int, entry: Entry, value: int) -> tuple[int, int] | None:
        """(release, prefetch), or None if it would be back before it had left."""
        assert record.sole is not None
        release = self.ops.after(record.last_use, entry.release(value))
        prefetch = self.ops.before(read, value)
        if release is None or prefetch is None:
            return None
        # Before ``sole`` somebody else holds it (a layer's input: the caller, until the layer has returned).
        release = max(release, record.sole, record.last_use + 1)
        prefetch = min(prefetch, read - 1)
        first, last = bisect_left(self.acts, release), bisect_right(self.acts, prefetch) - 1
        return (self.acts[first], self.acts[last]) if first < last else None

    def _too_large(self, record: SavedRecord, read: int, entry: Entry, where: tuple[int, str]) -> None:
        """Say so, and what would do."""
        low, high = -1, entry.value  # the latter does not do
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.window(record, read, entry, middle) else (low, middle)
        text = "would be fetched back before it had left"
        item = self._add(where, f"{entry.value} is too large: it {text}" if low >= 0 else text, record)
        if low >= 0:
            item.most = low if item.most is None else min(item.most, low)

    def _add(self, where: tuple[int, str], text: str, record: SavedRecord | None = None) -> _Why:
        why = self.why[where[0], where[1], text]
        why.nbytes += record.nbytes if record else 0
        return why

    def _reasons(self) -> list[str]:
        lines = []
        for (layer, part, text), item in sorted(self.why.items()):
            nbytes = f" ({format_bytes(item.nbytes)})" if item.nbytes else ""
            most = f"; at most {item.most} would do" if item.most is not None else ""
            lines.append(f"layer {layer}: {part}{nbytes}: {text}{most}")
        return lines
