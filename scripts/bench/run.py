"""Trains the points of a workload, one process each, and writes what they took. See README.md for what to run where.

    python scripts/bench/run.py --workload A --out runs/bench --minutes 9 [--points 'plain,full,adaptive@*']

Goes on where an earlier call ended: a point that --out or --known has a result of is not run again. Every machine runs
the references (plain, full recompute) first, as times are only compared within one.
"""
from __future__ import annotations

import argparse
import fnmatch
import functools
import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from competitors import (  # noqa: E402
    compile_budget,
    megatron_offload,
    megatron_recompute,
    optimizer_offload,
    ours,
    plain,
    save_on_cpu,
    torchtune_offload,
)
from machine import describe, versions  # noqa: E402
from points import FULL, PLAIN, Context, Point  # noqa: E402
from results import VERSION, Results, read  # noqa: E402
from training import Job, Run  # noqa: E402
from workloads import GPU, NAMES, SIM, Workload, workload  # noqa: E402

from mindspeed_swap.files import replace_file  # noqa: E402
from mindspeed_swap.report.reader import trace_files  # noqa: E402

# In the order in which time is best spent.
COMPETITORS = (
    plain, ours, megatron_recompute, megatron_offload, optimizer_offload, save_on_cpu, torchtune_offload, compile_budget
)  # fmt: skip
# Of a point that nothing is known of yet.
GUESSED_SECONDS = {GPU: 60.0, SIM: 30.0}


def all_points(context: Context) -> list[Point]:
    """Those that are known how to run by now: budgets need the plain run."""
    return [point for competitor in COMPETITORS for point in competitor.points(context)]


class Call:
    """One call: what it may run, what is known, what it has added."""

    def __init__(self, args: argparse.Namespace, chosen: Workload) -> None:
        self.args, self.workload = args, chosen
        self.file = f"{args.device}-{chosen.name}-{args.part}.json"
        self.machine = describe(args.device)
        self.ends = time.monotonic() + 60 * args.minutes
        self.earlier = read([args.out, *args.known], args.device)
        self.added: list[dict[str, Any]] = []
        self.tried: set[str] = set()  # references that failed are not begun again, nor what is missing told twice

    @property
    def results(self) -> Results:
        return Results([*self.earlier.records, *self.added], {})

    def next_job(self, running: Job | None = None) -> Job | None:
        """``running``: as if that had ended."""
        results, name = self.results, self.workload.name
        context = Context(self.workload, self.args.device, results.known(name))
        points = {point.name: point for point in all_points(context)}
        for reference in self.args.references:
            here = [run for run in results.runs(name, reference) if run["machine"] == self.machine["id"]]
            if reference in points and not here and reference not in self.tried:
                return self._job(points[reference])
        others = self._since_plain(running)
        if PLAIN in points and others >= self.args.plain_every > 0:
            return self._job(points[PLAIN])
        patterns = self.args.points
        wanted = [p for p in points.values() if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in patterns)]
        for point in wanted:
            if point.missing and point.name not in self.tried:
                self.tried.add(point.name)
                print(f"{point.name}: skipped: {point.missing}", flush=True)
        wanted = [point for point in wanted if not point.missing]
        counts = {point.name: self._count(point.name) for point in wanted}
        if running is not None and running.point.name in counts:
            counts[running.point.name] += 1
        least = min(counts.values(), default=0)
        if least >= self.args.rounds:
            return self._job(points[PLAIN]) if PLAIN in points and others and self.args.plain_every else None
        # Each round begins elsewhere: what comes first or last in a call is not always the same point.
        first = least * len(wanted) // self.args.rounds
        rotated = wanted[first:] + wanted[:first]
        return next((self._job(point) for point in rotated if counts[point.name] == least), None)

    def _since_plain(self, running: Job | None) -> int:
        """How many other points this call has run since the last plain run."""
        names = [record["point"] for record in self.added] + ([running.point.name] if running else [])
        return names[::-1].index(PLAIN) if PLAIN in names else len(names)

    def _job(self, point: Point) -> Job:
        return Job(self.workload, point, functools.partial(self._keep_trace, point) if self.args.traces else None)

    def _keep_trace(self, point: Point, folder: Path) -> dict[str, Any]:
        """What plans were made from, for work on the planner where there is no such device."""
        for file in trace_files(str(folder)):
            name = f"{self.workload.name}-{point.name}-{file.parent.name}.json.gz".replace("@", "-")
            (self.args.traces / name).write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        return {}

    def _count(self, point: str) -> int:
        records = [r for r in self.results.records if (r["workload"], r["point"]) == (self.workload.name, point)]
        if self.args.retry:
            records = [r for r in records if r["ok"] or r in self.added]
        return len(records)

    def expected_seconds(self, job: Job) -> float:
        """As long as the longest like it took."""
        mine = [r for r in self.results.records if r["workload"] == job.workload.name and r["wall_seconds"]]
        like = [r["wall_seconds"] for r in mine if r["group"] == job.point.group] or [r["wall_seconds"] for r in mine]
        return max(like, default=GUESSED_SECONDS[self.args.device])

    def run(self) -> int:
        """1 if points are left, which need another call."""
        ahead: Run | None = None
        try:
            while (job := self.next_job()) is not None:
                name, left = job.point.name, self.ends - time.monotonic()
                if self.expected_seconds(job) > left:
                    print(f"time is up: {name} and what follows need another call", flush=True)
                    return 1
                self.tried.add(name)
                if ahead is not None and ahead.job.key != job.key:  # the last result made other points
                    ahead.drop()
                    ahead = None
                run, ahead = ahead or self._start(job), None
                if self.args.ahead and (following := self.next_job(running=job)) is not None:
                    ahead = self._start(following)
                record = run.finish(left)
                if record is None:
                    print(f"{name}: ended as time is up; to be run again", flush=True)
                    return 1
                self.added.append(record)
                self._save()
                print(_line(record), flush=True)
            return 0
        finally:
            if ahead is not None:
                ahead.drop()

    def _start(self, job: Job) -> Run:
        return Run(job, self.args.device, self.machine["id"])

    def _save(self) -> None:
        folders = {folder: "KNOWN" for folder in self.args.known if folder.is_absolute()}
        folders |= {self.args.out: "OUT", self.args.traces: "TRACES"}
        given = [folders.get(Path(each), each) for each in self.args.given]  # not where they are on this machine
        data = {
            "version": VERSION,
            "machine": self.machine,
            "versions": versions(),
            "command": " ".join([f"scripts/bench/{Path(sys.argv[0]).name}", *given]),
            "points": self.added,
        }
        replace_file(self.args.out / self.file, json.dumps(data, indent=1) + "\n")


def _line(record: dict[str, Any]) -> str:
    if not record["ok"]:
        return f"{record['point']}: failed: {record['why']}"
    peak, held = record["peak_bytes"]["forward_backward"] / 2**20, record["held_bytes"] / 2**20
    return (
        f"{record['point']}: {record['step_ms']:.1f} ms, peak {peak:.1f} MiB, held {held:.1f} MiB "
        f"({record['wall_seconds']:.0f} s)"
    )


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=NAMES)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result file of this call")
    parser.add_argument("--known", type=Path, action="append", default=[], help="folders of results of other calls")
    parser.add_argument("--points", default="*", help="patterns, with commas between them (default: all)")
    parser.add_argument("--references", default=f"{PLAIN},{FULL}", help="points that every machine runs first")
    parser.add_argument("--plain-every", type=int, default=0, metavar="N", help="plain again after every N points "
                        "and at the end, as times are compared with those next to them (default: once)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, help="no point is begun that would not be over by then")
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    parser.add_argument("--rounds", type=int, default=1, help="how often each point is to be run, over all calls")
    parser.add_argument("--part", default=time.strftime("%Y%m%d-%H%M%S"), help="names the result file")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--ahead", action=argparse.BooleanOptionalAction, help="start the next point's process while "
                        "one trains; it waits before it touches the device (default: on a GPU machine)")  # fmt: skip
    parser.add_argument("--traces", type=Path, help="folder to keep the recorded steps of our points in")
    parser.add_argument("--list", action="store_true", help="print the points that are left, and run nothing")
    args = parser.parse_args(given)
    args.given = given
    if args.ahead is None:
        args.ahead = args.device == GPU
    args.points, args.references = (list(filter(None, x.split(","))) for x in (args.points, args.references))
    try:
        workload(args.workload, args.device)
    except KeyError:
        parser.error(f"--workload {args.workload}: not on --device {args.device}")
    for folder in filter(None, (args.out, args.traces)):
        folder.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(list(sys.argv[1:] if argv is None else argv))
    chosen = workload(args.workload, args.device)
    call = Call(args, chosen)
    if args.list:
        context = Context(chosen, args.device, call.results.known(chosen.name))
        print("\n".join(f"{p.name} {' '.join(p.flags)}" for p in all_points(context) if not call._count(p.name)))
        return 0
    return call.run()


if __name__ == "__main__":
    sys.exit(main())
