"""Explain: a plan in sentences, one per group of tensors or modules that it treats alike. Pure; imports no torch."""
from __future__ import annotations

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.recompute import Module
from mindspeed_swap.core.simulate import memory_curve, recomputed, simulate
from mindspeed_swap.core.trace import OUTSIDE, Key, SavedRecord, StepTrace
from mindspeed_swap.core.windows import is_candidate
from mindspeed_swap.units import format_bytes


def explain(trace: StepTrace, plan: Plan) -> list[str]:
    """One line per phase, one per kind of recomputed module, then one per site (chunk and ordinal, across layers and
    microbatches), most bytes first: what happens to it, why, what that costs (ms) and frees (bytes of one step, bytes
    at the peak). Raises ValueError when the plan is not one for this trace."""
    outcome = simulate(trace, plan)
    keep = memory_curve(trace, ())
    lines: list[str] = []
    for phase, peak in outcome.peak_bytes.items():
        plain = max(v for v, p in zip(keep, trace.points, strict=True) if p.position.phase == phase)
        note = ", untouched by the plan" if (plan.swaps or plan.recomputes) and plain == peak else ""
        above = f", {format_bytes(peak - plan.budget_bytes)} ABOVE the budget" if peak > plan.budget_bytes else ""
        lines.append(f"phase {phase}: peak {format_bytes(plain)} -> {format_bytes(peak)}{note}{above}")
    kinds: dict[tuple[int, str], list[Module]] = {}
    again: set[Key] = set()  # freed by recompute
    for module in recomputed(trace, plan):
        kinds.setdefault((module.record.key.chunk, module.record.key.name), []).append(module)
        again.update(trace.saved[number].key for number in module.frees)
    for (chunk, name), modules in sorted(kinds.items()):
        layers = _ranges(sorted({module.record.key.layer for module in modules}))
        spent = sum(module.record.forward_ms for module in modules)
        lines.append(
            f"recompute {len(modules)} calls of {name}, chunk {chunk}, layers {layers}; compute takes {spent:.1f} ms "
            f"more, frees {format_bytes(sum(module.freed_bytes for module in modules))}"
        )
    if plan.prediction and plan.prediction.faster_recompute_ms is not None:
        lines.append(
            f"recomputing everything would fit and be faster: {plan.prediction.faster_recompute_ms:.1f} ms a step "
            f"against {outcome.step_ms:.1f}"
        )
    swapped = {swap.key for swap in plan.swaps}
    waits: dict[tuple[int, ...], float] = {}
    for stall in outcome.stalls:
        waits[stall.key] = waits.get(stall.key, 0.0) + stall.wait_ms
    groups: dict[tuple[int, bool, int], list[SavedRecord]] = {}
    for record in trace.saved:
        groups.setdefault((record.key.chunk, record.key.layer == OUTSIDE, record.key.ordinal), []).append(record)
    at_peak = keep.index(max(keep))
    for (chunk, outside, ordinal), records in sorted(groups.items(), key=lambda g: (-_total(g[1]), g[0])):
        records = [record for record in records if record.key not in again]
        if not records:
            continue
        gone = [record for record in records if record.key in swapped]
        site = f"{'outside the layers' if outside else 'layers'}, chunk {chunk}, tensor {ordinal}"
        size = f"{len(records)} x {format_bytes(max(record.nbytes for record in records))}"
        if not gone:
            lines.append(f"keep {site} ({size}): {_why_kept(records)}")
            continue
        wait = sum(waits.get(record.key, 0.0) for record in gone)
        cost = f"compute waits {wait:.1f} ms" if wait else "no wait"
        layers = "" if outside else f" of layers {_ranges(sorted({record.key.layer for record in gone}))}"
        freed = sum(r.nbytes for r in gone if r.saved < at_peak and (r.died is None or at_peak < r.died))
        lines.append(
            f"swap {len(gone)} of {len(records)}{layers}: {site} ({size}), longest absence first; {cost}, "
            f"moves {format_bytes(_total(gone))} each way, {format_bytes(freed)} of it live at the plain peak"
        )
    if not plan.swaps and not plan.recomputes:
        fits = max(keep, default=0) <= plan.budget_bytes
        lines.append("nothing is swapped: everything fits" if fits else "nothing is swapped, and it does not fit")
    return lines


def _total(records: list[SavedRecord]) -> int:
    return sum(record.nbytes for record in records)


def _why_kept(records: list[SavedRecord]) -> str:
    movable = sum(is_candidate(record) for record in records)
    if movable:
        return f"no need ({movable} of {len(records)} could leave)"
    reasons = sorted({record.reason for record in records if record.reason})
    return "may not move" + (f": {reasons[0]}" if reasons else ": held by others, or not read again")


def _ranges(numbers: list[int]) -> str:
    """``1-4,7``."""
    parts: list[str] = []
    first = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != previous + 1:
            parts.append(str(first) if first == previous else f"{first}-{previous}")
            first = number
        previous = number
    return ",".join(parts)
