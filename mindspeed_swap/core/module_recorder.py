"""Which module calls ran in a recorded step, from what, and what each would free if it were recomputed."""
from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mindspeed_swap.core.module_state import ModuleState
from mindspeed_swap.core.recompute import rerun_bytes
from mindspeed_swap.core.saved_tensor import SavedTensor
from mindspeed_swap.core.trace import Key, ModuleKey, ModuleRecord, SavedRecord, StepTrace, pointwise_of

_Identity = tuple[int, int]


def _identity(tensor: torch.Tensor) -> tuple[_Identity, torch.UntypedStorage]:
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor._version), storage


def _between(trace: StepTrace, begin: int, end: int) -> float:
    """Milliseconds."""
    return trace.points[end].time_ms - trace.points[begin].time_ms


@dataclass(slots=True, eq=False)
class Tracked:
    """A call that runs or ran."""

    key: ModuleKey
    begin: int
    once: bool  # it must not run again: calls around it are run again without it
    state: ModuleState  # of the modules that it was given, as it began
    end: int = -1
    repeats: bool = True  # it could run again: inputs, and what is left out in it gave, are as they were
    in_parts: bool = True  # so could its pointwise part: no module inside has changed what it was given
    inputs: dict[_Identity, int] = field(default_factory=dict)  # -> bytes, of those not known to be saved
    given: set[_Identity] = field(default_factory=set)  # what it was called with, saved or not
    frees: list[tuple[SavedRecord, int]] = field(default_factory=list)  # and from which point on each exists
    begins: list[int] = field(default_factory=list)  # of all modules inside
    left_out: list[Tracked] = field(default_factory=list)  # of these, all that must not run again with it
    answers: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # what those gave, and its version
    keeps: list[SavedRecord] = field(default_factory=list)
    # When it was over: what it was given, without its bytes, and its version.
    given_at: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # Of its pointwise part, see Note [Pointwise] in again.py.
    inside: list[Tracked] = field(default_factory=list)  # modules called by this one
    outputs: list[list[SavedRecord]] = field(default_factory=list)  # for each: its save, or nothing if there is none
    own: list[tuple[SavedRecord, int]] = field(default_factory=list)  # saves, as ``frees``

    def read(self) -> None:
        """Backward reads something that was saved in it, for which it would run again now: from what it was given, with
        what its modules keep. Both may have been changed since, by the forward of the next microbatch too."""
        if self.repeats and self.end >= 0:
            as_then = all(tensor._version == version for tensor, version in self.given_at)
            self.repeats = as_then and not self.state.changed

    def keep(self, record: SavedRecord) -> None:
        """It is needed to run the call again, so the call does not free it."""
        self.frees = [(freed, there) for freed, there in self.frees if freed is not record]
        self.own = [(own, there) for own, there in self.own if own is not record]
        if all(kept is not record for kept in self.keeps):
            self.keeps.append(record)

    def freed(self, saves: list[tuple[SavedRecord, int]]) -> tuple[list[SavedRecord], int]:
        """Those of the saves (with the point from which on they exist) that running again would bring back, and from
        which point on all of them are there."""
        wanted = [
            (record, there)
            for record, there in saves
            if self.repeats and record.first_read is not None and record.first_read > self.end
        ]
        return [record for record, _ in wanted], max([self.begin, *(there for _, there in wanted)])

    def stop(self, until: int) -> int:
        """Where it need not run further if all is there at that point: see Note [Where it stops] in again.py."""
        return min((begin for begin in self.begins if begin >= until), default=self.end)

    def record(
        self, key: ModuleKey, forward_ms: float, frees: list[SavedRecord], keeps: list[SavedRecord], rerun: int
    ) -> ModuleRecord:
        freed, kept = ([record.key for record in records] for records in (frees, keeps))
        inputs = sum(self.inputs.values())
        return ModuleRecord(key, max(0.0, forward_ms), self.begin, self.end, freed, kept, inputs, rerun)


class ModuleRecorder:
    """The recorder tells it of every first save; calls are told by the manager."""

    def __init__(self) -> None:
        self._running: list[Tracked] = []
        # By the id of a save: the calls that could run again for it.
        self._readers: dict[int, list[Tracked]] = {}
        self._done: list[Tracked] = []
        self._outputs: dict[_Identity, tuple[weakref.ref[torch.UntypedStorage], list[list[SavedRecord]]]] = {}
        # Inputs and outputs of calls, to be known when somebody saves them: whose, and whether it is an input.
        self._watched: dict[_Identity, tuple[weakref.ref[torch.UntypedStorage], list[tuple[Tracked, bool]]]] = {}

    def enter(
        self, key: ModuleKey, begin: int, inputs: list[tuple[torch.Tensor, SavedRecord | None]], state: ModuleState,
        *, once: bool,
    ) -> Tracked:  # fmt: skip
        """``begin``: the point just closed. ``inputs``: tensors that could be moved, with their saves so far."""
        tracked = Tracked(key, begin, once, state)
        for outer in self._running:
            outer.begins.append(begin)
        for outer in self._around(tracked):
            outer.left_out.append(tracked)
        if self._running:
            self._running[-1].inside.append(tracked)
        for tensor, record in inputs:
            tracked.given.add(_identity(tensor)[0])
            self._keep(tracked, tensor, record)
        self._running.append(tracked)
        return tracked

    def _around(self, tracked: Tracked) -> list[Tracked]:
        """The running calls that would run again without it, if it must not: up to one that must not either."""
        found: list[Tracked] = []
        for outer in reversed(self._running if tracked.once else []):
            found.append(outer)
            if outer.once:
                break
        return found

    def _keep(self, tracked: Tracked, tensor: torch.Tensor, record: SavedRecord | None) -> None:
        """The call needs it to run again. (Watched even if somebody has saved it: that save may end, and another
        come.)"""
        identity = self._watch(tensor, tracked, True)
        if record is not None:
            tracked.keep(record)
        elif identity not in tracked.inputs:
            tracked.inputs[identity] = tensor.untyped_storage().nbytes()

    def drop(self, tracked: Tracked) -> None:
        """It no longer runs, nor what was left inside by an exception."""
        if tracked in self._running:
            del self._running[self._running.index(tracked) :]

    def exit(
        self, tracked: Tracked, end: int, outputs: list[tuple[torch.Tensor, SavedRecord | None]], *, unchanged: bool,
        gave: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """``outputs``: as ``inputs`` of ``enter``. ``unchanged``: its inputs are as they were. ``gave``: all tensors
        that it gave."""
        self.drop(tracked)
        tracked.end = end
        tracked.repeats &= unchanged and not tracked.once
        tracked.repeats &= all(tensor._version == version for tensor, version in tracked.answers)
        tracked.answers.clear()
        if tracked.state.changed:
            tracked.repeats = tracked.in_parts = False
        for outer in self._running if tracked.once else ():
            outer.state.leave_out(tracked.state)
        tracked.state.is_over()
        if self._running:
            self._running[-1].in_parts &= unchanged
        self._done.append(tracked)
        around = self._around(tracked)
        for outer in around:
            outer.repeats &= unchanged
            # An alias shares the version, and no graph.
            outer.answers += [(tensor.detach(), tensor._version) for tensor in gave]
        for tensor, record in outputs:
            for outer in around:
                self._keep(outer, tensor, record)
            if tracked.repeats:
                self._watch(tensor, tracked, False)
            known = [] if record is None else [record]
            tracked.outputs.append(known)
            if record is None:
                identity, storage = _identity(tensor)
                entry = self._outputs.get(identity)
                if entry is None or entry[0]() is not storage:
                    entry = self._outputs[identity] = weakref.ref(storage), []
                entry[1].append(known)

    def read(self, record: SavedRecord) -> None:
        """For the first time."""
        for tracked in self._readers.pop(id(record), ()):
            tracked.read()

    def backward_runs(self) -> None:
        """Inside the calls that run: it would go into the graph of one that runs again, of which nothing is kept."""
        for tracked in self._running:
            tracked.repeats = tracked.in_parts = False

    def _watch(self, tensor: torch.Tensor, tracked: Tracked, is_input: bool) -> _Identity:
        identity, storage = _identity(tensor)
        entry = self._watched.get(identity)
        if entry is None or entry[0]() is not storage:
            entry = self._watched[identity] = weakref.ref(storage), []
        entry[1].append((tracked, is_input))
        return identity

    def saved(self, saved: SavedTensor, record: SavedRecord) -> None:
        ref, outputs = self._outputs.get(saved.identity, (None, []))
        if ref is not None and ref() is saved.storage_ref():
            for known in outputs:
                known[:] = [record]
        inputs_of: set[int] = set()
        ref, watchers = self._watched.get(saved.identity, (None, []))
        if ref is not None and ref() is saved.storage_ref():
            for tracked, is_input in watchers:
                if is_input and id(tracked) not in inputs_of:
                    inputs_of.add(id(tracked))
                    tracked.inputs.pop(saved.identity, None)
                    tracked.keeps.append(record)
            made_by = {id(tracked): tracked for tracked, is_input in watchers if not is_input}  # once, however often
            for tracked in made_by.values():
                if id(tracked) not in inputs_of:
                    self._readers.setdefault(id(record), []).append(tracked)
                    tracked.frees.append((record, tracked.end))
        once = called = None  # of what runs inside the call, the outermost that is left out; and the next
        for tracked in reversed(self._running):
            if id(tracked) not in inputs_of:
                self._readers.setdefault(id(record), []).append(tracked)
                self._saved_inside(tracked, saved, record, once, called)
            once, called = tracked if tracked.once else once, tracked

    def _saved_inside(
        self, tracked: Tracked, saved: SavedTensor, record: SavedRecord, once: Tracked | None, called: Tracked | None
    ) -> None:
        inner = once or self._running[-1]
        given = saved.identity in inner.given
        if once is None or given:
            tracked.frees.append((record, inner.begin if given else record.saved))
        if any(known == [record] for module in tracked.inside for known in module.outputs):
            return
        if called is None:
            tracked.own.append((record, record.saved))
        elif saved.identity in called.given:
            tracked.own.append((record, called.begin))

    def finish(self, trace: StepTrace, gone: Mapping[Key, int]) -> list[ModuleRecord]:
        """In the order in which they ended. Those that cannot run again free nothing. ``trace``: with all points;
        ``gone``: see ``rerun_bytes``."""
        found = []
        for call in self._done:
            found += self._pointwise(call, trace, gone)
            frees, until = call.freed(call.frees)
            stop = call.stop(until) if frees else call.end
            asked = [module for module in call.left_out if module.end <= stop]
            found.append(self._told(call, call.key, trace, gone, frees, call.keeps, stop, asked))
        return found

    def _pointwise(self, call: Tracked, trace: StepTrace, gone: Mapping[Key, int]) -> list[ModuleRecord]:
        """Its pointwise part, if that can run again from what is saved anyway."""
        frees, until = call.freed(call.own)
        asked = [module for module in call.inside if 0 <= module.end <= until]
        outputs = [known for module in asked for known in module.outputs]
        if not (frees and asked and all(outputs) and call.in_parts):
            return []
        stop = min((module.begin for module in call.inside if module.begin >= until), default=call.end)
        keeps = list({id(record): record for record in (*call.keeps, *(known[0] for known in outputs))}.values())
        return [self._told(call, pointwise_of(call.key), trace, gone, frees, keeps, stop, asked)]

    @staticmethod
    def _told(
        call: Tracked, key: ModuleKey, trace: StepTrace, gone: Mapping[Key, int], frees: list[SavedRecord],
        keeps: list[SavedRecord], stop: int, asked: list[Tracked],
    ) -> ModuleRecord:  # fmt: skip
        """Run again until point ``stop``, without the modules ``asked``, which only give what they gave."""
        spent = _between(trace, call.begin, stop) - sum(_between(trace, m.begin, m.end) for m in asked)
        left_out = [(m.begin, m.end, [known[0] for known in m.outputs if known]) for m in asked]
        rerun = rerun_bytes(trace, call.begin, stop, frees, call.keeps, left_out, gone) if frees else 0
        return call.record(key, spent, frees, keeps, rerun)
