"""Step traces for the planner's tests: Megatron-shaped ones and irregular random ones. Pure; deterministic."""
from __future__ import annotations

import random
from dataclasses import dataclass

from mindspeed_swap.core.trace import (
    BACKWARD,
    ENTER,
    EXIT,
    FORWARD,
    OPTIMIZER,
    OUTSIDE,
    Key,
    ModuleKey,
    ModuleRecord,
    Point,
    Position,
    SavedRecord,
    StepTrace,
)

MIB = 1 << 20

# A Llama-shaped layer at 8192 tokens, hidden 4096: MiB of every saved storage in order, and whether it may move.
LLAMA_SITES = (64, 64, 192, 64, 64, 64, 344, 172, 172)

# Modules of that layer: name, ordinals that it frees, ordinals that it is run from, share of the forward time.
LLAMA_MODULES = (
    ("input_norm", (1,), (0,), 0.01),
    ("mlp_norm", (5,), (4,), 0.01),
    ("act", (7, 8), (6,), 0.02),
    ("mlp", (5, 6, 7, 8), (4,), 0.35),  # with its norm
    ("layer", tuple(range(1, 9)), (0,), 1.0),
)


@dataclass(frozen=True)
class Shape:
    """Of a Megatron-like step on one pipeline stage."""

    layers: int = 8
    microbatches: int = 1
    stages: int = 1  # pipeline-parallel size; stage 0 holds the most microbatches in flight
    stage: int = 0
    sites_mib: tuple[float, ...] = LLAMA_SITES
    unmovable_mib: float = 8.0  # one storage per layer that may not move
    layer_forward_ms: float = 6.9  # backward takes twice as long
    static_mib: int = 4096
    transient_mib: int = 344  # working memory inside a layer
    optimizer_mib: int = 1024  # working memory of the optimizer
    logits_mib: int = 256  # saved outside the layers, at the end of forward
    d2h_gbps: float = 50.0
    h2d_gbps: float = 50.0
    both_gbps: float = 0.0  # each way, while both are busy
    modules: tuple[tuple[str, tuple[int, ...], tuple[int, ...], float], ...] = ()


def order_1f1b(microbatches: int, stages: int, stage: int) -> list[tuple[str, int]]:
    """(phase, microbatch) in the order in which the stage runs them."""
    warmup = min(microbatches, stages - stage - 1)
    order = [(FORWARD, m) for m in range(warmup)]
    for m in range(warmup, microbatches):
        order += [(FORWARD, m), (BACKWARD, m - warmup)]
    return order + [(BACKWARD, m) for m in range(microbatches - warmup, microbatches)]


class _Recorder:
    """Plays events on a memory model that follows the convention of trace.py exactly."""

    def __init__(self, static: int) -> None:
        self.static = static
        self.now = 0.0
        self.other = 0  # activations that nobody saved
        self.resident = 0
        self.live: dict[Key, SavedRecord] = {}
        self.points: list[Point] = []
        self.saved: list[SavedRecord] = []
        self.modules: list[ModuleRecord] = []

    def point(self, position: Position, ms: float, transient: int) -> int:
        """Close an interval of ``ms`` that needs ``transient`` bytes of working memory."""
        self.now += ms
        resident = self.resident
        allocated = self.static + self.other + resident
        self.points.append(Point(position, self.now, allocated, allocated + transient, transient, resident))
        return len(self.points) - 1

    def save(self, key: Key, nbytes: int, ms: float, transient: int, movable: bool = True) -> SavedRecord:
        index = self.point(Position(FORWARD, *key), ms, max(transient, nbytes))
        record = SavedRecord(key, nbytes, index, index, index + 1, None, None, movable, "" if movable else "ours not")
        self.live[key] = record
        self.resident += nbytes
        self.saved.append(record)
        return record

    def read(self, key: Key, ms: float, transient: int) -> None:
        index = self.point(Position(BACKWARD, *key), ms, transient)
        if self.live[key].first_read is None:
            self.live[key].first_read = index

    def drop(self, key: Key) -> None:
        """Its last handle died in the interval that the next point closes."""
        record = self.live.pop(key)
        record.died = len(self.points)
        self.resident -= record.nbytes


def megatron_trace(shape: Shape = Shape(), model: str = "llama") -> StepTrace:
    """One recorded step: 1F1B, saves forward, reads backward in reverse, an optimizer at the end."""
    rec = _Recorder(shape.static_mib * MIB)
    rec.point(Position(FORWARD, 0, 0, OUTSIDE, ENTER - 10), 0.0, 0)
    held = 0
    for phase, m in order_1f1b(shape.microbatches, shape.stages, shape.stage):
        if phase == FORWARD:
            _forward(rec, shape, m)
            held = max(held, rec.points[-1].allocated_bytes - rec.static)
        else:
            _backward(rec, shape, m)
    rec.point(Position(OPTIMIZER, 0, 0, OUTSIDE, ENTER), 0.1, 0)
    rec.point(Position(OPTIMIZER, 0, 0, OUTSIDE, EXIT), 5.0, shape.optimizer_mib * MIB)
    return StepTrace(
        model=model,
        capacity_bytes=max(p.peak_bytes for p in rec.points),
        static_bytes=rec.static,
        d2h_bytes_per_ms=shape.d2h_gbps * 1e6,
        h2d_bytes_per_ms=shape.h2d_gbps * 1e6,
        step_ms=rec.now,
        held_bytes=held,
        has_optimizer_state=True,
        points=rec.points,
        saved=rec.saved,
        modules=rec.modules,
        d2h_both_bytes_per_ms=shape.both_gbps * 1e6,
        h2d_both_bytes_per_ms=shape.both_gbps * 1e6,
    )


def _forward(rec: _Recorder, shape: Shape, m: int) -> None:
    transient = shape.transient_mib * MIB
    sites = len(shape.sites_mib)
    rec.point(Position(FORWARD, m, 0, OUTSIDE, ENTER), 0.05, 0)
    for layer in range(1, shape.layers + 1):
        rec.point(Position(FORWARD, m, 0, layer, ENTER), 0.01, 0)
        ms = shape.layer_forward_ms / (sites + 1)
        inner: list[SavedRecord] = []
        for ordinal, mib in enumerate(shape.sites_mib):
            inner.append(rec.save(Key(m, 0, layer, ordinal), int(mib * MIB), ms, transient))
        if shape.unmovable_mib:
            rec.save(Key(m, 0, layer, sites), int(shape.unmovable_mib * MIB), ms, transient, movable=False)
        end = rec.point(Position(FORWARD, m, 0, layer, EXIT), ms, transient)
        inner[0].sole = end + 1  # the caller's frame holds the layer input until the layer has returned
        for name, frees, keeps, share in shape.modules:
            first, last = inner[min(frees)].saved - 1, min(end, inner[max(frees)].saved + 1)
            keys = [inner[i].key for i in frees], [inner[i].key for i in keeps]
            spent = share * shape.layer_forward_ms
            rec.modules.append(ModuleRecord(ModuleKey(m, 0, layer, name), spent, first, last, *keys))
    if shape.logits_mib:
        rec.save(Key(m, 0, OUTSIDE, 0), shape.logits_mib * MIB, shape.layer_forward_ms / 4, shape.logits_mib * MIB)
    rec.point(Position(FORWARD, m, 0, OUTSIDE, EXIT), 0.05, 0)


def _backward(rec: _Recorder, shape: Shape, m: int) -> None:
    transient = shape.transient_mib * MIB
    sites = len(shape.sites_mib)
    rec.point(Position(BACKWARD, m, 0, OUTSIDE, ENTER), 0.05, 0)
    if shape.logits_mib:
        key = Key(m, 0, OUTSIDE, 0)
        rec.read(key, 0.1, shape.logits_mib * MIB)
        rec.drop(key)
    for layer in range(shape.layers, 0, -1):
        rec.point(Position(BACKWARD, m, 0, layer, ENTER), shape.layer_forward_ms / 20, transient)
        ms = 2 * shape.layer_forward_ms / (sites + 1)
        for ordinal in range(sites - (0 if shape.unmovable_mib else 1), -1, -1):
            key = Key(m, 0, layer, ordinal)
            rec.read(key, ms, transient)
            rec.drop(key)
        rec.point(Position(BACKWARD, m, 0, layer, EXIT), ms, transient)
    rec.point(Position(BACKWARD, m, 0, OUTSIDE, EXIT), 0.05, 0)


def random_trace(
    seed: int, tensors: int = 8, points: int = 30, modules: int = 0, model: str = "random"
) -> StepTrace:
    """Irregular: windows that neither nest nor queue, uneven times, transients, some tensors that may not move, some
    that are never read, some whose storage others hold for long."""
    rng = random.Random(seed)
    static = rng.randrange(0, 1000)
    windows = []
    for _ in range(tensors):
        saved, read = sorted(rng.sample(range(points), 2))
        windows.append((saved, read))
    used: set[int] = set()
    records = []
    for number, (saved, read) in enumerate(windows):
        while saved in used and saved < points - 1:
            saved += 1
        used.add(saved)
        key = Key(0, 0, 1, number)
        sole: int | None = min(points - 1, saved + 1 + rng.choice([0, 0, 0, 1, 5]))
        first_read: int | None = max(read, saved + 1) if saved < points - 1 else None
        died: int | None = None if first_read is None else min(points - 1, first_read + 1 + rng.choice([0, 0, 2]))
        lot = rng.random()
        if lot < 0.05:
            sole = None
        elif lot < 0.1:
            first_read = None
        records.append(
            SavedRecord(
                key, rng.choice([100, 200, 300, 1000, rng.randrange(1, 1500)]), saved,
                min(points - 1, saved + rng.choice([0, 0, 0, 1])), sole, first_read, died, rng.random() > 0.08,
            )
        )
    resident = [0] * points
    for record in records:
        for i in range(record.saved + 1, points if record.died is None else record.died):
            resident[i] += record.nbytes
    now = 0.0
    rows = []
    for i in range(points):
        now += rng.choice([0.0, 0.5, 1.0, rng.random() * 5])
        base = static + rng.choice([0, 0, 100, rng.randrange(0, 800)])
        phase = FORWARD if i < points // 2 else BACKWARD if i < points - 2 else OPTIMIZER
        peak = base + resident[i]
        rows.append(Point(Position(phase, 0, 0, 1, i), now, static + resident[i], peak, base - static, resident[i]))
    trace = StepTrace(
        model, max(row.peak_bytes for row in rows), static, rng.choice([50.0, 200.0, 1000.0]),
        rng.choice([50.0, 200.0, 1000.0]), now + 1.0, 0, True, rows, records,
    )
    readable = [record for record in records if record.first_read is not None]
    for number in range(modules if readable else 0):
        frees = rng.sample(readable, min(len(readable), rng.choice([1, 1, 2, 3])))
        rest = [record.key for record in readable if record not in frees]
        begin, end = min(record.saved for record in frees), max(record.saved for record in frees) + 1
        trace.modules.append(
            ModuleRecord(
                ModuleKey(0, 0, 1, f"m{number}"), rng.random() * rng.choice([0.5, 3.0, 10.0]), max(0, begin - 1),
                min(end, points - 1), [record.key for record in frees], rng.sample(rest, min(len(rest), 1)),
                rng.choice([0, 0, 50]),
            )
        )
    return trace
