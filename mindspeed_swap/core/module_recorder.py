"""Which module calls ran in a recorded step, from what, and what each would free if it were recomputed."""
from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from mindspeed_swap.core.saved_tensor import SavedTensor
from mindspeed_swap.core.trace import ModuleKey, ModuleRecord, SavedRecord

_Identity = tuple[int, int]


def _identity(tensor: torch.Tensor) -> tuple[_Identity, torch.UntypedStorage]:
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor._version), storage


@dataclass(slots=True, eq=False)
class Tracked:
    """A call that runs or ran."""

    key: ModuleKey
    begin: int
    end: int = -1
    repeats: bool = True  # its inputs are as they were, so it could run again
    inputs: dict[_Identity, int] = field(default_factory=dict)  # -> bytes, of those not known to be saved
    given: set[_Identity] = field(default_factory=set)  # what it was called with, saved or not
    frees: list[SavedRecord] = field(default_factory=list)
    there: list[int] = field(default_factory=list)  # for each of ``frees``: from this point on it exists
    begins: list[int] = field(default_factory=list)  # of the modules inside
    keeps: list[SavedRecord] = field(default_factory=list)


class ModuleRecorder:
    """The recorder tells it of every first save; calls are told by the manager."""

    def __init__(self) -> None:
        self._running: list[Tracked] = []
        self._done: list[Tracked] = []
        # Inputs and outputs of calls, to be known when somebody saves them: whose, and whether it is an input.
        self._watched: dict[_Identity, tuple[weakref.ref[torch.UntypedStorage], list[tuple[Tracked, bool]]]] = {}

    def enter(
        self, key: ModuleKey, begin: int, inputs: list[tuple[torch.Tensor, SavedRecord | None]]
    ) -> Tracked:
        """``begin``: the point just closed. ``inputs``: tensors that could be moved, with their saves so far."""
        tracked = Tracked(key, begin)
        for outer in self._running:
            outer.begins.append(begin)
        for tensor, record in inputs:
            tracked.given.add(_identity(tensor)[0])
            if record is not None:
                tracked.keeps.append(record)
            elif (identity := self._watch(tensor, tracked, True)) not in tracked.inputs:
                tracked.inputs[identity] = tensor.untyped_storage().nbytes()
        self._running.append(tracked)
        return tracked

    def exit(self, tracked: Tracked, end: int, outputs: list[torch.Tensor], *, unchanged: bool) -> None:
        """``unchanged``: its inputs are as they were."""
        while self._running and self._running.pop() is not tracked:  # those left by an exception
            pass
        tracked.end, tracked.repeats = end, unchanged
        self._done.append(tracked)
        if unchanged:
            for tensor in outputs:
                self._watch(tensor, tracked, False)

    def _watch(self, tensor: torch.Tensor, tracked: Tracked, is_input: bool) -> _Identity:
        identity, storage = _identity(tensor)
        entry = self._watched.get(identity)
        if entry is None or entry[0]() is not storage:
            entry = self._watched[identity] = weakref.ref(storage), []
        entry[1].append((tracked, is_input))
        return identity

    def saved(self, saved: SavedTensor, record: SavedRecord) -> None:
        inputs_of: set[int] = set()
        ref, watchers = self._watched.get(saved.identity, (None, []))
        if ref is not None and ref() is saved.storage_ref():
            for tracked, is_input in watchers:
                if is_input:
                    inputs_of.add(id(tracked))
                    if tracked.inputs.pop(saved.identity, None) is not None:
                        tracked.keeps.append(record)
            for tracked, is_input in watchers:
                if not is_input and id(tracked) not in inputs_of:
                    tracked.frees.append(record)
                    tracked.there.append(tracked.end)
        inner = self._running[-1] if self._running else None
        there = inner.begin if inner is not None and saved.identity in inner.given else record.saved
        for tracked in self._running:
            if id(tracked) not in inputs_of:
                tracked.frees.append(record)
                tracked.there.append(there)

    def finish(self, times_ms: list[float]) -> list[ModuleRecord]:
        """In the order in which they ended. Those that cannot run again free nothing."""
        found = []
        for call in self._done:
            frees, until = [], call.begin
            for record, there in zip(call.frees, call.there, strict=True):
                if call.repeats and record.first_read is not None and record.first_read > call.end:
                    frees.append(record)
                    until = max(until, there)
            # It stops where the next module inside begins: see Note [Where it stops] in again.py.
            stops = [begin for begin in call.begins if begin >= until] if frees else []
            until = min(stops, default=call.end)
            found.append(
                ModuleRecord(
                    call.key, times_ms[until] - times_ms[call.begin], call.begin, call.end,
                    [record.key for record in frees], [record.key for record in call.keeps], sum(call.inputs.values()),
                )
            )  # fmt: skip
        return found
