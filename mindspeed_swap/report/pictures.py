"""The report's pictures, by matplotlib. Each function makes one figure of a given width; imports no torch."""
from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.chrome import LANES, LAYERS, MICROBATCHES, PEAK, PLAIN, STALLS, TO_DEVICE, TO_HOST
from mindspeed_swap.report.reader import RankFiles
from mindspeed_swap.report.what_if import Frontier
from mindspeed_swap.units import GIB, MIB

try:
    import matplotlib
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    raise SettingError(
        "the pictures of the report need matplotlib: pip install 'mindspeed-swap[report]' (or matplotlib alone)"
    ) from None

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
PLAIN_COLOR, PLAN_COLOR, LIMIT_COLOR = "#9aa5b1", "#2563eb", "#c2410c"
WHERE = {"swapped": "#2563eb", "kept": "#94a3b8", "immovable": "#e2c799"}
PHASE_COLORS = {"forward": "#dbeafe", "backward": "#fef3c7", "optimizer": "#dcfce7"}
MICROBATCH_COLORS = {"forward": ("#93b8f4", "#6f9ff0"), "backward": ("#f0c35c", "#e0a92f")}  # even, odd
OPTIMIZER_COLOR, OUTSIDE_COLOR = "#86c79a", "#cbd2d9"
LANE_NAMES = dict(zip(LANES, ("microbatches", "layers", "stalls", "to host", "to device"), strict=True))
LANE_COLORS = {STALLS: "#dc2626", TO_HOST: "#7c3aed", TO_DEVICE: "#0891b2"}
SIZES = {"wide": 10.4, "narrow": 4.3}  # inches of 96 pixels: a page of 1280, and of 400 pixels
TIME = "ms since the start of the step"
FINEST = 1500  # what lies closer than this part of the step is drawn as one: large steps, small files
_STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "svg.fonttype": "none",
    "text.color": INK, "axes.labelcolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT,
    "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "grid.color": GRID, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip


def svg(draw: Callable[[str], Figure], name: str, size: str) -> str:
    """For inlining: no prologue, no metadata, no namespaces (HTML needs none)."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name + size}):  # ids must differ between pictures of a page
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(size).savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", buffer.getvalue())
    return text[text.index("<svg") :]


def png(draw: Callable[[str], Figure], path: str) -> None:
    with matplotlib.rc_context(_STYLE):
        draw("wide").savefig(path, dpi=150, facecolor="white")


def _figure(size: str, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(SIZES[size], height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Any, size: str, grid: str = "y", **labels: str) -> Figure:
    """``labels``: xlabel, ylabel."""
    axes.set(**labels)
    axes.grid(True, axis=grid)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=4 if size == "wide" else 2, fontsize=8.5)
    return figure


def _unit(largest: float) -> tuple[float, str]:
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


# ---- over the step
def memory(rank: RankFiles, size: str) -> Figure:
    figure, axes = _figure(size, 3.1 if size == "wide" else 2.7)
    (times, peak), (_, without) = _curve(rank, PEAK), _curve(rank, PLAIN)
    top = max([*peak, *without])
    unit, name = _unit(top)
    peak, without = [value / unit for value in peak], [value / unit for value in without]
    for start, length, event in _spans(rank, MICROBATCHES):
        axes.axvspan(start, start + length, color=PHASE_COLORS[event["cat"]], alpha=0.55, linewidth=0)
    # A point's peak is that of the interval which it closes: the step lies before it.
    axes.fill_between(times, peak, without, step="pre", color=PLAIN_COLOR, alpha=0.22, linewidth=0)
    axes.step(times, without, where="pre", color=PLAIN_COLOR, linewidth=1.2, label="nothing swapped (simulated)")
    axes.step(times, peak, where="pre", color=PLAN_COLOR, linewidth=1.6, label="as it ran")
    target = rank.summary["target_bytes"]
    if 0 < target < 1.5 * top:
        axes.axhline(target / unit, color=LIMIT_COLOR, linewidth=1, linestyle=(0, (4, 3)), label="target")
    axes.set_ylim(0, 1.06 * max(top, target if target < 1.5 * top else 0) / unit)
    axes.set_xlim(0, rank.step_ms)
    return _finish(figure, axes, size, xlabel=TIME, ylabel=f"{name} allocated")


def _curve(rank: RankFiles, name: str) -> tuple[list[float], list[float]]:
    """Times and values of a counter: of points that no eye can tell apart the highest value, so that none is lost."""
    least = max(rank.step_ms, 1e-6) / FINEST
    times: list[float] = []
    values: list[float] = []
    for event in rank.events("C"):
        if event["name"] != name:
            continue
        at, value = event["ts"] / 1e3, event["args"]["bytes"]
        if times and int(times[-1] / least) == int(at / least):
            times[-1], values[-1] = at, max(values[-1], value)
        else:
            times.append(at)
            values.append(value)
    return times, values


def _spans(rank: RankFiles, lane: int) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """(start, length in ms, event)."""
    for event in rank.events("X"):
        if event["tid"] == lane:
            yield event["ts"] / 1e3, event["dur"] / 1e3, event


def lanes(rank: RankFiles, size: str) -> Figure:
    figure, axes = _figure(size, 2.5 if size == "wide" else 2.3)
    shades = {"forward": colormaps["Blues"], "backward": colormaps["YlOrBr"]}
    most_layers = max([event["args"].get("layer", 0) for *_, event in _spans(rank, LAYERS)], default=0) or 1

    def color(lane: int, phase: str, args: dict[str, Any]) -> Any:
        if lane in LANE_COLORS:
            return LANE_COLORS[lane]
        if phase == "optimizer":
            return OPTIMIZER_COLOR
        if lane == MICROBATCHES:
            return MICROBATCH_COLORS[phase][args["microbatch"] % 2]
        return shades[phase](0.25 + 0.5 * args["layer"] / most_layers) if args["layer"] else OUTSIDE_COLOR

    least = max(rank.step_ms, 1e-6) / FINEST
    for row, lane in enumerate(reversed(LANES)):
        by_color: dict[Any, list[tuple[float, float]]] = {}
        for start, length, event in _spans(rank, lane):
            spans = by_color.setdefault(color(lane, event["cat"], event["args"]), [])
            # Neighbours that no eye can tell apart are drawn as one.
            if spans and 0 <= start - sum(spans[-1]) < least and (length < least or spans[-1][1] < least):
                start, length = spans[-1][0], start + length - spans.pop()[0]
            spans.append((start, length))
        for fill, spans in by_color.items():
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=[fill], linewidth=0)
    axes.set_yticks(range(len(LANES)), [LANE_NAMES[lane] for lane in reversed(LANES)], color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, rank.step_ms), ylim=(-0.6, len(LANES) - 0.4), xlabel=TIME)
    return figure


# ---- what went where
def layers(rank: RankFiles, size: str) -> Figure:
    assert rank.step
    rows = rank.step["layers"]
    several = len({row["chunk"] for row in rows}) > 1
    names = [(f"{row['chunk']}:" if several else "") + (str(row["layer"]) if row["layer"] else "other") for row in rows]
    figure, axes = _figure(size, 2.6 if size == "wide" else 2.4)
    _stack(axes.bar, range(len(rows)), rows, width=0.72)
    _name_bars(axes, names, size)
    unit, name = _unit(_largest(rows))
    axes.set_ylim(0, 1.08 * _largest(rows) / unit)
    return _finish(figure, axes, size, xlabel="layer", ylabel=f"{name} saved")


def tensors(rank: RankFiles, size: str) -> Figure:
    assert rank.step
    rows = rank.step["tensors"][:12][::-1]
    figure, axes = _figure(size, 0.8 + 0.26 * len(rows))
    chunks = {row["chunk"] for row in rank.step["tensors"]}
    _stack(axes.barh, range(len(rows)), rows, height=0.7)
    names = [
        (f"chunk {row['chunk']}, " if len(chunks) > 1 else "")
        + (f"tensor {row['tensor']}" if row["in_layers"] else f"outside, tensor {row['tensor']}")
        + f"  ({row['count']}×)"
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), names, color=INK)
    axes.tick_params(axis="y", length=0)
    return _finish(figure, axes, size, "x", xlabel=f"{_unit(_largest(rows))[1]} saved in the step")


def _largest(rows: Sequence[dict[str, Any]]) -> float:
    return max((sum(row[f"{where}_bytes"] for where in WHERE) for row in rows), default=0)


def _stack(bar: Callable[..., Any], places: Iterable[int], rows: Sequence[dict[str, Any]], **thickness: float) -> None:
    unit, _ = _unit(_largest(rows))
    offsets = [0.0] * len(rows)
    base = "left" if "height" in thickness else "bottom"
    for where, color in WHERE.items():
        values = [row[f"{where}_bytes"] / unit for row in rows]
        if any(values):
            bar(places, values, color=color, label=where, **{base: offsets}, **thickness)
        offsets = [offset + value for offset, value in zip(offsets, values, strict=True)]


# ---- all ranks
def ranks(files: Sequence[RankFiles], size: str) -> Figure:
    """Peak of each rank, with and without the plan."""
    shown = [rank for rank in files if rank.step]
    figure, axes = _figure(size, 2.4)
    both = [(peak_of(rank, "without_plan"), peak_of(rank, "measured")) for rank in shown]
    unit, name = _unit(max((max(pair) for pair in both), default=0))
    places = range(len(shown))
    axes.bar([p - 0.19 for p in places], [a / unit for a, _ in both], 0.36, color=PLAIN_COLOR, label="nothing swapped")
    axes.bar([p + 0.19 for p in places], [b / unit for _, b in both], 0.36, color=PLAN_COLOR, label="as it ran")
    _name_bars(axes, [str(rank.rank) for rank in shown], size)
    return _finish(figure, axes, size, xlabel="rank", ylabel=f"peak, {name}")


def _name_bars(axes: Any, names: Sequence[str], size: str) -> None:
    every = -(-len(names) // (32 if size == "wide" else 10))  # as many names as there is room for
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.set_xlim(-0.6, max(len(names), 8 if size == "wide" else 4) - 0.4)  # a few bars stay bars


def peak_of(rank: RankFiles, which: str) -> int:
    assert rank.step
    return max((phase["peak_allocated_bytes"][which] for phase in rank.step["phases"].values()), default=0)


# ---- what-if
def frontier(found: Frontier, size: str) -> Figure:
    """Step time against memory, one line per set of verbs, with their floors."""
    figure, axes = _figure(size, 3.2)
    unit, name = _unit(found.peak_bytes)
    for (curve, bound), color in zip(found.floors.items(), (PLAN_COLOR, LIMIT_COLOR), strict=True):
        points = [(budget / unit, of[curve].step_ms) for budget, of in found.answers.items() if of[curve].step_ms]
        axes.plot(*zip(*points, strict=True) if points else ([], []), color=color, marker="o", ms=3, label=curve)
        axes.axvline(bound.bytes / unit, color=color, linewidth=0.8, linestyle=":")
    axes.plot([found.peak_bytes / unit], [found.plain_ms], color=INK, marker="o", label="nothing moved")
    return _finish(figure, axes, size, xlabel=f"peak, {name} (dotted: floors)", ylabel="step, ms (predicted)")
