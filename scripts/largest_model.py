"""The search of largest_model.sh: how many layers each variant trains, and how fast at its limit.

A trial is a training run in a process of its own. It counts as fitting if it ends well, its loss falls and the host
memory for swapped tensors stays within the budget. Every trial is written down when it is over, so a search that was
ended goes on. TFLOP/s are the model's: 6 per parameter and token in matrix products and 6 x hidden x sequence per token
and layer in causal attention, whatever is recomputed.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_swap.files import replace_file
from mindspeed_swap.patches.arguments import add_arguments
from mindspeed_swap.units import GIB, format_bytes

HERE = Path(__file__).resolve().parent
# Each runs if this release has its flags.
VARIANTS = {
    "plain": "",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "smart-swap": "--smart-swap",
    "adaptive memory": "--adaptive-memory-optimization",
    "virtual optimizer": "--virtual-optimizer all",
    "all together": "--adaptive-memory-optimization --virtual-optimizer all --virtual-optimizer-master",
}
PLANNING = ("--smart-swap", "--adaptive-memory-optimization")
COUNTED_STEPS = 20
GUESSED_TRIALS = 8  # per variant, for the time left while nothing better is known
OUT_OF_MEMORY = "out of memory"
SHAPE = ("HIDDEN", "FFN", "SEQ", "MBS", "GBS", "VOCAB")


@dataclass(frozen=True)
class Trial:
    """One run. Sizes in bytes. ``fits`` False: ``why`` says what was not as it should be."""

    variant: str
    layers: int
    steps: int
    fits: bool
    why: str
    wall_seconds: float
    step_seconds: float | None = None  # median of the counted steps
    peak_bytes: int | None = None
    host_bytes: int = 0
    losses: tuple[float, float] | None = None  # first and last


@dataclass
class Search:
    args: argparse.Namespace
    variants: dict[str, str]
    shape: dict[str, int]
    trials: list[Trial] = field(default_factory=list)

    # ---- what is known already
    @property
    def _file(self) -> Path:
        return self.args.out / "trials.json"

    @property
    def _settings(self) -> dict[str, Any]:
        return {"shape": self.shape, "host_gib": self.args.host_gib, "trainer": str(self.args.trainer)}

    def load(self) -> None:
        """Raises SystemExit if the folder holds a search with other settings."""
        if not self._file.exists():
            return
        known = json.loads(self._file.read_text())
        if known["settings"] != self._settings:
            sys.exit(f"{self._file} is of a search with other settings: {known['settings']}; choose another --out")
        self.trials = [Trial(**trial) for trial in known["trials"]]
        print(f"{len(self.trials)} trials are known from {self._file}")

    def _save(self) -> None:
        data = {"settings": self._settings, "trials": list(map(asdict, self.trials))}
        replace_file(self._file, json.dumps(data, indent=1))

    # ---- trials
    def trial(self, variant: str, layers: int, steps: int) -> Trial:
        for known in self.trials:
            if (known.variant, known.layers, known.steps) == (variant, layers, steps):
                return known
        done = self._run(variant, layers, steps)
        self.trials.append(done)
        self._save()
        result = "fits" if done.fits else done.why
        print(f"  {variant}: {layers} layers, {steps} steps: {result} ({done.wall_seconds:.0f} s)", flush=True)
        return done

    def _run(self, variant: str, layers: int, steps: int) -> Trial:
        folder = self.args.out / f"{variant.replace(' ', '-')}-{layers}-{steps}"
        folder.mkdir(parents=True, exist_ok=True)
        measure, summary = folder / "measure.json", folder / "rank0" / "summary.json"
        for old in (measure, summary):
            old.unlink(missing_ok=True)
        flags = shlex.split(self.variants[variant])
        command = ["bash", str(self.args.trainer), "--measure-file", str(measure), "--measure-no-hashes", *flags]
        if variant not in ("plain", "full recompute"):
            command += ["--swap-host-memory", str(self.args.host_gib), "--swap-report-dir", str(folder)]
        if any(flag in PLANNING for flag in flags):  # the counted run of a size goes on with what its first trial found
            command += ["--swap-plan-cache", str(self.args.out / "plans")]
        environment = dict(os.environ, LAYERS=str(layers), ITERS=str(steps))
        environment.update({name: str(value) for name, value in self.shape.items()})
        started = time.monotonic()

        def outcome(why: str, **figures: Any) -> Trial:
            return Trial(variant, layers, steps, not why, why, time.monotonic() - started, **figures)

        with (folder / "log.txt").open("w") as log:
            try:
                code = subprocess.run(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
                    timeout=60 * self.args.trial_minutes,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return outcome(f"not over after {self.args.trial_minutes} minutes")
        if code != 0:
            lines = (folder / "log.txt").read_text(errors="replace").split("\n")
            lines = [line.strip() for line in lines if line.strip()] or [""]
            telling = [[line for line in lines if sign in line.lower()] for sign in (OUT_OF_MEMORY, "error")] + [lines]
            told = next(each for each in telling if each)[-1]
            return outcome(told[:200] or f"exit code {code}")
        run = json.loads(measure.read_text())
        losses = [step["loss"] for step in run["steps"]]
        host = json.loads(summary.read_text())["host"]["peak_used_bytes"] if summary.exists() else 0
        why = ""
        if not losses[-1] < losses[0]:
            why = f"the loss does not fall: {losses[0]:.4f} to {losses[-1]:.4f}"
        elif host > self.args.host_gib * GIB:
            why = f"host memory {format_bytes(host)} is over the budget"
        seconds = statistics.median(step["seconds"] for step in run["steps"][-COUNTED_STEPS:])
        return outcome(
            why, step_seconds=seconds, peak_bytes=run["peak_bytes"], host_bytes=host, losses=(losses[0], losses[-1])
        )

    # ---- the search
    def fits(self, variant: str, layers: int) -> bool:
        """What is known of a larger model that fits, or of a smaller one that does not, holds here too."""
        for known in self.trials:
            if known.variant == variant and (known.layers >= layers if known.fits else known.layers <= layers):
                return known.fits
        return self.trial(variant, layers, self.args.probe_steps).fits

    def limit(self, variant: str) -> Trial | None:
        """The largest model of a variant, run for as many steps as count. None if not even the smallest fits."""
        if self.args.at is not None:
            done = self.trial(variant, self.args.at, self.args.probe_steps + COUNTED_STEPS)
            return done if done.fits else None
        fits, too_many = 0, self.args.most + 1
        layers = min(self.args.first, self.args.most)
        while too_many - fits > 1:
            self._progress(variant, fits, too_many)
            if self.fits(variant, layers):
                fits = layers
            else:
                too_many = layers
            layers = min(2 * fits, self.args.most) if too_many > self.args.most else (fits + too_many) // 2
        for layers in range(fits, 0, -1):  # a short trial may have been lucky
            done = self.trial(variant, layers, self.args.probe_steps + COUNTED_STEPS)
            if done.fits:
                return done
        return None

    def _progress(self, variant: str, fits: int, too_many: int) -> None:
        names = list(self.variants)
        known = too_many <= self.args.most
        here = math.ceil(math.log2(max(2, too_many - fits))) if known else GUESSED_TRIALS // 2
        trials = here + 1 + GUESSED_TRIALS * (len(names) - names.index(variant) - 1)
        left = "unknown"
        if self.trials:
            seconds = trials * statistics.mean(trial.wall_seconds for trial in self.trials)
            left = f"about {seconds / 60:.0f} min"
        between = f"between {fits} and {too_many}" if known else f"{fits} or more"
        number = names.index(variant) + 1
        print(f"{variant} ({number} of {len(names)}): {between} layers; time left: {left}", flush=True)


# ---- figures
def parameters(shape: dict[str, int], layers: int) -> int:
    hidden, ffn = shape["HIDDEN"], shape["FFN"]
    return layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + 2 * hidden * shape["VOCAB"] + hidden


def tflops(shape: dict[str, int], trial: Trial) -> float:
    """The model's, per second, at the trial's step time."""
    assert trial.step_seconds
    hidden, ffn, tokens = shape["HIDDEN"], shape["FFN"], shape["GBS"] * shape["SEQ"]
    per_layer = 6 * (4 * hidden**2 + 3 * hidden * ffn) + 6 * hidden * shape["SEQ"]
    return tokens * (trial.layers * per_layer + 6 * hidden * shape["VOCAB"]) / trial.step_seconds / 1e12


def results(shape: dict[str, int], limits: dict[str, Trial | None]) -> list[dict[str, Any]]:
    rows = []
    plain = limits.get("plain")
    for name, trial in limits.items():
        row: dict[str, Any] = {"variant": name, "flags": VARIANTS[name], "layers": trial.layers if trial else 0}
        if trial:
            row |= asdict(trial) | {"parameters": parameters(shape, trial.layers)}
            row["tflops"] = tflops(shape, trial)
            if plain:
                row["parameters_ratio"] = row["parameters"] / parameters(shape, plain.layers)
                row["tflops_ratio"] = row["tflops"] / tflops(shape, plain)
        rows.append(row)
    return rows


def figures(row: dict[str, Any]) -> tuple[str, ...]:
    """Parameters, x plain, step, TFLOP/s, x plain, peak, host and loss, as they are shown."""
    return (
        f"{row['parameters'] / 1e9:.3f} B", f"{row.get('parameters_ratio', math.nan):.2f}",
        f"{row['step_seconds']:.2f} s", f"{row['tflops']:.1f}", f"{row.get('tflops_ratio', math.nan):.2f}",
        format_bytes(row["peak_bytes"]), format_bytes(row["host_bytes"]),
        f"{row['losses'][0]:.3f} to {row['losses'][1]:.3f}",
    )  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [("variant", "layers", "parameters", "x plain", "step", "TFLOP/s", "x plain", "peak", "host", "loss")]
    for row in rows:
        shown = (str(row["layers"]), *figures(row)) if row["layers"] else ("none", *("-",) * 8)
        lines.append((row["variant"], *shown))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rendered = [" | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rendered[0], "-+-".join("-" * width for width in widths), *rendered[1:]])


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    rows = [row for row in rows if row["layers"]][::-1]
    figure = Figure(figsize=(9, 0.9 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names, values = [row["variant"] for row in rows], [row["parameters"] / 1e9 for row in rows]
    labels = [f"{row['layers']} layers, {row['tflops']:.0f} TFLOP/s" for row in rows]
    axes.bar_label(axes.barh(names, values, color="#2563eb", height=0.6), labels, padding=5, fontsize=9)
    axes.set_xlabel("parameters of the largest model that trains, 10⁹")
    axes.set_xmargin(0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)


def available() -> tuple[dict[str, str], list[str]]:
    """(variants that this release can run, names of those that it cannot)"""
    known = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    ours = ("--smart", "--adaptive", "--virtual", "--swap")
    missing = [
        name for name, flags in VARIANTS.items()
        if any(flag.startswith(ours) and flag not in known for flag in flags.split())
    ]  # fmt: skip
    return {name: flags for name, flags in VARIANTS.items() if name not in missing}, missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "largest_model", help="logs and results")
    parser.add_argument("--only", action="append", metavar="VARIANT", help=f"one of: {', '.join(VARIANTS)}; repeatable")
    parser.add_argument("--host-gib", type=float, default=112.0, help="host memory at most (default: %(default)s)")
    parser.add_argument("--first", type=int, default=4, help="layers to begin with (default: %(default)s)")
    parser.add_argument("--most", type=int, default=256, help="layers never exceeded (default: %(default)s)")
    parser.add_argument("--at", type=int, metavar="LAYERS", help="no search: one counted run of this many layers")
    parser.add_argument("--probe-steps", type=int, default=24, help="of a trial: enough for a search of plans to end")
    parser.add_argument("--trial-minutes", type=float, default=60.0, help="a trial that takes longer does not fit")
    parser.add_argument("--trainer", type=Path, default=HERE / "pretrain_gpt_gpu.sh", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    variants, missing = available()
    unknown = [name for name in args.only or () if name not in variants]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: this release has {', '.join(variants)}")
    if missing and not args.only:
        print(f"skipped, as this release lacks their flags: {', '.join(missing)}")
    variants = {name: flags for name, flags in variants.items() if not args.only or name in args.only}
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    search = Search(args, variants, {name: int(os.environ[name]) for name in SHAPE})
    search.load()
    rows = results(search.shape, {name: search.limit(name) for name in variants})
    (args.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    picture(rows, args.out / "largest_model.png")
    print(f"\n{table(rows)}\n\nlogs and figures in {args.out}")
    return 0 if all(row["layers"] for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
