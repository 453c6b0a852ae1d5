"""What was predicted of a plan, as it was on disk before the first step that executed it, against what was measured.

    python scripts/bench/predictions.py --workload B --out runs/predictions [--features swap,adaptive] [--minutes 9]

For each budget (a share of the plain run's forward/backward peak) and feature: step time and forward/backward peak,
median and most of the counted steps. Nothing measured at the last budget goes into its prediction: its plan is made
from what the run at the budget before recorded. The last line says of how many budgets both are within the promise.
"""
from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from competitors.ours import FEATURES, planned  # noqa: E402
from competitors.plain import points as plain_points  # noqa: E402
from machine import describe, versions  # noqa: E402
from points import PLAIN, Context, Point  # noqa: E402
from promises import PREDICTED_PEAK, PREDICTED_PEAK_BYTES, PREDICTED_TIME  # noqa: E402
from training import Job, Run  # noqa: E402
from workloads import GPU, NAMES, SIM, workload  # noqa: E402

from mindspeed_swap.core.trace import StepTrace  # noqa: E402
from mindspeed_swap.smart_swap.plan_files import load_plans, save_plans  # noqa: E402
from mindspeed_swap.smart_swap.planning import make_plan  # noqa: E402
from mindspeed_swap.smart_swap.policy import Policy  # noqa: E402


def read_predictions(folder: Path) -> dict[str, Any]:
    path = folder / "predictions.json"
    return {"predictions": json.loads(path.read_text()) if path.exists() else []}


class Kept:
    """The plan file of a run, and the step that it recorded last."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.plans, self._trace = folder / "plans.json", folder / "step_trace.json"

    def read(self, folder: Path) -> dict[str, Any]:
        shutil.copy(folder / "rank0" / "step_trace.json", self._trace)
        return read_predictions(folder)

    def plan_for(self, budget: int, feature: str, file: Path) -> dict[str, Any]:
        """Writes a plan for another budget. Returns its prediction."""
        trace = StepTrace.from_json(self._trace.read_text())
        (shape,) = load_plans(self.plans, 0, trace.model)
        plan = make_plan(trace, Policy(recomputes=feature == "adaptive"), [budget]).plan
        if plan is None or plan.prediction is None:
            raise SystemExit(f"no plan for {budget} bytes")
        save_plans(file, 0, {shape: plan})
        return asdict(plan.prediction)


def compare(record: dict[str, Any]) -> dict[str, Any] | None:
    """None if no plan was needed. Of the plan that the counted steps ran: the bench's record has its prediction."""
    final = record["swap"]["predicted_ms"]
    for told in record["predictions"]:
        predicted = told["prediction"]
        if predicted["step_ms"] == final:
            peaks = [peak for phase, peak in predicted["peak_bytes"].items() if phase != "O"]
            peak, measured = max(peaks), record["peak_bytes"]["forward_backward"]
            found = {
                "on disk before step": told["before_step"],
                "step_ms": (final, record["step_ms"], record["step_ms"] / final),
                "peak_bytes": (peak, measured, measured / peak),
            }
            over = abs(measured - peak)
            good_peak = over <= max(PREDICTED_PEAK * peak, PREDICTED_PEAK_BYTES)
            return found | {"held": good_peak and abs(record["step_ms"] / final - 1) <= PREDICTED_TIME}
    return None


def table(workload_name: str, features: str, machine: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """What was promised and what came of it, [promised, measured] each."""
    rows = []
    for record in records:
        if record["ok"] and record["point"] != PLAIN and (found := compare(record)):
            feature, _, share = record["point"].partition("@")
            rows.append({
                "flag": FEATURES[feature], "budget_share": float(share), "before_step": found["on disk before step"],
                "step_ms": found["step_ms"][:2], "peak_bytes": found["peak_bytes"][:2],
            })  # fmt: skip
    command = f"scripts/bench/predictions.py --workload {workload_name} --features {features}"
    about = {name: machine[name] for name in ("card", "driver", "link") if name in machine}
    return {"command": command, "machine": about, "versions": versions(), "rows": rows}


def line(name: str, record: dict[str, Any]) -> str:
    if not record["ok"]:
        return f"{name:<15} failed: {record['why']}"
    found = compare(record)
    if found is None:
        return f"{name:<15} no plan: {record['step_ms']:.1f} ms"
    ms, peak = found["step_ms"], found["peak_bytes"]
    return (
        f"{name:<15} on disk before step {found['on disk before step']:>2}: {ms[0]:8.1f} ms, measured {ms[1]:8.1f} "
        f"({ms[2] - 1:+.1%}); forward/backward peak {peak[0] / 2**20:8.1f} MiB, measured {peak[1] / 2**20:8.1f} "
        f"({peak[2] - 1:+.1%}){'' if found['held'] else '  SHORT'}"
    )


def _searched(feature: str, share: float, peak: int, kept: Kept) -> Point:
    point = planned(f"{feature}@{share:.2f}", feature, int(share * peak))
    return replace(point, flags=(*point.flags, "--swap-plan-save", str(kept.plans)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=NAMES, default="B")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", help="shares of the plain peak (default: every second one of the workload's)")
    parser.add_argument("--features", default=",".join(FEATURES), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    args = parser.parse_args(argv)
    chosen, ends = workload(args.workload, args.device), time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    machine, records = describe(args.device), []

    def start(point: Point, kept: Kept | None = None) -> Run:
        return Run(Job(chosen, point, kept.read if kept else read_predictions), args.device, machine["id"])

    def finish(run: Run, prediction: dict[str, Any] | None = None) -> dict[str, Any]:
        """``prediction``: of the plan that it was given."""
        record = run.finish(ends - time.monotonic())
        if record is None:
            raise SystemExit(f"time is up at {run.job.point.name}")
        if prediction:
            record["predictions"] = [{"before_step": 1, "prediction": prediction}]
        records.append(record)
        name = f"{args.device}-{args.workload}-{args.features}"
        (args.out / f"{name}.json").write_text(json.dumps(records, indent=1))
        shown = table(args.workload, args.features, machine, records)
        (args.out / f"{name}-table.json").write_text(json.dumps(shown, indent=1) + "\n")
        return record

    plain = finish(start(next(p for p in plain_points(Context(chosen, args.device, {})) if p.name == PLAIN)))
    if not plain["ok"]:
        raise SystemExit(f"plain: {plain['why']}")
    peak = plain["peak_bytes"]["forward_backward"]
    print(f"plain: {plain['step_ms']:.1f} ms, forward/backward peak {peak / 2**20:.1f} MiB", flush=True)
    shares = [float(share) for share in args.budgets.split(",")] if args.budgets else chosen.fractions[::2]
    held = 0
    for feature in args.features.split(","):
        kept, following = Kept(args.out / feature), None
        for number, share in enumerate(shares):
            prediction, unseen = None, 0 < number == len(shares) - 1
            if unseen:
                file, budget = args.out / feature / "unseen.json", int(share * peak)
                prediction = kept.plan_for(budget, feature, file)
                flags = FEATURES[feature], "--swap-plan", str(file)
                run = start(Point(f"{feature}@{share:.2f}", "ours", flags, budget_bytes=budget))
            else:
                run = following or start(_searched(feature, share, peak, kept), kept)
            following = None
            if number + 2 < len(shares):  # imports meanwhile
                following = start(_searched(feature, shares[number + 1], peak, kept), kept)
            record = finish(run, prediction)
            held += bool(record["ok"] and (found := compare(record)) and found["held"])
            print(line(record["point"], record) + (" (nothing measured at it)" if unseen else ""), flush=True)
            if not record["ok"]:
                if following:
                    following.drop()
                break
    limits = f"{PREDICTED_TIME:.0%} of time and {PREDICTED_PEAK:.0%} or 0.3 GiB of peak"
    print(f"{held} of {len(args.features.split(',')) * len(shares)} within {limits}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
