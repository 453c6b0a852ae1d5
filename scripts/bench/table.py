"""Makes docs/benchmarks.md and its pictures from result files. No number in them is typed by hand.

    python scripts/bench/table.py --results docs/results --out docs/benchmarks.md [--device gpu]
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from lower_bound import lower_bound_ms  # noqa: E402
from points import PLAIN  # noqa: E402
from promises import Row, rows  # noqa: E402
from results import Record, Results, gain_over_full, read, settled  # noqa: E402
from workloads import COUNTED_STEPS, GPU, NAMES, SIM, workload  # noqa: E402

from mindspeed_swap.units import format_bytes  # noqa: E402

NOT_RUN = "not run"
_HEAD = f"""# Benchmarks

Made by `scripts/bench/table.py` from the result files that `scripts/bench/run.py` wrote. Every figure is measured.

Each point is a training run in a process of its own; at least its last {COUNTED_STEPS} steps count, none of which
belongs to a search. Step: median, with the quartiles; where there are {COUNTED_STEPS} in which the host was as fast as
it can be (a loop before and after each step tells: on a virtual machine others use the same cores), of these. Times are
compared within one machine only: ratios are to the plain run of the same one. Peak: most bytes that the allocator had
handed out up to the optimizer's step (in it: the next column), reserved: what it had taken from the device. Held: at
the end of a microbatch's forward, without what is there between steps. Of several ranks, the one that needs most. Host:
most memory that the processes had resident, with what of pinned memory the system counts; pinned: most that our pool
used on one rank, or that torch's host allocator handed out. All use the same optimizer kernel (Transformer Engine's,
else torch's fused one).
"""


def document(results: Results, device: str, pictures: Iterable[str]) -> str:
    parts = [_HEAD]
    if device == SIM:
        parts.append("**Of the simulated device: times mean nothing here.**\n")
    parts += [_machines(results), "## Promises\n", _promises(rows(results, device))]
    drawn = set(pictures)
    for name in NAMES:
        try:
            chosen = workload(name, device)
        except KeyError:
            continue
        parts.append(f"## {name}: {chosen.what}\n")
        if not results.names(name):
            parts.append(f"{NOT_RUN.capitalize()}.\n")
            continue
        if name in drawn:
            parts.append(f"![{name}: memory and step time](images/bench-{device}-{name}.png)\n")
        parts += [_points(results, name), _budgets(results, name, chosen.fractions), _commands(results, name)]
    return "\n".join(filter(None, parts))


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _machines(results: Results) -> str:
    rows = []
    for number, machine in enumerate(results.machines.values(), 1):
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        card = f"{machine.get('cards', 1)} x {machine['card']}"
        rows.append((str(number), card, machine.get("driver", "-"), machine.get("link", "-"), versions))
    return grid(("machine", "card", "driver", "link", "versions"), rows) if rows else "No result files.\n"


def _promises(found: Sequence[Row]) -> str:
    return grid(
        ("promise", "limit", "figure", "state", "remark"),
        [(row.promise, row.limit, row.figure, f"**{row.state}**", row.why) for row in found],
    )


def _points(results: Results, name: str) -> str:
    numbers = {machine: str(number) for number, machine in enumerate(results.machines, 1)}
    rows, failed = [], []
    for point in results.names(name):
        run = results.latest(name, point)
        assert run is not None
        if not run["ok"]:
            failed.append(f"- `{point}`: {run['why']}")
            continue
        ratio, gain = results.ratio(name, point), gain_over_full(results, name, point)
        low, high = run["spread_ms"]
        peaks = run["peak_bytes"]
        rows.append((
            f"`{point}`" + ("" if settled(run) else " (search not over)"), run["group"],
            f"{run['step_ms']:.1f} ({low:.1f} to {high:.1f})",
            _times(ratio), _times(gain),
            format_bytes(peaks["forward_backward"]), format_bytes(peaks["optimizer"]),
            format_bytes(run["peak_reserved_bytes"]), format_bytes(run["held_bytes"]),
            format_bytes(sum(host["resident_bytes"] for host in run["host"])), _pinned(run),
            str(len(results.runs(name, point))), numbers.get(run["machine"], "-"),
        ))  # fmt: skip
    head = ("point", "of", "step ms", "time / plain", "throughput / full", "peak", "optimizer's", "reserved", "held",
            "host", "pinned", "runs", "machine")  # fmt: skip
    text = grid(head, rows)
    return text + ("\nDid not train:\n\n" + "\n".join(failed) + "\n" if failed else "")


def _budgets(results: Results, name: str, fractions: Sequence[float]) -> str:
    """Ours, the bound and the best of the others, at each fraction of the plain peak."""
    inputs, plain = results.bound_inputs(name), results.peak(name, PLAIN)
    if not fractions or plain is None:
        return ""
    rows = []
    for fraction in fractions:
        budget = int(fraction * plain)
        bound = f"{lower_bound_ms(inputs, budget) / inputs.step_ms:.3f}" if inputs else NOT_RUN
        best = results.best_competitor(name, budget)
        ours = [_at_budget(results, name, f"{feature}@{fraction:.2f}") for feature in ("swap", "adaptive")]
        others = f"{best[1]:.3f} `{best[0]}`" if best else "none"
        rows.append((f"{fraction:.2f}", format_bytes(budget), *ours, bound, others))
    head = ("of plain's peak", "budget", "SmartSwap", "adaptive", "lower bound", "best of the others")
    return "\nStep time, as a ratio to plain's, by budget:\n\n" + grid(head, rows)


def _at_budget(results: Results, name: str, point: str) -> str:
    record: Record | None = results.latest(name, point)
    if record is None:
        return NOT_RUN
    return _times(results.ratio(name, point)) if record["ok"] else "does not train"


def _commands(results: Results, name: str) -> str:
    lines = [f"{point}: {record['command']}" for point, record in results.known(name).items()]
    return "\n<details><summary>Commands</summary>\n\n```\n" + "\n".join(lines) + "\n```\n</details>\n"


def _pinned(run: Record) -> str:
    """What our pool used at most, or what torch's host allocator pinned."""
    known = [host["torch_pinned_bytes"] for host in run["host"] if host["torch_pinned_bytes"] is not None]
    ours = (run.get("swap") or {}).get("host_bytes", 0)
    return format_bytes(max(sum(known), ours)) if known or ours else "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def draw(results: Results, name: str, path: Path) -> bool:
    """Memory against time: ours as a line, the bound as a line, the others as marks. False if there is too little."""
    from matplotlib.figure import Figure

    inputs, groups = results.bound_inputs(name), {}
    for point in results.names(name):
        ratio, peak, run = results.ratio(name, point), results.peak(name, point), results.latest(name, point)
        if ratio and peak and run:
            group = run["group"] if run["group"] != "ours" else f"ours: {point.split('@')[0]}"
            groups.setdefault(group, []).append((peak / 2**30, ratio))
    if len(groups) < 2:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for group, marks in groups.items():
        memory, times = zip(*sorted(marks), strict=True)
        axes.plot(memory, times, "o-" if group.startswith("ours") else "s", label=group, markersize=5)
    if inputs is not None:
        least = min(peak for marks in groups.values() for peak, _ in marks)
        most = inputs.peak_bytes / 2**30
        memory = [least + (most - least) * i / 100 for i in range(101)]
        times = [lower_bound_ms(inputs, int(gib * 2**30)) / inputs.step_ms for gib in memory]
        axes.plot(memory, times, "--", color="gray", label="lower bound")
    axes.set_xlabel("forward/backward peak, allocated, GiB")
    axes.set_ylabel("step time / plain's")
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, action="append", required=True, help="folder of results; repeatable")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "benchmarks.md")
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    args = parser.parse_args(argv)
    results = read(args.results, args.device)
    folder = args.out.parent / "images"
    drawn = [name for name in NAMES if draw(results, name, folder / f"bench-{args.device}-{name}.png")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(document(results, args.device, drawn))
    print(f"{args.out} and {len(drawn)} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
