"""Trains a layout three ways: plain, a few steps for the floor, and capped halfway between the two with a feature.

As a program: ``python tests/layouts/layout_runs.py [--adaptive] [LAYOUT[:DTYPE] ...]`` trains and prints the figures of
each rank.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "warm"))  # where this is the program

from layouts import LAYOUTS, Layout  # noqa: E402
from warm_python import python  # noqa: E402

REPOSITORY = HERE.parents[1]
SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt_sim.sh"
SMART_SWAP, ADAPTIVE = "--smart-swap", "--adaptive-memory-optimization"
# With a link that hides little, recompute is worth its time, however slow the machine computes.
SLOW_LINK_GBPS = "0.01"
# WarmUp takes two steps and a search eight at most: each number of microbatches has room for both, whatever the noise
# of its times lets the search do.
STEPS = 12
# WarmUp knows the floor after the second step, the first one that starts with optimizer state.
FLOOR_STEPS = 3
LEAST_HELD_SAVED = 0.25
TIMEOUT_SECONDS = 600  # generous: a hang, not a slow machine
STACKS_SECONDS = 3  # for a rank to write them


class TrainingFailed(AssertionError):
    """A run ended badly: what, and the end of its output."""


@dataclass(frozen=True, slots=True)
class Run:
    """Of every rank what --measure-file wrote and, with the feature, its summary.json."""

    measured: list[dict[str, Any]]
    summaries: list[dict[str, Any]]
    output: str
    folder: Path  # with the report, if there is one

    def peaks(self) -> list[int]:
        return [rank["peak_bytes"] for rank in self.measured]

    def held(self) -> list[int]:
        return [rank["steps"][-1]["held_bytes"] for rank in self.measured]

    def digests(self) -> list[dict[str, str]]:
        return [rank["sha256"] for rank in self.measured]


class Trainer:
    """Runs scripts/pretrain_gpt_sim.sh in ``folder`` on the text ``data``. Each run is kept."""

    def __init__(self, folder: Path, data: str) -> None:
        self._folder, self._data = folder, data
        python()  # before threads ask for it: each would start one
        self._plain: dict[tuple[str, str], Run] = {}
        self._floors: dict[tuple[str, str], list[int]] = {}
        self._swapped: dict[tuple[str, str, str], Run] = {}

    def train(
        self, layout: Layout, dtype: str, *flags: str, caps: list[int] | None = None, **extra: str
    ) -> Run:
        """Raises TrainingFailed."""
        done, folder = self.start(layout, dtype, *flags, caps=caps, **extra)
        if done.returncode != 0:
            raise TrainingFailed(f"{layout.name} {dtype} {flags}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        ranks = range(layout.ranks)
        summaries = [folder / f"rank{rank}" / "summary.json" for rank in ranks]
        return Run(
            [json.loads((folder / f"measured.{rank}.json").read_text()) for rank in ranks],
            [json.loads(path.read_text()) for path in summaries if path.exists()],
            done.stdout,
            folder,
        )

    def start(
        self, layout: Layout, dtype: str, *flags: str, caps: list[int] | None = None, **extra: str
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        """The process and its folder, however it ended."""
        folder = Path(tempfile.mkdtemp(prefix=f"{layout.name}-", dir=self._folder))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
        path = [str(REPOSITORY), str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
        environment = kept | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHON": python(),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "DATA": self._data,
            "ITERS": str(STEPS),
        }
        environment |= layout.environment(dtype) | extra
        if caps is not None:
            environment["CAPACITIES"] = " ".join(map(str, caps))
        command = ["bash", str(SCRIPT), *layout.flags, *flags, "--measure-file", f"{folder}/measured.{{rank}}.json"]
        if {SMART_SWAP, ADAPTIVE, "--swap-config"} & set(flags):
            command += ["--swap-report-dir", str(folder)]
        done = run_to_end(command, environment, folder)
        (folder / "output.txt").write_text(done.stdout + done.stderr)
        return done, folder

    def plain(self, layout: Layout, dtype: str) -> Run:
        key = layout.name, dtype
        if key not in self._plain:
            self._prepare(layout, dtype)
        return self._plain[key]

    def caps(self, layout: Layout, dtype: str) -> list[int]:
        """Halfway between each rank's floor and its peak."""
        peaks = self.plain(layout, dtype).peaks()
        return [(floor + peak) // 2 for floor, peak in zip(self._floors[layout.name, dtype], peaks, strict=True)]

    def swapped(self, layout: Layout, dtype: str, feature: str = SMART_SWAP) -> Run:
        key = layout.name, dtype, feature
        if key not in self._swapped:
            slow = {"MINDSPEED_SWAP_SIM_LINK_GBPS": SLOW_LINK_GBPS} if feature == ADAPTIVE else {}
            self._swapped[key] = self.train(layout, dtype, feature, caps=self.caps(layout, dtype), **slow)
        return self._swapped[key]

    def _prepare(self, layout: Layout, dtype: str) -> None:
        """The plain run and the one for the floor. At once where each has one rank: most of a run is its start."""
        floor_flags = (SMART_SWAP, "--exit-interval", str(FLOOR_STEPS))
        with ThreadPoolExecutor(2 if layout.ranks == 1 else 1) as pool:
            plain = pool.submit(self.train, layout, dtype)
            floor = pool.submit(self.train, layout, dtype, *floor_flags)
        self._plain[layout.name, dtype] = plain.result()
        self._floors[layout.name, dtype] = [summary["floor_bytes"] for summary in floor.result().summaries]


def run_to_end(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Raises TrainingFailed, with what every thread of every rank was doing, for a run that does not end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except BaseException as error:
            abort(process.pid)
            output, errors = process.communicate()
            (folder / "output.txt").write_text(output + errors)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TrainingFailed(f"not over after {TIMEOUT_SECONDS} s: {command}\n{errors}") from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def abort(script: int) -> None:
    """Its ranks write their stacks and end. (The script is the rank where there is one only.)"""
    ranks = Path(f"/proc/{script}/task/{script}/children").read_text().split()
    if ranks:
        os.kill(script, signal.SIGSTOP)  # or it would end the others when the first one does
    for rank in ranks or [script]:
        os.kill(int(rank), signal.SIGABRT)
    time.sleep(STACKS_SECONDS)
    os.killpg(script, signal.SIGKILL)


def faults(
    trainer: Trainer, layout: Layout, dtype: str, plain: Run, swapped: Run, least_held_saved: float = LEAST_HELD_SAVED
) -> list[str]:
    """What is not as it must be, rank by rank; empty: all is well."""
    found = []
    caps = trainer.caps(layout, dtype)
    for rank in range(layout.ranks):
        ours, theirs = swapped.measured[rank], plain.measured[rank]
        for what, digest in theirs["sha256"].items():
            if ours["sha256"][what] != digest:
                found.append(f"rank {rank}: other {what}")
        if ours["iterations"] != theirs["iterations"]:
            found.append(f"rank {rank}: {ours['iterations']} steps instead of {theirs['iterations']}")
        if ours["peak_bytes"] > caps[rank] or caps[rank] >= theirs["peak_bytes"]:
            found.append(f"rank {rank}: peak {ours['peak_bytes']}, cap {caps[rank]}, plain {theirs['peak_bytes']}")
        saved = held_saved(plain, swapped)[rank]
        if saved < least_held_saved:
            found.append(f"rank {rank}: held only {saved:.1%} lower")
        summary = swapped.summaries[rank]
        stable = summary["stable"]
        if summary["phase"] != "Stable" or stable["steps"] == 0:
            found.append(f"rank {rank}: phase {summary['phase']} with {stable['steps']} stable steps")
        elif stable["on_demand_loads"]:
            found.append(f"rank {rank}: {stable['on_demand_loads']} loads on demand in {stable['steps']} stable steps")
    return found


def held_saved(plain: Run, swapped: Run) -> list[float]:
    """By which share less is held at the end of a microbatch's forward, on each rank."""
    return [1 - ours / theirs for ours, theirs in zip(swapped.held(), plain.held(), strict=True)]


def prepare_text(prefix: Path) -> str:
    """A small byte-level data set. Returns what DATA takes. Each part of it that --split names needs documents."""
    sources = []
    for document in range(10):
        sources.append(prefix.with_suffix(f".{document}.txt"))
        lines = (f"{i}: the quick brown fox jumps over {i * i} lazy dogs; " for i in range(600))
        sources[-1].write_text(f"{document}. " + "".join(lines))
    script = REPOSITORY / "scripts" / "prepare_text.py"
    command = [sys.executable, str(script), *map(str, sources), "--output", str(prefix)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    return str(prefix)


def main(names: list[str]) -> int:
    folder = Path(os.environ.get("LAYOUTS_FOLDER", tempfile.gettempdir())) / "layouts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trainer = Trainer(folder, prepare_text(folder / "text"))
    bad = 0
    feature = ADAPTIVE if "--adaptive" in names else SMART_SWAP
    for name in [name for name in names if name != "--adaptive"] or LAYOUTS:
        name, _, dtype = name.partition(":")
        layout = LAYOUTS[name]
        dtype = dtype or layout.dtype
        start = time.monotonic()
        try:
            plain, swapped = trainer.plain(layout, dtype), trainer.swapped(layout, dtype, feature)
        except TrainingFailed as error:
            bad += 1
            print(f"{name:24} {dtype} FAILED {error}", flush=True)
            continue
        found = faults(trainer, layout, dtype, plain, swapped)
        bad += bool(found)
        figures = "; ".join(
            f"cap/peak {cap / peak:.0%} held -{saved:.0%} tries {len(summary['tries'])} "
            f"stable {summary['stable']['steps']}"
            for cap, peak, saved, summary in zip(
                trainer.caps(layout, dtype), plain.peaks(), held_saved(plain, swapped), swapped.summaries, strict=True
            )
        )
        done = [line.split(";")[-1].strip() for line in swapped.output.splitlines() if "-> Stable" in line]
        print(f"{name:24} {dtype} {done} {figures} | {time.monotonic() - start:.0f} s {found or 'ok'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
