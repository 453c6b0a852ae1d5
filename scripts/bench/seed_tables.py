"""Adaptive memory against full recompute, and SmartSwap in place of tensor parallelism and of recompute, in the columns
of MindSpeed's own tables (feature, parameters, devices, TFLOPs, gain).

    python scripts/bench/seed_tables.py --run 2 --out runs/bench [--minutes 9]      (GPUs: 2, 4 or 8)
    python scripts/bench/seed_tables.py --run 2 --device sim --out runs/bench       (ranks of the simulated device)
    python scripts/bench/seed_tables.py --results docs/results --page docs/seed_tables.md

8 devices run the tables' own sizes. Fewer run the same layouts scaled down, at 0.8 of the peak that plain training
takes there, as those small models would fit without any feature. From a scaled run the full size is predicted, not run:
its recorded step with bytes and times scaled by the model's sizes.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from points import FULL, PLAIN, Context, Point  # noqa: E402
from results import Results, read  # noqa: E402
from run import Call, all_points  # noqa: E402
from table import grid  # noqa: E402
from workloads import GPU, SIM, Workload  # noqa: E402

from mindspeed_swap.core.trace import StepTrace  # noqa: E402
from mindspeed_swap.report.what_if import frontier  # noqa: E402

NOT_RUN = "not run"
TARGET = 0.8  # of plain's peak, where the model is scaled down
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
        tp = ranks // pp if size.tp > 1 else 1
        layers = max(size.layers * pp // size.pp, pp * size.vpp) if size.layers <= 8 else 8
        small = replace(size, layers=layers, tp=tp, pp=pp, ranks=ranks, gbs=size.gbs // size.mbs)
        if device == SIM:
            return replace(small, hidden=64, ffn=128, seq=128, mbs=8, gbs=8 * small.gbs, vocab=256)
        return replace(small, hidden=4096, ffn=11008, mbs=1)

    return replace(table, before=fewer(table.before), after=fewer(table.after))


def tables(ranks: int, device: str) -> list[Table]:
    return [table if ranks == 8 and device == GPU else scaled(table, ranks, device) for table in FULL_SIZE]


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
    modules = [replace(module, forward_ms=module.forward_ms * times, input_bytes=int(module.input_bytes * wider))
               for module in trace.modules]  # fmt: skip
    saved = [replace(record, nbytes=int(record.nbytes * wider)) for record in trace.saved]
    return replace(trace, points=points, modules=modules, saved=saved, copies=[], waits=[], model="",
                   capacity_bytes=CARD_BYTES, static_bytes=int(trace.static_bytes * static),
                   held_bytes=int(trace.held_bytes * wider), step_ms=trace.step_ms * times, stall_ms=0.0)  # fmt: skip


def name_of(table: Table, ranks: int, side: str) -> str:
    return f"{table.key} | {ranks} | {side}"


class SeedCall(Call):
    """Both sides of every table; where it is scaled down, plain of the feature's side first, for its target."""

    def next_point(self) -> Point | None:
        here = self.results.of(self.machine["id"])
        for table, full in zip(tables(self.args.run, self.args.device), FULL_SIZE, strict=True):
            if None not in compared(self.results, table, self.args.run):
                continue
            after = [f"{table.feature}@{name}" if name != PLAIN else name for name in self._after()]
            for side, size, wanted in (("before", table.before, [table.baseline]), ("after", table.after, after)):
                self.workload = size.workload(name_of(table, self.args.run, side))
                known = here.known(self.workload.name)
                possible = {p.name: p for p in all_points(Context(self.workload, self.args.device, known))}
                for name in wanted:
                    if name not in known and name in possible:
                        predicts = name == "adaptive@nothing" and table is not full
                        self.inspect = partial(predict, table, full) if predicts else None
                        return possible[name]
        return None

    def _after(self) -> tuple[str, ...]:
        return ("nothing",) if self.args.run == 8 and self.args.device == GPU else (PLAIN, "nothing", f"{TARGET:.2f}")


_HEAD = ("feature", "devices", "parameters", "TFLOPs", "parameters of the baseline", "TFLOPs", "gain", "goal",
         "peak / baseline")  # fmt: skip
_PREDICTED = ("feature", "from devices", "full recompute ms", "feature ms", "gain")


def page(results: Results, device: str) -> str:
    ran, predicted = [], []
    for ranks in (8, 4, 2) if device == GPU else (4, 2):
        for table in tables(ranks, device):
            ran.append(_row(table, ranks, *compared(results, table, ranks)))
            if ranks < 8 and table.feature == ADAPTIVE:
                source = results.latest(name_of(table, ranks, "after"), "adaptive@nothing") or {}
                predicted.append((table.key, str(ranks), *_prediction(source.get("what_if"))))
    return (
        "TFLOPs per device, of the model, whatever is recomputed. Made by `scripts/bench/seed_tables.py`.\n\n"
        + grid(_HEAD, ran)
        + "\nFull size on 80 GB cards, predicted from runs scaled down; it was not run:\n\n"
        + grid(_PREDICTED, predicted)
    )


def compared(results: Results, table: Table, ranks: int) -> tuple[Any, Any]:
    """(the feature's record, the baseline's) of one machine; None for what no machine has beside the other."""
    before, after = name_of(table, ranks, "before"), name_of(table, ranks, "after")
    at = "nothing" if ranks == 8 else f"{TARGET:.2f}"
    found: tuple[Any, Any] = (None, None)
    for machine in dict.fromkeys(record["machine"] for record in results.records):
        here = results.of(machine)
        pair = here.latest(after, f"{table.feature}@{at}"), here.latest(before, table.baseline)
        found = max(found, pair, key=lambda records: 2 - records.count(None))
    return found


def _row(table: Table, ranks: int, ours: Any, theirs: Any) -> tuple[str, ...]:
    gain = peak = NOT_RUN
    if ours and theirs and ours["ok"] and theirs["ok"]:
        faster = table.after.tflop() / ours["step_ms"] / (table.before.tflop() / theirs["step_ms"])
        gain = f"{faster - 1:+.2%}"
        peak = f"{ours['peak_bytes']['forward_backward'] / theirs['peak_bytes']['forward_backward']:.2f}"
    return (table.key, str(ranks), table.after.text, _speed(ours, table.after), table.before.text,
            _speed(theirs, table.before), gain, f">= {table.goal:.2%}", peak)  # fmt: skip


def _prediction(told: Any) -> tuple[str, str, str]:
    if not told:
        return NOT_RUN, NOT_RUN, NOT_RUN
    if told["step_ms"] is None:
        return f"{told['full_ms']:.1f}", "no plan fits", "-"
    gain = told["full_ms"] / told["step_ms"] - 1
    return f"{told['full_ms']:.1f}", f"{told['step_ms']:.1f}", f"{gain:+.2%}"


def _speed(record: Any, size: Size) -> str:
    if record is None:
        return NOT_RUN
    return f"{size.tflop() / record['step_ms'] * 1000:.4g}" if record["ok"] else f"does not train: {record['why'][:80]}"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, choices=(2, 4, 8), help="devices to run on")
    parser.add_argument("--out", type=Path, help="folder of the result file of a run")
    parser.add_argument("--known", "--results", type=Path, action="append", default=[], help="folders of results")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    parser.add_argument("--page", type=Path, help="write the tables there")
    args = parser.parse_args(given)
    if args.run:
        if args.out is None:
            parser.error("--run needs --out")
        args.out.mkdir(parents=True, exist_ok=True)
        args.given, args.part, args.retry = given, time.strftime("%Y%m%d-%H%M%S"), False
        left = SeedCall(args, Workload(f"seeds{args.run}", "", {})).run()
    else:
        left = 0
    text = page(read([*([args.out] if args.out else []), *args.known], args.device), args.device)
    if args.page:
        args.page.write_text("# MindSpeed's tables, here\n\n" + text)
    print(text)
    return left


if __name__ == "__main__":
    sys.exit(main())
