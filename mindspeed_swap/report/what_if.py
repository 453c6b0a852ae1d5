"""``mindspeed-swap what-if DIR|TRACE``: predicted step time against memory, and the flags of each point. No torch.

Prediction only: the trace of one recorded step, the planner and the simulator; nothing runs. For several ranks a point
is feasible when all are, and as slow as the slowest.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_swap.core.checked import first_difference
from mindspeed_swap.core.explain import explain
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import memory_curve, plain_step_ms
from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP, Floor, Infeasible, floor
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.errors import SettingError
from mindspeed_swap.report.reader import TRACE_FILE, read_trace, trace_files
from mindspeed_swap.smart_swap.planning import plan_within
from mindspeed_swap.smart_swap.policy import RESERVE_SHARE
from mindspeed_swap.units import format_bytes

POINTS = 8
CURVES = {"keep|swap": (KEEP_SWAP, "--smart-swap"), "+recompute": (ALL_VERBS, "--adaptive-memory-optimization")}


@dataclass(frozen=True)
class Answer:
    """Of all ranks at one budget."""

    step_ms: float | None  # None: no plan
    swap_bytes: int = 0
    recompute_bytes: int = 0


@dataclass(frozen=True)
class Frontier:
    plain_ms: float
    peak_bytes: int  # of the rank that needs most, when everything is kept
    floors: dict[str, Floor]  # by curve, of the rank whose plans reach least
    answers: dict[int, dict[str, Answer]]  # by budget, descending, and curve
    whole: bool = True  # the optimizer had its state by then


def read_traces(path: str) -> list[StepTrace]:
    """One for a file; for a ``--swap-report-dir`` one per rank."""
    files = trace_files(path)
    if not files:
        raise SettingError(f"{path}: no rank<N>/{TRACE_FILE} in it; give the folder that --swap-report-dir named")
    traces: list[StepTrace] = []
    for file in files:
        traces.append(read_trace(file))
        if not traces[-1].points:
            raise SettingError(f"{file}: the trace has no points: nothing was recorded")
        if other := first_difference(traces[-1].model, traces[0].model, str(files[0])):
            raise SettingError(f"{file}: of another model: {other}; give one rank's file, or a folder of one run")
    return traces


def frontier(traces: Sequence[StepTrace], budgets: Sequence[int] = (), host_budget: int | None = None) -> Frontier:
    """Without ``budgets``: evenly from the lowest floor to the plain peak."""
    peak = max(max(memory_curve(trace, ())) for trace in traces)
    floors: dict[str, Floor] = {}
    for name, (verbs, _) in CURVES.items():
        bounds = [floor(trace, verbs, host_budget) for trace in traces]
        floors[name] = max(bounds, key=lambda bound: bound.reachable_bytes)
    low = min(bound.reachable_bytes for bound in floors.values())
    step = max(1, (peak - low) // (POINTS - 1))
    chosen = set(budgets) or {peak, *range(low, peak, step)}
    answers = {
        budget: {name: _answer(traces, budget, verbs, host_budget) for name, (verbs, _) in CURVES.items()}
        for budget in sorted(chosen, reverse=True)
    }
    whole = all(trace.has_optimizer_state for trace in traces)
    return Frontier(max(map(plain_step_ms, traces)), peak, floors, answers, whole)


def _answer(traces: Sequence[StepTrace], budget: int, verbs: Sequence[str], host_budget: int | None) -> Answer:
    plans: list[Plan] = []
    for trace in traces:
        try:
            plans.append(plan_within(trace, budget, verbs, host_budget))
        except Infeasible:
            return Answer(None)
    return Answer(
        max(plan.prediction.step_ms for plan in plans if plan.prediction),
        max(plan.swap_bytes for plan in plans),
        max(plan.recompute_bytes for plan in plans),
    )


def explained(traces: Sequence[StepTrace], budget: int, host_budget: int | None) -> list[str]:
    """For one budget: what each curve's plan does, on the rank that needs most."""
    trace = max(traces, key=lambda trace: max(memory_curve(trace, ())))
    lines = []
    for name, (verbs, _) in CURVES.items():
        try:
            plan = plan_within(trace, budget, verbs, host_budget)
        except Infeasible as error:
            lines += ["", f"{name}: {error}"]
        else:
            lines += ["", f"{name}:", *(f"  {line}" for line in explain(trace, plan))]
    return lines


# From there up there are plans to choose from, whatever differs from step to step.
LEAST_ROOM = 1.05


def table(found: Frontier) -> str:
    """One line per budget. The flag line is that of the fastest curve; of equals, of the one with fewer verbs."""
    lines = [
        f"predicted, not run: plain step {found.plain_ms:.1f} ms, peak {format_bytes(found.peak_bytes)}",
        *(
            f"floor of {name}: {format_bytes(bound.bytes)}; no plan below {format_bytes(bound.reachable_bytes)}, "
            f"reached in phase {bound.phase}"
            for name, bound in found.floors.items()
        ),
        *([] if found.whole else ["recorded before the optimizer had its state: later steps need more than that"]),
        "",
    ]
    rows = [["budget", *(f"{name} ms" for name in CURVES), "swapped", "recomputed", "flags"]]
    for budget, answers in found.answers.items():
        possible = {name: answer for name, answer in answers.items() if answer.step_ms is not None}
        row = [format_bytes(budget), *(_time(answer, found.plain_ms) for answer in answers.values())]
        if not possible:
            rows.append([*row, "", "", "(below the floor)"])
            continue
        best = min(possible, key=lambda name: round(possible[name].step_ms or 0.0, 3))
        moved = possible[best]
        flags = f"{CURVES[best][1]}  # MINDSPEED_SWAP_DEVICE_CAPACITY={_capacity(budget)}"
        if not moved.swap_bytes and not moved.recompute_bytes:
            flags = "(none needed)"
        elif budget < LEAST_ROOM * found.floors[best].reachable_bytes:
            flags += " (the very least: a run may need more)"
        rows.append([*row, format_bytes(moved.swap_bytes), format_bytes(moved.recompute_bytes), flags])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _time(answer: Answer, plain_ms: float) -> str:
    if answer.step_ms is None:
        return "-"
    return f"{answer.step_ms:.1f} ({answer.step_ms / plain_ms - 1:+.1%})" if plain_ms else f"{answer.step_ms:.1f}"


def _capacity(budget: int) -> str:
    """The largest device with which a run plans for no more than this budget: it leaves a reserve."""
    return f"{int(budget / (1 - RESERVE_SHARE)) >> 10}KiB"
