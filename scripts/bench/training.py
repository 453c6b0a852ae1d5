"""Trains one point in processes of its own, and makes the record of it from what they wrote."""
from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lower_bound import recompute_options
from points import OURS, Point
from workloads import COUNTED_STEPS, GPU, SIM, Workload

HERE = Path(__file__).resolve().parent
SCRIPT = {GPU: "pretrain_gpt_gpu.sh", SIM: "pretrain_gpt_sim.sh"}
OUT_OF_MEMORY = "out of memory"
PARTING_WARNING = "destroy_process_group() was not called"  # torch's, behind what a run that failed has to say
LAUNCHERS_REPORT = "torch/distributed/elastic/multiprocessing/api.py"
# What a traceback ends with, also where torch says whose it is: "[rank1]: AssertionError: ...".
ERROR = re.compile(r"(\[rank\d+\]: *)?[A-Za-z_][\w.]*(Error|Exception)\b")
LOG_LINES = 40


class Job(NamedTuple):
    """What is to be run. ``inspect`` may add to the record what it finds in the run's folder."""

    workload: Workload
    point: Point
    inspect: Callable[[Path], dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[str, Point]:
        return self.workload.name, self.point

    @property
    def steps(self) -> int:
        before = self.workload.search_steps if self.point.searches else self.workload.warm_up_steps
        return before + self.workload.counted_steps


class Run:
    """A job in processes of its own. They import what they need at once, and begin when ``finish`` opens the gate:
    the next job's start, as long as many a training, passes behind the job before it.
    """

    def __init__(self, job: Job, device: str, machine: str) -> None:
        self.job = job
        workload, point = job.workload, job.point
        self._temporary = tempfile.TemporaryDirectory(prefix="bench-")
        self._folder = Path(self._temporary.name)
        flags = [*workload.flags, *point.flags]
        settings = {**workload.settings, **point.settings, "NPROC": str(workload.ranks), "ITERS": str(job.steps)}
        if point.plugin:
            settings |= {"BENCH_PLUGIN": point.plugin, "BENCH_PLUGIN_SETTING": point.plugin_setting}
        shown = [f"{name}={value}" for name, value in settings.items()]
        self._record: dict[str, Any] = {
            "workload": workload.name, "point": point.name, "group": point.group, "machine": machine,
            "when": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()), "budget_bytes": point.budget_bytes,
            "microbatches": workload.microbatches,
            "command": shlex.join(
                [*shown, "PROGRAM=scripts/bench/train_point.py", f"scripts/{SCRIPT[device]}", *flags]
            ),
        }
        command = ["bash", str(HERE.parent / SCRIPT[device]), *flags, "--measure-no-hashes"]
        command += ["--measure-file", f"{self._folder}/measured.{{rank}}.json"]
        # Where Megatron logs it waits for all of the device, copies included: not after each step.
        command += ["--log-interval", str(job.steps)]
        if workload.undisturbed_steps:
            command += ["--measure-until", str(workload.warm_up_steps), str(workload.undisturbed_steps)]
        if point.group == OURS:
            command += ["--swap-report-dir", str(self._folder)]
        settings |= {"PROGRAM": str(HERE / "train_point.py"), "BENCH_GATE": str(self._gate)}
        self._process = self._start(command, settings, device)

    @property
    def _gate(self) -> Path:
        return self._folder / "gate"

    @property
    def _log(self) -> Path:
        return self._folder / "log.txt"

    def _start(self, command: list[str], settings: dict[str, str], device: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
        environment |= {"PYTHON": sys.executable} | settings
        if device == SIM:
            environment.setdefault("DATA", "mock")
        with self._log.open("w") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, seconds: float) -> dict[str, Any] | None:
        """Its record; None if it was not over after ``seconds``."""
        started = time.monotonic()
        try:
            self._gate.touch()
            code = self._process.wait(seconds)
            self._record["wall_seconds"] = round(time.monotonic() - started, 1)
            return self._outcome(code)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.drop()

    def _outcome(self, code: int) -> dict[str, Any]:
        if code != 0:
            lines = said_by_ranks(without_places(self._log.read_text(errors="replace")))
            why = why_it_failed(lines) or f"exit code {code}"
            return self._record | {"ok": False, "why": why, "log": lines[-LOG_LINES:]}
        ranks = [json.loads((self._folder / f"measured.{n}.json").read_text()) for n in range(self.job.workload.ranks)]
        if not (counted := counted_steps(self.job.workload, ranks)):
            return self._record | {"ok": False, "why": "the search was not over"}
        record = self._record | {"ok": True, "why": ""} | figures(ranks, counted)
        record |= _ours(self._folder, len(ranks), self.job.point)
        return record | self.job.inspect(self._folder) if self.job.inspect else record

    def drop(self) -> None:
        """End what is still running, and remove what it wrote."""
        if self._process.poll() is None:
            _end(self._process)
        self._temporary.cleanup()


def without_places(log: str) -> str:
    """Results are published: files are named from this repository, or from what was installed, not from where both are
    on this machine."""
    for place in sorted({str(HERE.parents[1]), *sys.path} - {"", "/"}, key=len, reverse=True):
        log = log.replace(f"{place}/", "")
    return log


def said_by_ranks(log: str) -> list[str]:
    """The lines of a run that failed, without torch's parting words and torchrun's report of who failed first."""
    lines = [line for line in log.rstrip().split("\n") if PARTING_WARNING not in line]
    report = next((number for number, line in enumerate(lines) if LAUNCHERS_REPORT in line), len(lines))
    return lines[:report] or lines


def why_it_failed(lines: list[str]) -> str:
    """One line: what says that memory ran out, else the last error, else the last of all."""
    told = [line for line in lines if OUT_OF_MEMORY in line.lower()] or [line for line in lines if ERROR.match(line)]
    return (told or lines or [""])[-1].strip()[:300]


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its ranks: they are in its session, or torchrun, asked to end, ends them."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def counted_steps(workload: Workload, ranks: list[dict[str, Any]]) -> int:
    """0: those after the search are too few."""
    if not workload.undisturbed_steps:
        return workload.counted_steps
    settled = min(rank["settled_steps"] for rank in ranks)
    return settled if settled >= COUNTED_STEPS else 0


def figures(ranks: list[dict[str, Any]], counted_steps: int) -> dict[str, Any]:
    """Of the last steps of all ranks, which count: the slowest rank's times, the largest memory. Times: of those in
    which no rank's host was disturbed (host_pace.py), if they are enough; else of all."""
    counted = [rank["steps"][-counted_steps:] for rank in ranks]
    together = list(zip(*counted, strict=True))
    steps_ms = [1000 * max(step["seconds"] for step in steps) for steps in together]
    every = [step for steps in counted for step in steps]
    undisturbed = [all(step["undisturbed"] for step in steps) for steps in together]
    timed = undisturbed if sum(undisturbed) >= COUNTED_STEPS else [True] * len(together)

    def of_timed(values: Iterable[float]) -> list[float]:
        return list(itertools.compress(values, timed))

    def device_ms(phase: str) -> float:
        return statistics.median(of_timed(max(step[phase] for step in steps) for steps in together))

    def most(kind: str, phase: str) -> int:
        return max(step["phases"].get(phase, {}).get(kind, 0) for step in every)

    losses = [step["loss"] for rank in ranks for step in rank["steps"] if step["loss"] is not None]
    quarters = statistics.quantiles(of_timed(steps_ms), n=4)
    return {
        "steps_ms": [round(ms, 3) for ms in steps_ms],
        "undisturbed": undisturbed,
        "pace_ms": [  # of the host: of all steps, those that do not count as well
            round(max(step["pace_ms"] for step in steps), 4)
            for steps in zip(*(rank["steps"] for rank in ranks), strict=True)
        ],
        "uncounted_ms": [
            round(1000 * max(step["seconds"] for step in steps), 3)
            for steps in zip(*(rank["steps"][:-counted_steps] for rank in ranks), strict=True)
        ],
        "step_ms": statistics.median(of_timed(steps_ms)),
        "spread_ms": [quarters[0], quarters[2]],
        "forward_ms": device_ms("forward_ms"),
        "backward_ms": device_ms("backward_ms"),
        "peak_bytes": {phase: most("allocated_bytes", phase) for phase in ("forward_backward", "optimizer")},
        "peak_reserved_bytes": max(most("reserved_bytes", p) for p in ("forward_backward", "optimizer", "rest")),
        "held_bytes": max(step["held_bytes"] for step in every),
        "static_bytes": max(step["static_bytes"] for step in every),
        "host": [rank["host"] for rank in ranks],
        "ranks": [
            {"peak_bytes": max(step["phases"]["forward_backward"]["allocated_bytes"] for step in steps),
             "held_bytes": max(step["held_bytes"] for step in steps)}
            for steps in counted
        ],
        "losses": [losses[0], losses[-1]],
    }  # fmt: skip


def _ours(folder: Path, ranks: int, point: Point) -> dict[str, Any]:
    """What our feature reported: of the last rank whose step was predicted longest, and the link and modules."""
    summaries = [path for rank in range(ranks) if (path := folder / f"rank{rank}" / "summary.json").exists()]
    if not summaries:
        return {}
    told = [json.loads(path.read_text()) for path in summaries]
    first = told[0]
    predictions = [t["plan"]["prediction"] for t in told if t["plan"]["prediction"]]
    found: dict[str, Any] = {
        "swap": {
            "phase": first["phase"],
            "stable_steps": min(t["stable"]["steps"] for t in told),
            "tries": max(len(t["tries"]) for t in told),
            "tried": first["tries"],  # predicted before it ran, and measured
            "swap_bytes": max(t["plan"]["swap_bytes"] for t in told),
            "predicted_ms": max((p["step_ms"] for p in predictions), default=None),
            "predicted_peak_bytes": max((max(p["peak_bytes"].values()) for p in predictions), default=None),
            "recompute_ms": max((p["recompute_ms"] for p in predictions), default=None),
            "stall_ms": max((p["stall_ms"] for p in predictions), default=None),
            "stable": first["stable"],
            **{
                name: max(((t["virtual_optimizer"] or {}).get(name, 0) for t in told), default=0)
                for name in ("moments_bytes", "came_early_bytes", "left_late_bytes")
            },
            "host_bytes": max(t["host"]["peak_used_bytes"] for t in told),
        }
    }
    trace_file = folder / "rank0" / "step_trace.json"
    if trace_file.exists():
        trace = json.loads(trace_file.read_text())
        found["link"] = {"out_bytes_per_ms": trace["d2h_bytes_per_ms"], "in_bytes_per_ms": trace["h2d_bytes_per_ms"]}
        if point.name == "adaptive@nothing":  # where nothing else disturbs the times of the modules
            found["recompute_options"] = recompute_options(trace)
    return found
