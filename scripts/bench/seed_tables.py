"""Adaptive memory against full recompute, and SmartSwap in place of tensor parallelism and of recompute, in the columns
of MindSpeed's own tables (feature, parameters, devices, TFLOPs, gain).

    python scripts/bench/seed_tables.py --run 2 --out runs/bench [--minutes 9]      (GPUs: 1, 2, 4 or 8)
    python scripts/bench/seed_tables.py --run 2 --device sim --out runs/bench       (ranks of the simulated device)
    python scripts/bench/seed_tables.py --results docs/results --page docs/seed_tables.md

8 devices run the tables' own sizes. Fewer run the same layouts scaled down (one: those without stages), at 0.8 of the
peak that plain training takes there, as those small models would fit without any feature. From a scaled run the full
size is predicted, not run: its recorded step with bytes and times scaled by the model's sizes.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from points import PLAIN, Context  # noqa: E402
from results import Results, read  # noqa: E402
from run import Call, all_points  # noqa: E402
from seed_sizes import ADAPTIVE, Size, Table, predict, tables  # noqa: E402
from table import grid  # noqa: E402
from training import Job  # noqa: E402
from workloads import GPU, SIM, Workload  # noqa: E402

NOT_RUN = "not run"
TARGET = 0.8  # of plain's peak, where the model is scaled down


def name_of(table: Table, ranks: int, side: str) -> str:
    return f"{table.key} | {ranks} | {side}"


class SeedCall(Call):
    """Both sides of every table; where it is scaled down, plain of the feature's side first, for its target."""

    def next_job(self, running: Job | None = None) -> Job | None:
        here = self.results.of(self.machine["id"])
        for table, full in tables(self.args.run, self.args.device):
            if None not in compared(self.results, table, self.args.run):
                continue
            after = [f"{table.feature}@{name}" if name != PLAIN else name for name in self._after()]
            for side, size, wanted in (("before", table.before, [table.baseline]), ("after", table.after, after)):
                workload = size.workload(name_of(table, self.args.run, side))
                known = here.known(workload.name)
                possible = {p.name: p for p in all_points(Context(workload, self.args.device, known))}
                for name in wanted:
                    if name in known or name not in possible:
                        continue
                    predicts = name == "adaptive@nothing" and table is not full
                    job = Job(workload, possible[name], partial(predict, table, full) if predicts else None)
                    if running is None or job.key != running.key:
                        return job
        return None

    def _after(self) -> tuple[str, ...]:
        return ("nothing",) if self.args.run == 8 and self.args.device == GPU else (PLAIN, "nothing", f"{TARGET:.2f}")


_HEAD = ("feature", "devices", "parameters", "TFLOPs", "parameters of the baseline", "TFLOPs", "gain", "goal",
         "peak / baseline")  # fmt: skip
_PREDICTED = ("feature", "from devices", "full recompute ms", "feature ms", "gain")


def page(results: Results, device: str) -> str:
    ran, predicted = [], []
    for ranks in (8, 4, 2, 1) if device == GPU else (4, 2, 1):
        for table, _ in tables(ranks, device):
            ran.append(_row(table, ranks, *compared(results, table, ranks)))
            if ranks < 8 and table.feature == ADAPTIVE:
                source = results.latest(name_of(table, ranks, "after"), "adaptive@nothing") or {}
                predicted.append((table.key, str(ranks), *_prediction(source.get("what_if"))))
    return (
        ("Of the simulated device: no time here means anything.\n\n" if device == SIM else "")
        + "TFLOPs per device, of the model, whatever is recomputed. Made by `scripts/bench/seed_tables.py`.\n\n"
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
    parser.add_argument("--run", type=int, choices=(1, 2, 4, 8), help="devices to run on")
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
        args.ahead, args.traces = args.device == GPU, None
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
