"""The main job: the same GPT three times. Uncapped; capped, which runs out of memory; capped with --smart-swap, which
trains and ends with the same bits. Prints a table and checks; exit code 0 only if every check holds.

Use scripts/quickstart.sh, which makes the environment first.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_swap.units import format_bytes

HERE = Path(__file__).resolve().parent
# The floor is known after the second step, the first that starts with optimizer state; the rest is for the search.
FLOOR_STEPS = 4
# WarmUp takes two steps, the search usually two or three; the rest is for measuring the Stable phase.
STEPS = 14
# A cap nearer to the uncapped peak would show little.
MOST_OF_PEAK = 0.75
LEAST_HELD_SAVED = 0.30
TIMED_STEPS = 5
OUT_OF_MEMORY = "out of memory"

_MEGATRON_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+).*?lm loss: ([\d.E+-]+)")


class Failed(Exception):
    """The job cannot go on. The message says why and where to look."""


@dataclass(slots=True)
class Run:
    """One training run. Sizes in bytes."""

    name: str
    cap: int | None
    code: int
    last_line: str
    log: Path
    measured: dict[str, Any] | None = None  # of --measure-file; None if the run did not end well
    summary: dict[str, Any] | None = None  # of --swap-report-dir

    @property
    def out_of_memory(self) -> bool:
        return self.code != 0 and self.last_line.startswith(OUT_OF_MEMORY)

    @property
    def last_step(self) -> dict[str, Any]:
        assert self.measured is not None
        return dict(self.measured["steps"][-1])

    @property
    def step_seconds(self) -> float:
        assert self.measured is not None
        return statistics.median(step["seconds"] for step in self.measured["steps"][-TIMED_STEPS:])


@dataclass(frozen=True, slots=True)
class Trainer:
    script: Path
    data: Path
    out: Path

    def run(self, name: str, steps: int, *, smart_swap: bool = False, cap: int | None = None) -> Run:
        """Trains in a process of its own. Its output goes to a log, and to the terminal a line per step and ours."""
        folder = self.out / name.replace(", --", "-").replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)  # figures of an earlier job must not be taken for this one's
        folder.mkdir(parents=True)
        measure, log = folder / "measure.json", folder / "log.txt"
        command = ["bash", str(self.script), "--measure-file", str(measure)]
        if smart_swap:
            command += ["--smart-swap", "--swap-report-dir", str(folder)]
        environment = dict(os.environ, MINDSPEED_SWAP_DEVICE="sim", PYTHONUNBUFFERED="1")
        environment.update(PYTHON=sys.executable, DATA=str(self.data), ITERS=str(steps))
        environment.pop("MINDSPEED_SWAP_DEVICE_CAPACITY", None)
        if cap is not None:
            environment["MINDSPEED_SWAP_DEVICE_CAPACITY"] = str(cap)
        print(f"\n{name}: {steps} steps, {'cap ' + format_bytes(cap) if cap else 'no cap'}; log {log}", flush=True)
        code, last_line = _follow(command, environment, log)
        run = Run(name, cap, code, last_line, log)
        if code == 0:
            run.measured = _read_json(measure)
            run.summary = _read_json(folder / "rank0" / "summary.json") if smart_swap else None
        return run


def _follow(command: Sequence[str], environment: dict[str, str], log: Path) -> tuple[int, str]:
    """Exit code and last line of a command, whose output is logged and, in extracts, shown."""
    last_line = ""
    with log.open("w") as file, subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                if line.strip():
                    last_line = line.strip()
                if step := _MEGATRON_STEP.search(line):
                    print(f"  step {step[1]}/{step[2]}  loss {float(step[3]):.4f}", flush=True)
                elif "[mindspeed_swap" in line:
                    print(" ", line.strip(), flush=True)
        except BaseException:  # Ctrl-C: the trainer must not outlive us
            process.terminate()
            raise
    return process.returncode, last_line


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise Failed(f"the run ended well but {path} cannot be read: {error}") from error


def _must_train(run: Run) -> Run:
    if run.code != 0:
        raise Failed(f"{run.name}: ended with exit code {run.code}: {run.last_line} (log: {run.log})")
    return run


def choose_cap(floor: int | None, peak: int) -> int:
    """Halfway between what no plan can go below and what the run takes if it may."""
    if not floor:
        raise Failed("the run with --smart-swap did not report a floor (floor_bytes in summary.json)")
    cap = (floor + peak) // 2
    if cap > MOST_OF_PEAK * peak:
        raise Failed(
            f"halfway between floor {format_bytes(floor)} and peak {format_bytes(peak)} is {cap / peak:.1%} of the "
            f"peak, above {MOST_OF_PEAK:.0%}: this model has too little to swap"
        )
    return cap


def table(runs: Sequence[Run]) -> str:
    rows = [("run", "cap", "peak", "held at end of forward", "step time", "loss", "result")]
    for run in runs:
        cap = format_bytes(run.cap) if run.cap else "none"
        if run.measured is None:
            rows.append((run.name, cap, *"----", OUT_OF_MEMORY if run.out_of_memory else f"exit code {run.code}"))
        else:
            step = run.last_step
            peak, held = format_bytes(run.measured["peak_bytes"]), format_bytes(step["held_bytes"])
            rows.append((run.name, cap, peak, held, f"{run.step_seconds:.2f} s", f"{step['loss']:.6f}", "trained"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-+-".join("-" * w for w in widths), *lines[1:]])


def checks(plain: Run, dead: Run, swapped: Run) -> list[tuple[bool, str]]:
    """(holds, what with figures) of everything the job promises."""
    assert plain.measured and swapped.measured and swapped.summary and swapped.cap
    result = [(dead.out_of_memory, f"the cap means out of memory without the flag: {dead.last_line}")]
    for what in ("parameters", "gradients", "optimizer"):
        ours, theirs = swapped.measured["sha256"][what], plain.measured["sha256"][what]
        figures = ours[:12] if ours == theirs else f"{ours[:12]}, without cap {theirs[:12]}"
        result.append((ours == theirs, f"sha256 of {what} equal to the uncapped run: {figures}"))
    held, before = swapped.last_step["held_bytes"], plain.last_step["held_bytes"]
    result.append((
        held <= (1 - LEAST_HELD_SAVED) * before,
        f"held at end of forward {1 - held / before:.0%} lower, at least {LEAST_HELD_SAVED:.0%}: "
        f"{format_bytes(held)} instead of {format_bytes(before)}",
    ))  # fmt: skip
    stable, phase = swapped.summary["stable"], swapped.summary["phase"]
    settled = phase == "Stable" and stable["steps"] > 0
    result.append((settled, f"ends in phase Stable: {phase}, {stable['steps']} steps"))
    result.append((stable["on_demand_loads"] == 0, f"on-demand loads in Stable: {stable['on_demand_loads']}"))
    peak, cap = swapped.measured["peak_bytes"], swapped.cap
    result.append((peak <= cap, f"measured peak {format_bytes(peak)} within the cap {format_bytes(cap)}"))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = HERE.parent / "runs" / "quickstart"
    parser.add_argument("--out", type=Path, default=default, help="for logs and figures (default: runs/quickstart)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="prefix of a text from prepare_text.py (default: Python's help)")
    parser.add_argument("--trainer", type=Path, default=HERE / "pretrain_gpt_sim.sh", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    started = time.monotonic()
    out = args.out.resolve()
    data = args.data.resolve() if args.data else out / "data" / "text"
    if not args.data:
        data.parent.mkdir(parents=True, exist_ok=True)
        log = out / "data" / "log.txt"
        command = [sys.executable, str(HERE / "prepare_text.py"), "--output", str(data)]
        code, last_line = _follow(command, dict(os.environ, PYTHONWARNINGS="ignore"), log)
        print(f"text: {last_line}", flush=True)
        if code != 0:
            raise Failed(f"preparing the text ended with exit code {code} (log: {log})")

    trainer = Trainer(args.trainer, data, out)
    probe = _must_train(trainer.run("floor", FLOOR_STEPS, smart_swap=True))
    plain = _must_train(trainer.run("uncapped", args.steps))
    assert probe.summary and plain.measured
    cap = choose_cap(probe.summary["floor_bytes"], plain.measured["peak_bytes"])
    dead = trainer.run("capped", args.steps, cap=cap)
    if dead.code == 0:
        raise Failed(f"{dead.name}: trained within {format_bytes(cap)} without the flag: the cap does not hold")
    print(f"  {dead.last_line}", flush=True)
    swapped = _must_train(trainer.run("capped, --smart-swap", args.steps, smart_swap=True, cap=cap))

    floor, share = format_bytes(probe.summary["floor_bytes"]), cap / plain.measured["peak_bytes"]
    print(f"\n{table([plain, dead, swapped])}\nfloor {floor}; cap {share:.0%} of the uncapped peak\n")
    outcome = checks(plain, dead, swapped)
    for holds, what in outcome:
        print(f"{'ok    ' if holds else 'FAILED'} {what}")
    print(f"\n{time.monotonic() - started:.0f} s; logs and figures in {out}")
    return 0 if all(holds for holds, _ in outcome) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"FAILED {error}")
    except KeyboardInterrupt:
        sys.exit(130)
