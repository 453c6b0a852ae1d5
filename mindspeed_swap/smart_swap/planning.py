"""Planning: trace, policy, memory on both sides -> Plan, or one sentence why there is none. Pure; imports no torch."""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.retime import hurried
from mindspeed_swap.core.simulate import predicted
from mindspeed_swap.core.solve import Infeasible, solve, told_of
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.stages import eligible, move_all
from mindspeed_swap.units import enough_gib, format_bytes

# Of the host budget, that plans leave: freed blocks of other sizes leave gaps.
HOST_SLACK_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Planned:
    """``plan`` is None if there is none; ``text`` then says why, else what is worth a line (or "")."""

    plan: Plan | None
    text: str = ""


def make_plan(trace: StepTrace, policy: Policy, budgets: Sequence[int], host_bytes: int | None = None) -> Planned:
    """``budgets``: peaks of the device, falling caution: the first that can be had is taken. ``host_bytes``: what swap
    may take of the host (None: no limit)."""
    seen = eligible(trace, policy)
    plan, reason = _first(seen, policy, budgets, None)
    if plan is None:
        limits = [name for name, on in (
            ("swap_bucket_size", policy.bucket_bytes is not None), ("tensor_size_filter", policy.tensor_size_filter > 0)
        ) if on]  # fmt: skip
        return Planned(None, reason + (f"; {' and '.join(limits)} limit what may move" if limits else ""))
    if policy.moves_all or host_bytes is None or host_need(plan) <= host_bytes:
        return Planned(*fit_host(seen, plan, host_bytes))
    less, reason = _first(seen, policy, budgets, host_bytes)
    told, remedy = _short_of_host(plan, host_bytes)
    if less is None:
        return Planned(None, f"{told}; {reason}; {remedy}")
    return Planned(less, f"{told}: {_trim_text(plan, less)} ({remedy})")


def plan_within(trace: StepTrace, budget: int, verbs: Collection[str], host_bytes: int | None = None) -> Plan:
    """What a search runs for this budget, with what it does in the recorded step. Raises as ``solve``."""
    quick = hurried(trace)
    plan = solve(quick, budget, verbs, host_bytes)
    return plan if quick is trace else told_of(trace, plan, verbs)


def fit_host(trace: StepTrace, plan: Plan, host_bytes: int | None) -> tuple[Plan, str]:
    """The plan without what the host has no room for, and a line about that (or "")."""
    if host_bytes is None or host_need(plan) <= host_bytes:
        return plan, ""
    less = _trimmed(trace, plan, host_bytes)
    told, remedy = _short_of_host(plan, host_bytes)
    return less, f"{told}: {_trim_text(plan, less)} ({remedy})"


def _short_of_host(plan: Plan, host_bytes: int) -> tuple[str, str]:
    """What is missing, and the remedy."""
    need = host_need(plan)
    return (
        f"the plan needs {format_bytes(need)} of host memory and {format_bytes(host_bytes)} are to be had",
        f"--swap-host-memory {enough_gib(need / (1 - HOST_SLACK_SHARE))} would do",
    )


def _trim_text(plan: Plan, less: Plan) -> str:
    return f"trimmed from {format_bytes(plan.swap_bytes)} to {format_bytes(less.swap_bytes)} of swap"


def _first(seen: StepTrace, policy: Policy, budgets: Sequence[int], host: int | None) -> tuple[Plan | None, str]:
    reason = ""
    for budget in budgets:
        try:
            if policy.moves_all:
                return move_all(seen, policy, budget), ""
            return plan_within(seen, budget, policy.verbs, host), ""
        except Infeasible as error:
            reason = str(error)
    return None, reason


def host_need(plan: Plan) -> int:
    """Most bytes on the host at once."""
    return plan.prediction.host_bytes if plan.prediction else plan.swap_bytes


def _trimmed(trace: StepTrace, plan: Plan, host_bytes: int) -> Plan:
    """The plan without what the host has no room for. What is away longest is kept in it."""
    records = {record.key: record for record in trace.saved}
    spans = {swap.key: slice(records[swap.key].saved, (records[swap.key].first_read or 0) + 1) for swap in plan.swaps}
    room = [host_bytes] * len(trace.points)
    kept = set()
    for swap in sorted(plan.swaps, key=lambda s: spans[s.key].start - spans[s.key].stop):
        span = spans[swap.key]
        if min(room[span]) >= swap.nbytes:
            room[span] = [value - swap.nbytes for value in room[span]]
            kept.add(swap.key)
    return predicted(trace, replace(plan, swaps=tuple(swap for swap in plan.swaps if swap.key in kept)))
