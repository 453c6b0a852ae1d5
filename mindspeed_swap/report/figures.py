"""The figures of one recorded step, for ``summary.json``. Pure; imports no torch. Bytes and milliseconds."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from mindspeed_swap.core.simulate import memory_curve, phase_peaks, plain_step_ms
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.core.trace import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, Key, SavedRecord, StepTrace
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.units import format_bytes

PHASES = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
MOST_TENSORS = 20


def figures(step: ExecutedStep) -> dict[str, Any]:
    """The part ``step`` of ``summary.json``; its fields are explained in ``summary``."""
    trace, plan = step.trace, step.plan
    prediction = plan.prediction
    phases = _phases(step)
    stall_ms = sum(wait.end_ms - wait.start_ms for wait in trace.copy_waits)
    return {
        "step_ms": {
            "measured": trace.step_ms,
            "predicted": prediction.step_ms if prediction else None,
            "without_plan": plain_step_ms(trace),
        },
        "stall_ms": {"measured": stall_ms, "predicted": prediction.stall_ms if prediction else None},
        "recompute_ms": {
            "measured": trace.stall_ms - stall_ms, "predicted": prediction.recompute_ms if prediction else None,
        },
        "phases": phases,
        "static_bytes": trace.static_bytes,
        "held_bytes": trace.held_bytes,
        "bytes_out": sum(copy.nbytes for copy in trace.copies if copy.to_host),
        "bytes_in": sum(copy.nbytes for copy in trace.copies if not copy.to_host),
        "copy_ms": {
            "out": sum(copy.end_ms - copy.start_ms for copy in trace.copies if copy.to_host),
            "in": sum(copy.end_ms - copy.start_ms for copy in trace.copies if not copy.to_host),
        },
        "hidden_share": hidden_share(trace),
        "counters": asdict(step.stats),
        "layers": _layers(step),
        "tensors": _tensors(step),
        "notes": _notes(step, phases),
    }


def _phases(step: ExecutedStep) -> dict[str, Any]:
    """By phase, in the order in which they begin."""
    trace, prediction = step.trace, step.plan.prediction
    measured = phase_peaks(trace, [point.peak_bytes for point in trace.points])
    reserved = phase_peaks(trace, [point.reserved_bytes for point in trace.points])
    plain = phase_peaks(trace, memory_curve(trace, ()))
    predicted = prediction.peak_bytes if prediction else {}
    return {
        PHASES[phase]: {
            "peak_allocated_bytes": {
                "measured": peak, "predicted": predicted.get(phase), "without_plan": plain[phase],
            },
            # Not predicted: what the allocator keeps besides is its own affair. Never below allocated: between two
            # points it may have reserved and given back.
            "peak_reserved_bytes": {"measured": max(reserved[phase], peak), "predicted": None},
        }
        for phase, peak in measured.items()
    }


def _notes(step: ExecutedStep, phases: dict[str, Any]) -> list[str]:
    """What a reader must not miss, in sentences."""
    plan, stats = step.plan, step.stats
    notes = []
    plain = {name: phase["peak_allocated_bytes"]["without_plan"] for name, phase in phases.items()}
    peaks = {name: phase["peak_allocated_bytes"]["measured"] for name, phase in phases.items()}
    if plan.swaps and plain:
        highest = max(plain, key=plain.__getitem__)
        if peaks[highest] >= plain[highest]:
            lowered = [name for name in plain if peaks[name] < plain[name]]
            notes.append(
                f"the plan does not lower the peak: the step needs most in the {highest} phase "
                f"({format_bytes(plain[highest])}), which the plan does not touch"
                + (f"; it lowers {' and '.join(lowered)}" if lowered else "")
            )
    if stats.ineffective_bytes:
        freed_nothing = format_bytes(stats.ineffective_bytes)
        notes.append(f"swapping {freed_nothing} freed nothing: somebody else still held those tensors")
    if stats.host_full:
        notes.append(f"{stats.host_full} tensors stayed on the device because the host budget was used up")
    return notes


# ---- time
def hidden_share(trace: StepTrace) -> float | None:
    """Share of the time in which copies ran that compute did not spend waiting for one. None without copies."""
    copies = _union((copy.start_ms, copy.end_ms) for copy in trace.copies)
    total = sum(end - start for start, end in copies)
    if total <= 0:
        return None
    waits = _union((wait.start_ms, wait.end_ms) for wait in trace.copy_waits)
    ends = [end for _, end in waits]
    exposed = 0.0
    for start, end in copies:
        for wait_start, wait_end in waits[bisect_left(ends, start) :]:
            if wait_start >= end:
                break
            exposed += max(0.0, min(end, wait_end) - max(start, wait_start))
    return 1 - exposed / total


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping spans as one, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


# ---- what went where
def _layers(step: ExecutedStep) -> list[dict[str, Any]]:
    """Bytes saved in the step, all microbatches, by chunk and layer (0: outside the layers)."""
    rows = sorted(_grouped(step, lambda key: (key.chunk, key.layer)), key=lambda row: row[0])
    return [{"chunk": chunk, "layer": layer, **where} for (chunk, layer), _, where in rows]


def _tensors(step: ExecutedStep) -> list[dict[str, Any]]:
    """Sites (chunk, ordinal; across layers and microbatches) that save most."""
    rows = _grouped(step, lambda key: (key.chunk, key.layer == OUTSIDE, key.ordinal))
    rows.sort(key=lambda row: (-sum(row[2].values()), row[0]))
    return [
        {
            "chunk": chunk, "in_layers": not outside, "tensor": ordinal, "count": len(records),
            "largest_bytes": max(record.nbytes for record in records), **where,
        }
        for (chunk, outside, ordinal), records, where in rows[:MOST_TENSORS]
    ]  # fmt: skip


def _grouped(
    step: ExecutedStep, group_of: Callable[[Key], tuple[int, ...]]
) -> list[tuple[tuple[int, ...], list[SavedRecord], dict[str, int]]]:
    """(group, what it saved, its bytes by what became of them)."""
    swapped = {swap.key for swap in step.plan.swaps}
    groups: dict[tuple[int, ...], list[SavedRecord]] = {}
    for record in step.trace.saved:
        groups.setdefault(group_of(record.key), []).append(record)
    found = []
    for group, records in groups.items():
        where = {"swapped_bytes": 0, "kept_bytes": 0, "immovable_bytes": 0}
        for record in records:
            name = "swapped" if record.key in swapped else "kept" if is_candidate(record) else "immovable"
            where[f"{name}_bytes"] += record.nbytes
        found.append((group, records, where))
    return found
