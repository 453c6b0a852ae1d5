"""StepTrace: what one training step did, in order, with bytes and times. Pure data; imports no torch.

A step is a list of *points*. A point is an event that the manager sees: a tensor is saved (forward) or read back
(backward), a layer begins or ends, a microbatch begins or ends, the optimizer begins or ends. Point ``i`` closes the
*interval* ``i``: everything that ran after point ``i - 1``. Every figure of an interval is kept at the point that
closes it. One convention makes recorder and simulator agree:

    a saved tensor is *resident through* interval ``i`` when it was on the device at point ``i - 1`` (after that point's
    own releases and prefetches) and still is at point ``i`` (before them).

``base(i) = peak_bytes - resident_bytes`` is then what the interval needs besides the saved tensors, whatever swap or
eviction did while it was recorded, and a plan's peak in that interval is ``base(i)`` plus the bytes it keeps resident.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import NamedTuple

from mindspeed_swap.core.checked import build, list_of, load_object, tuple_of

FORWARD, BACKWARD, OPTIMIZER = "F", "B", "O"
ENTER, EXIT = -1, -2  # ordinals of the borders of a layer; with layer 0: of the microbatch or of the optimizer
MODULE_BORDER = -2  # below: the borders of modules inside the layer, in their order
OUTSIDE = 0  # layer number of everything that runs outside the transformer layers (Megatron counts layers from 1)

TRACE_VERSION = 2


# What a named tuple's own ``__new__`` does, which is a function in Python: for what is named many times a step.
new = tuple.__new__


class Key(NamedTuple):
    """Names one saved storage within a step, by its first save. ``ordinal`` counts every save of the layer (or of
    the part outside all layers), before any filter, so that a size threshold never renumbers sites."""

    microbatch: int
    chunk: int
    layer: int
    ordinal: int

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.layer else "outside the layers"
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"microbatch {self.microbatch}{chunk}, {where}, tensor {self.ordinal}"


class Position(NamedTuple):
    """Names one point of a step. For FORWARD and BACKWARD saves and reads, the last four fields are the Key."""

    phase: str
    microbatch: int
    chunk: int
    layer: int
    ordinal: int


class ModuleKey(NamedTuple):
    """Names one forward call of a module within a step."""

    microbatch: int
    chunk: int
    layer: int
    name: str  # within the layer; "layer" is the layer itself


AGAIN = "#"  # before the number of a module's second call within a layer, and of every one after that
POINTWISE = ".pointwise"


def pointwise_of(key: ModuleKey) -> ModuleKey:
    """What the module computes between the modules inside it."""
    return key._replace(name=key.name + POINTWISE)


def plain_name(key: ModuleKey) -> str:
    """Without the number of a second call."""
    return key.name.partition(AGAIN)[0]


@dataclass(slots=True)
class Point:
    """One event, and the figures of the interval that it closes."""

    position: Position
    time_ms: float  # device time since the start of the step, without waits for copies
    allocated_bytes: int  # at this point, from the allocator
    peak_bytes: int  # most bytes allocated at once in the interval, from the allocator
    request_bytes: int  # largest single allocation in the interval
    resident_bytes: int  # saved tensors resident through the interval (see above)
    reserved_bytes: int = 0  # at this point, by the allocator, of the device
    recompute_bytes: int = 0  # of ``peak_bytes``, what only running a module again took
    waits_for_host: bool = False  # the device had nothing left to do: whatever takes the host longer, takes the step
    moving_ms: float = 0.0  # so far in the step, that it waited while the host queued moves of a plan; not in its time


@dataclass(slots=True)
class SavedRecord:
    """One saved storage. Indices are into ``StepTrace.points``; ``None`` means that it did not happen."""

    key: Key
    nbytes: int  # of the storage, not of the view
    saved: int  # first saved here
    last_use: int  # last saved again here (views of one storage, second consumers)
    sole: int | None  # first point at which nobody else held the storage: a release before it frees nothing
    first_read: int | None  # first point in backward that reads it
    died: int | None  # point at which its last handle was found dead
    movable: bool  # False: the manager may not move it (see ``reason``)
    reason: str = ""


@dataclass(slots=True)
class ModuleRecord:
    """One forward call of a module that backward can run again instead of keeping what it saved. It then runs at the
    first read of anything in ``frees``. ``begin`` and ``end`` are indices into ``StepTrace.points``."""

    key: ModuleKey
    forward_ms: float  # from its begin to the last of ``frees``: it need not run further
    begin: int
    end: int  # its forward is over
    frees: list[Key]  # saved storages that nobody keeps when this module is recomputed
    keeps: list[Key]  # saved storages among its inputs: on the device when it runs again
    input_bytes: int = 0  # of inputs that nobody saves: kept from ``end`` until the point after it has run again
    rerun_bytes: int | None = None  # most that it needs while it runs again, beyond its inputs and all of ``frees``
    again_ms: float | None = None  # it did run again, and took the device so long


@dataclass(slots=True)
class CopyRecord:
    """One copy between device and host, as it ran. Times count from the start of the step, waits included."""

    key: Key
    nbytes: int
    to_host: bool
    start_ms: float
    end_ms: float


RECOMPUTED = "RECOMPUTE"  # cause of a wait that is none: a module ran again, for which everything else waits


@dataclass(slots=True)
class WaitRecord:
    """Compute waited for a copy of this tensor, or found at the wait that it need not. Times as of copies."""

    key: Key
    point: int  # the first one after the wait
    cause: str  # name of the Wait
    start_ms: float
    end_ms: float


@dataclass(slots=True)
class OperatorRecord:
    """A custom operator that gave its name ran between these times, as of copies."""

    name: str
    point: int  # the first one after it
    start_ms: float
    end_ms: float


def waited_ms(waits: Iterable[tuple[int, float]], points: int) -> list[float]:
    """At each point, what was waited so far. ``waits``: the first point after each, and how long it was; those after
    the last point do not count."""
    spent = [0.0] * points
    for index, ms in waits:
        if index < points:
            spent[index] += ms
    return list(accumulate(spent))


@dataclass(slots=True)
class StepTrace:
    """One recorded step of one rank (so of one pipeline stage)."""

    model: str  # fingerprint of model, layout and batch; a plan made from this trace fits only the same
    capacity_bytes: int  # what this process may allocate
    static_bytes: int  # allocated when the step began: parameters, gradients, optimizer state, buffers
    d2h_bytes_per_ms: float  # with nothing else on the link
    h2d_bytes_per_ms: float
    step_ms: float = 0.0  # as measured, waits of compute for copies and the time since the step before included
    held_bytes: int = 0  # largest (allocated - static) at the end of a microbatch's forward
    has_optimizer_state: bool = False
    points: list[Point] = field(default_factory=list)
    saved: list[SavedRecord] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    evicted_bytes: int = 0  # moved under memory pressure while recording
    d2h_both_bytes_per_ms: float = 0.0  # while the other direction is busy too; 0: not measured, as alone
    h2d_both_bytes_per_ms: float = 0.0
    copy_overhead_ms: float = 0.0  # what a copy takes besides the time of its bytes
    stall_ms: float = 0.0  # waits for copies and recomputes; the times of the points are without them
    # Shares of the points of a phase at which the device waits for the host: once, not for every plan looked at.
    forward_waits: float = 0.0
    backward_waits: float = 0.0
    copies: list[CopyRecord] = field(default_factory=list)  # in the order in which they were queued
    waits: list[WaitRecord] = field(default_factory=list)
    operators: list[OperatorRecord] = field(default_factory=list)  # custom ones, in the order in which they ended
    version: int = TRACE_VERSION

    def base_bytes(self, index: int) -> int:
        """What interval ``index`` needs besides the saved tensors that are resident through it."""
        point = self.points[index]
        return max(0, point.peak_bytes - point.recompute_bytes - point.resident_bytes)

    def waiting_share(self, phase: str) -> float:
        """Of the points of that phase, those at which the device waits for the host."""
        waits = [point.waits_for_host for point in self.points if point.position.phase == phase]
        return sum(waits) / len(waits) if waits else 0.0

    @property
    def copy_waits(self) -> list[WaitRecord]:
        return [wait for wait in self.waits if wait.cause != RECOMPUTED]

    @property
    def peak_bytes(self) -> int:
        """The most that was measured."""
        return max(point.peak_bytes for point in self.points)

    @property
    def moving_ms(self) -> float:
        return self.points[-1].moving_ms if self.points else 0.0

    def measured_ms(self) -> list[float]:
        """When each point was really reached: its time, and all waits before it."""
        waited = waited_ms(((wait.point, wait.end_ms - wait.start_ms) for wait in self.waits), len(self.points))
        return [point.time_ms + ms + point.moving_ms for point, ms in zip(self.points, waited, strict=True)]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepTrace:
        """Raises ValueError naming the first thing that is wrong."""
        data = load_object(text, "trace", TRACE_VERSION)
        keys = list_of(tuple_of(Key))
        trace: StepTrace = build(
            cls,
            data,
            "trace",
            points=list_of(lambda value, where: build(Point, value, where, position=tuple_of(Position))),
            saved=list_of(lambda value, where: build(SavedRecord, value, where, key=tuple_of(Key))),
            modules=list_of(
                lambda value, where: build(
                    ModuleRecord, value, where, key=tuple_of(ModuleKey), frees=keys, keeps=keys
                )
            ),
            copies=list_of(lambda value, where: build(CopyRecord, value, where, key=tuple_of(Key))),
            waits=list_of(lambda value, where: build(WaitRecord, value, where, key=tuple_of(Key))),
            operators=list_of(lambda value, where: build(OperatorRecord, value, where)),
        )
        count = len(trace.points)
        known = {record.key for record in trace.saved}
        if len(known) != len(trace.saved):
            raise ValueError("damaged trace: saved: one key names two records")
        names_of_saved = ("saved", "last_use", "sole", "first_read", "died")
        indices = [
            *((f"saved[{i}]", r, names_of_saved) for i, r in enumerate(trace.saved)),
            *((f"modules[{i}]", m, ("begin", "end")) for i, m in enumerate(trace.modules)),
        ]
        for where, item, names in indices:
            for name in names:
                index = getattr(item, name)
                if index is not None and not 0 <= index < count:
                    raise ValueError(f"damaged trace: {where}: {name} is point {index} of {count}")
                first = getattr(item, names[0])
                if index is not None and index < first:
                    raise ValueError(f"damaged trace: {where}: {name} is point {index}, before {names[0]} at {first}")
        for i, wait in enumerate(trace.waits):
            if not 0 <= wait.point <= count:
                raise ValueError(f"damaged trace: waits[{i}]: point is {wait.point} of {count}")
        for i, module in enumerate(trace.modules):
            for key in (*module.frees, *module.keeps):
                if key not in known:
                    raise ValueError(f"damaged trace: modules[{i}]: {tuple(key)} was never saved")
        return trace
