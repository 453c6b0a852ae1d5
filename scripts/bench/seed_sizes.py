"""The models and layouts of MindSpeed's tables, the same scaled down to fewer ranks, and the way back up: what a
scaled run's recorded step predicts of the full size.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from points import FULL, PLAIN
from workloads import GPU, SIM, Workload

from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.report.what_if import frontier

CARD_BYTES = 80 * 10**9  # of the predicted full size: an 80 GB card
ADAPTIVE, SMART = "adaptive", "swap"


@dataclass(frozen=True)
class Size:
    """A model and a layout. ``layers`` x ``hidden``; batch and layout as the tables write them."""

    layers: int
    hidden: int
    ffn: int
    seq: int
    mbs: int
    gbs: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ranks: int = 1
    vocab: int = 32000

    def workload(self, name: str) -> Workload:
        settings = {
            "LAYERS": self.layers, "HIDDEN": self.hidden, "FFN": self.ffn, "SEQ": self.seq, "MBS": self.mbs,
            "GBS": self.gbs, "TP": self.tp, "PP": self.pp, "HEADS": max(2 * self.tp, self.hidden // 128),
        }  # fmt: skip
        flags = ("--sequence-parallel",) if self.tp > 1 else ()
        if self.vpp > 1:
            per_chunk = self.layers // self.pp // self.vpp
            flags += ("--num-layers-per-virtual-pipeline-stage", str(per_chunk))
        data_parallel = self.ranks // self.tp // self.pp
        texts = {key: str(value) for key, value in settings.items()}
        return Workload(name, self.text, texts, flags, self.ranks, self.gbs // self.mbs // data_parallel)

    @property
    def text(self) -> str:
        vpp = f", VPP={self.vpp}" if self.vpp > 1 else ""
        return (f"seq-length={self.seq}, micro-batch-size={self.mbs}, global-batch-size={self.gbs}, TP={self.tp}, "
                f"PP={self.pp}{vpp}, NL={self.layers}, hidden-size={self.hidden}")  # fmt: skip

    def tflop(self) -> float:
        """Of the model, per step and device, whatever is recomputed."""
        per_layer = 6 * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + 6 * self.hidden * self.seq
        return self.gbs * self.seq * (self.layers * per_layer + 6 * self.hidden * self.vocab) / self.ranks / 1e12


@dataclass(frozen=True)
class Table:
    """``before`` and ``after``: the sizes that are compared; ``goal``: the gain that the table reports or asks for."""

    key: str
    goal: float
    feature: str
    baseline: str  # the point that the feature is compared with
    before: Size
    after: Size


_WIDE = Size(8, 12288, 32768, 8192, 10, 40, tp=8, ranks=8)
FULL_SIZE = (
    Table("adaptive, TP 8, as printed (8 layers against 3)", 0.1465, ADAPTIVE, FULL, replace(_WIDE, layers=3), _WIDE),
    Table("adaptive, TP 8, equal models", 0.1465, ADAPTIVE, FULL, _WIDE, _WIDE),
    *(
        Table(f"adaptive, TP 2 x PP 4{text}", 0.1465, ADAPTIVE, FULL, size, size)
        for text, size in (
            ("", replace(_WIDE, mbs=3, gbs=9, tp=2, pp=4)),
            (" x VPP 2", replace(_WIDE, mbs=2, gbs=8, tp=2, pp=4, vpp=2)),
        )
    ),
    Table("SmartSwap, TP 8 to TP 1", 0.25, SMART, PLAIN, Size(32, 4096, 11008, 8192, 1, 8, tp=8, ranks=8),
          Size(32, 4096, 11008, 8192, 1, 8, ranks=8)),
    Table("SmartSwap, full recompute off", 0.28, SMART, FULL, Size(40, 5120, 13824, 16384, 1, 8, tp=8, ranks=8),
          Size(40, 5120, 13824, 16384, 1, 8, tp=8, ranks=8)),
)  # fmt: skip


def scaled(table: Table, ranks: int, device: str) -> Table:
    """The same layout on fewer ranks, same layers per stage as far as it can be: the order of the step is kept."""

    def fewer(size: Size) -> Size:
        pp = min(size.pp, 2)
        tp = max(1, ranks // pp) if size.tp > 1 else 1
        layers = max(size.layers * pp // size.pp, pp * size.vpp) if size.layers <= 8 else 8
        small = replace(size, layers=layers, tp=tp, pp=pp, ranks=ranks, gbs=size.gbs // size.mbs)
        if device == SIM:
            return replace(small, hidden=64, ffn=128, seq=128, mbs=8, gbs=8 * small.gbs, vocab=256)
        return replace(small, hidden=4096, ffn=11008, mbs=1)

    return replace(table, before=fewer(table.before), after=fewer(table.after))


def tables(ranks: int, device: str) -> list[tuple[Table, Table]]:
    """(as it is run on so many ranks, its full size). One rank has no stages, nor tensor parallelism to do without."""
    found = []
    for full in FULL_SIZE:
        table = full if ranks == 8 and device == GPU else scaled(full, ranks, device)
        if ranks > 1 or (full.before.pp == 1 and full.before.tp == full.after.tp):
            found.append((table, full))
    return found


def predict(table: Table, full: Table, folder: Path) -> dict[str, Any]:
    """Of the full size, from the traces of a scaled run: ms of plain, full recompute and the feature on CARD_BYTES."""
    small, large = table.after, full.after
    wider = large.mbs * large.seq * large.hidden / large.tp / (small.mbs * small.seq * small.hidden / small.tp)
    parameters = [size.layers * (4 * size.hidden**2 + 3 * size.hidden * size.ffn) / size.tp / size.pp
                  for size in (small, large)]  # fmt: skip
    times = large.tflop() / large.gbs * large.mbs / (small.tflop() / small.gbs * small.mbs)
    traces = []
    for path in sorted(folder.glob("rank*/step_trace.json")):
        traces.append(_scale(StepTrace.from_json(path.read_text()), wider, parameters[1] / parameters[0], times))
    found = frontier(traces, [CARD_BYTES])
    again = [sum(m.forward_ms for m in trace.modules if m.key.name == "layer") for trace in traces]
    answer = found.answers[CARD_BYTES]["+recompute"]
    told = {"plain_ms": found.plain_ms, "full_ms": found.plain_ms + max(again), "step_ms": answer.step_ms}
    return {"what_if": told | {"plain_peak_bytes": found.peak_bytes}}


def _scale(trace: StepTrace, wider: float, static: float, times: float) -> StepTrace:
    def memory(nbytes: int) -> int:
        return int(trace.static_bytes * static + (nbytes - trace.static_bytes) * wider)

    points = [
        replace(point, time_ms=point.time_ms * times, allocated_bytes=memory(point.allocated_bytes),
                peak_bytes=memory(point.peak_bytes), request_bytes=int(point.request_bytes * wider),
                resident_bytes=int(point.resident_bytes * wider), recompute_bytes=int(point.recompute_bytes * wider))
        for point in trace.points
    ]  # fmt: skip
    modules = [
        replace(module, forward_ms=module.forward_ms * times, input_bytes=int(module.input_bytes * wider),
                rerun_bytes=None if module.rerun_bytes is None else int(module.rerun_bytes * wider))
        for module in trace.modules
    ]  # fmt: skip
    saved = [replace(record, nbytes=int(record.nbytes * wider)) for record in trace.saved]
    return replace(trace, points=points, modules=modules, saved=saved, copies=[], waits=[], model="",
                   capacity_bytes=CARD_BYTES, static_bytes=int(trace.static_bytes * static),
                   held_bytes=int(trace.held_bytes * wider), step_ms=trace.step_ms * times, stall_ms=0.0)  # fmt: skip
