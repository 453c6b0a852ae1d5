"""Whether the values of a setting fit: from the step that ran its plan. Pure; imports no torch."""
from __future__ import annotations

from dataclasses import dataclass

from mindspeed_swap.core.simulate import position_index
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.fine_grained.planning import Placed, Planning

# What is there sooner than this is no advice: steps differ by about as much.
EARLY_MS = 1.0
LATE_MS = 0.05
MOST_TRIED = 200  # operators


@dataclass(slots=True)
class _Part:
    value: int
    slack_ms: float  # least between being back and being wanted
    least: int | None  # smallest value with which all of it would be there in time


def advice(planning: Planning, executed: StepTrace) -> list[str]:
    """One line per part of a layer whose value is too small, or larger than it need be."""
    at, times = position_index(executed), executed.measured_ms()
    copies = {copy.key: copy for copy in executed.copies if not copy.to_host}
    found: dict[tuple[int, str], _Part] = {}
    for placed in planning.placed:
        copy = copies.get(placed.record.key)
        positions = [planning.trace.points[i].position for i in (placed.read, placed.prefetch)]
        if copy is None or not all(position in at for position in positions):
            continue
        read, prefetch = (times[at[position]] for position in positions)
        needed = _smallest(planning, placed, copy.end_ms - prefetch)
        part = found.setdefault(
            (placed.record.key.layer - 1, placed.part), _Part(placed.entry.value, float("inf"), 0)
        )
        part.slack_ms = min(part.slack_ms, read - copy.end_ms)
        part.least = None if None in (part.least, needed) else max(part.least or 0, needed or 0)
    lines = []
    for (layer, name), part in sorted(found.items()):
        if part.slack_ms < -LATE_MS:
            would = "no value would do" if part.least is None else f"{max(part.least, part.value + 1)} would do"
            lines.append(f"layer {layer}: {name} came {-part.slack_ms:.1f} ms late, {would}")
        elif part.slack_ms > EARLY_MS and part.least is not None and part.least < part.value:
            lines.append(f"layer {layer}: {name} came {part.slack_ms:.1f} ms early, {part.least} would do")
    return lines


def _smallest(planning: Planning, placed: Placed, needed_ms: float) -> int | None:
    """Operators between prefetch and read that take so long."""
    points = planning.trace.points
    for value in range(MOST_TRIED):
        window = planning.window(placed.record, placed.read, placed.entry, value)
        if window is None:
            return None
        if points[placed.read].time_ms - points[window[1]].time_ms >= needed_ms:
            return value
    return None
