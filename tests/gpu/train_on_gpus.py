"""Real Megatron on GPUs, plain and capped with our features: the same bits, less memory, and nothing that leaks.

    python tests/gpu/train_on_gpus.py [--out DIR] [--jobs 3] [--minutes 9] [LAYOUT ...]     (--list names them)

Each layout trains plain first. Every other run of it is compared with that one: sha256 of parameters, gradients and
optimizer state. A cap is a share of the plain run's peak, of each rank its own. Runs of one GPU go side by side: they
say nothing about time. One line for each run; the exit code is 1 if one of them is not as it must be.
--device sim trains tiny models on the simulated device, to try this program.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "scripts"
GPU, SIM = "gpu", "sim"
SCRIPT = {GPU: SCRIPTS / "pretrain_gpt_gpu.sh", SIM: SCRIPTS / "pretrain_gpt_sim.sh"}
# Small, and yet activations are most of the memory.
SHAPE = {
    GPU: {"LAYERS": "8", "HIDDEN": "1024", "FFN": "2816", "HEADS": "16", "SEQ": "16384", "VOCAB": "8192"},
    SIM: {"LAYERS": "8", "HIDDEN": "64", "FFN": "128", "SEQ": "128", "MBS": "8", "GBS": "8", "DATA": "mock"},
}
STEPS, MANY_STEPS = 10, 100
SWAP, ADAPTIVE = "--smart-swap", "--adaptive-memory-optimization"
FLAT_FROM = 3  # steps: what a process has by then it may have at the end
MIB = 2**20
RESIDENT_NOISE_BYTES = 32 * MIB  # Python's own heap; a pool that leaks takes more in a hundred steps
SHOWN_STEPS = (1, 2, 3, 4, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Row:
    """A run beside the plain one. ``share``: of the plain peak, which it may have; None: no cap."""

    name: str
    flags: tuple[str, ...] = ()
    share: float | None = None
    expect: str = "equal"  # or "oom", or "flat": equal, and nothing rises
    after: str = ""  # the run that must be over before


AGAIN = Row("plain again")
SWAP_80, ADAPTIVE_70 = Row("swap at 0.8", (SWAP,), 0.8), Row("adaptive at 0.7", (ADAPTIVE,), 0.7)


@dataclass(frozen=True)
class Layout:
    """``settings`` and ``flags`` are added to the script's. ``alone``: takes much of the device's memory."""

    name: str
    rows: tuple[Row, ...]
    settings: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = STEPS
    alone: bool = False


_WIDE = {"LAYERS": "4", "HIDDEN": "4096", "FFN": "11008", "HEADS": "32", "SEQ": "32768", "VOCAB": "32000"}
_TE = {"IMPL": "transformer_engine", "SDPA": "1"}
_PLAN = "{folder}/plan.json"

LAYOUTS = (
    Layout("one", (AGAIN, SWAP_80, ADAPTIVE_70)),
    Layout(
        "long",
        (
            Row("swap, search", (SWAP, "--swap-plan-save", _PLAN), 0.8, "flat"),
            Row("swap, loaded plan", (SWAP, "--swap-plan", _PLAN), 0.8, "flat", after="swap, search"),
            Row("adaptive, search", (ADAPTIVE,), 0.7, "flat"),
        ),
        steps=MANY_STEPS,
    ),
    Layout("wide", (Row("plain at 0.8", (), 0.8, "oom"), SWAP_80), _WIDE, alone=True),
    Layout("te", (AGAIN, Row("swap at 0.9", (SWAP,), 0.9)), _WIDE | _TE | {"LAYERS": "8", "SEQ": "8192"},
           alone=True),
    Layout("tp", (AGAIN, SWAP_80, ADAPTIVE_70), {"TP": "2"}, ranks=2),
    # Without apex and Transformer Engine Megatron has no norm for sequence parallel.
    Layout("tp_sp", (SWAP_80,), {"TP": "2"} | _TE, ("--sequence-parallel",), ranks=2),
    Layout(
        "vpp", (AGAIN, SWAP_80, ADAPTIVE_70), {"SEQ": "8192", "PP": "2", "GBS": "8"},
        ("--num-layers-per-virtual-pipeline-stage", "2"), ranks=2,
    ),
    Layout("dp_overlap_grad", (SWAP_80,), {"GBS": "2"}, ("--overlap-grad-reduce",), ranks=2),
    Layout("dp_overlap_both", (SWAP_80,), {"GBS": "2"}, ("--overlap-grad-reduce", "--overlap-param-gather"), ranks=2),
)  # fmt: skip


@dataclass
class Run:
    """Of every rank what --measure-file wrote and, with a feature, its summary.json."""

    code: int | None  # None: ended, as time was up
    seconds: float
    ranks: list[dict[str, Any]]
    summaries: list[dict[str, Any]]
    last_lines: list[str]

    def peaks(self) -> list[int]:
        """Of the first half of the step, which is what activations are in."""
        return [max(s["phases"]["forward_backward"]["allocated_bytes"] for s in r["steps"][2:]) for r in self.ranks]

    def held(self) -> list[int]:
        return [rank["steps"][-1]["held_bytes"] for rank in self.ranks]

    def seconds_per_step(self) -> float:
        return max(statistics.median(step["seconds"] for step in rank["steps"][-5:]) for rank in self.ranks)


class Trainer:
    def __init__(self, folder: Path, device: str, ends: float) -> None:
        self._folder, self._device, self._ends = folder, device, ends

    def train(self, layout: Layout, name: str, flags: Sequence[str], caps: list[int] | None, steps: int) -> Run:
        folder = self._folder / layout.name / name.replace(" ", "_").replace(",", "")
        folder.mkdir(parents=True)
        kept = {n: value for n, value in os.environ.items() if not n.startswith("MINDSPEED_SWAP_")}
        settings = {"ITERS": str(steps), "NPROC": str(layout.ranks), "DETERMINISTIC": "1", "PYTHON": sys.executable}
        settings |= SHAPE[self._device] | (layout.settings if self._device == GPU else _for_sim(layout.settings))
        settings["PROGRAM"] = str(HERE / "capped_program.py")
        if caps is not None:
            settings["CAPACITIES"] = " ".join(map(str, caps))
        flags = [flag.format(folder=folder.parent) for flag in flags]
        command = ["bash", str(SCRIPT[self._device]), *layout.flags, *flags]
        command += ["--measure-file", f"{folder}/measured.{{rank}}.json"]
        if {SWAP, ADAPTIVE} & set(flags):
            command += ["--swap-report-dir", str(folder)]
        started = time.monotonic()
        code = _run(command, kept | settings, folder / "log.txt", self._ends - started)
        lines = (folder / "log.txt").read_text(errors="replace").rstrip().split("\n")
        ranks = range(layout.ranks)
        measured = _read(folder / f"measured.{rank}.json" for rank in ranks)
        summaries = _read(folder / f"rank{rank}" / "summary.json" for rank in ranks)
        for trace in folder.glob("rank*/*trace.json"):
            trace.unlink()  # large, and not looked at here
        return Run(code, time.monotonic() - started, measured, summaries, lines[-12:])


def _read(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _for_sim(settings: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in settings.items() if name in ("TP", "PP")}
    return kept | ({"GBS": str(8 * int(settings["GBS"]))} if "GBS" in settings else {})


def _run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """Exit code; None if it had to be ended."""
    if seconds <= 0:
        log.write_text("not begun: time is up\n")
        return None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # its ranks are in its session
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# ---- what is wrong with a run
def faults(row: Row, plain: Run, run: Run, caps: list[int] | None) -> list[str]:
    if row.expect == "oom":
        oom = any("out of memory" in line.lower() for line in run.last_lines)
        return [] if run.code and oom else [f"expected out of memory, exit code {run.code}", *run.last_lines]
    if run.code != 0:
        why = "time was up" if run.code is None else f"exit code {run.code}"
        return [why, *run.last_lines]
    found = []
    for rank, (ours, theirs) in enumerate(zip(run.ranks, plain.ranks, strict=True)):
        found += [f"rank {rank}: other {what}" for what, digest in theirs["sha256"].items()
                  if ours["sha256"][what] != digest]  # fmt: skip
        losses = [[step["loss"] for step in r["steps"]] for r in (ours, theirs)]
        if losses[0] != losses[1]:
            found.append(f"rank {rank}: other losses")
        if caps is not None and ours["peak_bytes"] > caps[rank]:
            found.append(f"rank {rank}: peak {ours['peak_bytes']} above its cap {caps[rank]}")
    for rank, summary in enumerate(run.summaries):
        stable = summary["stable"]
        if summary["phase"] != "Stable":
            found.append(f"rank {rank}: still {summary['phase']}")
        elif stable["on_demand_loads"]:
            found.append(f"rank {rank}: {stable['on_demand_loads']} loads on demand in {stable['steps']} stable steps")
    if row.expect == "flat":
        found += rises(run)
    return found


def flat_from(run: Run) -> int:
    """A search tries plans that take different memory; a loaded plan has none."""
    searched = [summary["steps"] - summary["stable"]["steps"] for summary in run.summaries if summary["tries"]]
    return max([FLAT_FROM, *searched])


def rises(run: Run) -> list[str]:
    first, found = flat_from(run), []
    for rank, measured in enumerate(run.ranks):
        after = measured["steps"]
        for name, noise in (("reserved_bytes", 0), ("pinned_bytes", 0), ("resident_bytes", RESIDENT_NOISE_BYTES)):
            rise = max(a[name] for a in after[first:]) - after[first][name]
            if rise > noise:
                found.append(f"rank {rank}: {name} rise by {rise / MIB:.1f} MiB after step {first + 1}")
    return found


# ---- lines
def tell(layout: Layout, row: Row, plain: Run, run: Run, wrong: list[str]) -> str:
    name = f"{layout.name + ': ' + row.name:<30}"
    if row.expect == "oom" and not wrong:
        return f"{name} OUT OF MEMORY, as it must  ({run.seconds:.0f} s)"
    if run.code != 0:
        return f"{name} FAILED {' | '.join(wrong)}"
    equal = all(a["sha256"] == b["sha256"] for a, b in zip(run.ranks, plain.ranks, strict=True))
    same = "EQUAL " if equal else "DIFFER"
    stable = [summary["stable"] for summary in run.summaries]
    text = f"{name} {same} peak {_change(plain.peaks(), run.peaks())} held {_change(plain.held(), run.held())} MiB"
    if stable:
        loads = sum(each["on_demand_loads"] for each in stable)
        text += f"  {min(each['steps'] for each in stable)} stable steps, {loads} loads on demand"
    text += f"  {run.seconds_per_step():.3f} s/step (plain {plain.seconds_per_step():.3f}), run {run.seconds:.0f} s"
    if row.expect == "flat":
        text += f"; flat from step {flat_from(run) + 1}" + "".join(f"\n      {line}" for line in _figures(run))
    return text + "".join(f"\n      WRONG {what}" for what in wrong)


def _change(before: list[int], after: list[int]) -> str:
    return ", ".join(f"{a // MIB} -> {b // MIB}" for a, b in zip(before, after, strict=True))


def _figures(run: Run) -> list[str]:
    lines = []
    for rank, measured in enumerate(run.ranks):
        steps = measured["steps"]
        shown = [number for number in SHOWN_STEPS if number <= len(steps)]
        lines.append(f"rank {rank}, MiB after step " + " ".join(f"{number:>7}" for number in shown))
        for name in ("reserved_bytes", "pinned_bytes", "resident_bytes"):
            values = " ".join(f"{steps[number - 1][name] / MIB:7.0f}" for number in shown)
            lines.append(f"{name:>22} {values}")
    return lines


class Table:
    """Trains the layouts, ``jobs`` runs at a time, and prints a line for each run when it is over."""

    def __init__(self, trainer: Trainer, jobs: int) -> None:
        self._trainer = trainer
        self._alone = threading.Lock()
        self._print = threading.Lock()
        self._runs = ThreadPoolExecutor(jobs)
        self.bad = 0

    def train(self, layouts: Sequence[Layout]) -> None:
        with ThreadPoolExecutor(max(1, len(layouts))) as pool:  # each only waits for its runs
            for future in [pool.submit(self._layout, layout) for layout in layouts]:
                future.result()

    def _layout(self, layout: Layout) -> None:
        plain = self._submit(layout, "plain", (), None).result()
        if plain.code != 0:
            self._say(f"{layout.name}: plain run FAILED {' | '.join(plain.last_lines)}", bad=True)
            return
        peaks = ", ".join(str(peak // MIB) for peak in plain.peaks())
        self._say(f"{layout.name + ': plain':<30} peak {peaks} MiB, run {plain.seconds:.0f} s")
        begun: dict[str, Any] = {}
        for row in layout.rows:
            if row.after:
                begun[row.after].result()
            share = row.share
            caps = None if share is None else [int(share * peak) for peak in plain.peaks()]
            begun[row.name] = self._submit(layout, row.name, row.flags, caps, self._finished(layout, row, plain, caps))
        for future in begun.values():
            future.result()

    def _submit(
        self, layout: Layout, name: str, flags: Sequence[str], caps: list[int] | None,
        finished: Callable[[Run], None] = lambda run: None,
    ) -> Any:
        def train() -> Run:
            with self._alone if layout.alone else nullcontext():
                run = self._trainer.train(layout, name, flags, caps, layout.steps)
            finished(run)
            return run

        return self._runs.submit(train)

    def _finished(self, layout: Layout, row: Row, plain: Run, caps: list[int] | None) -> Callable[[Run], None]:
        def finished(run: Run) -> None:
            wrong = faults(row, plain, run, caps)
            self._say(tell(layout, row, plain, run, wrong), bad=bool(wrong))

        return finished

    def _say(self, text: str, *, bad: bool = False) -> None:
        with self._print:
            self.bad += bad
            print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help="default: all that the GPUs here are enough for")
    parser.add_argument("--out", type=Path, help="keeps each run's log, figures and summaries there")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 3 of one GPU, 1 of several)")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    by_name = {layout.name: layout for layout in LAYOUTS}
    if unknown := [name for name in args.layouts if name not in by_name]:
        parser.error(f"no layout {', '.join(unknown)}; there are {', '.join(by_name)}")
    layouts = [by_name[name] for name in args.layouts]
    if not layouts:
        import torch

        gpus = torch.cuda.device_count() if args.device == GPU else 2
        has_te = importlib.util.find_spec("transformer_engine") is not None
        layouts = [each for each in LAYOUTS if each.ranks <= gpus and (has_te or "IMPL" not in each.settings)]
    if args.list:
        print("\n".join(f"{each.name} ({each.ranks} GPU): {[row.name for row in each.rows]}" for each in layouts))
        return 0
    jobs = args.jobs or (1 if any(layout.ranks > 1 for layout in layouts) else 3)
    folder = Path(tempfile.mkdtemp(prefix="train-", dir=args.out))
    table = Table(Trainer(folder, args.device, time.monotonic() + 60 * args.minutes), jobs)
    table.train(layouts)
    print(f"{table.bad} of these runs are not as they must be" if table.bad else "all as it must be", flush=True)
    return 1 if table.bad else 0


if __name__ == "__main__":
    sys.exit(main())
