"""Planning: trace, policy, memory on both sides -> Plan, or one sentence why there is none. Pure; imports no torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.solve import Infeasible, solve
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.stages import eligible, move_all, predicted
from mindspeed_swap.units import GIB, format_bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """``plan`` is None if there is none; ``text`` then says why, else what is worth a line (or "")."""

    plan: Plan | None
    text: str = ""
    host_bytes: int = 0  # most on the host at once


def make_plan(trace: StepTrace, policy: Policy, budgets: Sequence[int], host_bytes: int | None = None) -> Planned:
    """``budgets``: peaks of the device, falling caution: the first that can be had is taken. ``host_bytes``: what swap
    may take of the host (None: no limit)."""
    seen = eligible(trace, policy)
    plan, reason = None, ""
    for budget in budgets:
        try:
            plan = move_all(seen, policy, budget) if policy.moves_all else solve(seen, budget)
            break
        except Infeasible as error:
            reason = str(error)
    if plan is None:
        limits = [name for name, on in (
            ("swap_bucket_size", policy.bucket_bytes is not None), ("tensor_size_filter", policy.tensor_size_filter > 0)
        ) if on]  # fmt: skip
        return Planned(None, reason + (f"; {' and '.join(limits)} limit what may move" if limits else ""))
    need = host_peak(seen, plan)
    if host_bytes is None or need <= host_bytes:
        return Planned(plan, host_bytes=need)
    return _trimmed(seen, plan, need, host_bytes, budgets[-1])


def _trimmed(trace: StepTrace, plan: Plan, need: int, host_bytes: int, most: int) -> Planned:
    """The plan without what the host has no room for. What is away longest is kept in it."""
    records = {record.key: record for record in trace.saved}
    room = [host_bytes] * len(trace.points)
    kept = set()
    for swap in sorted(plan.swaps, key=lambda s: records[s.key].saved - _back(trace, records[s.key].first_read)):
        span = slice(records[swap.key].saved, _back(trace, records[swap.key].first_read))
        if min(room[span], default=0) >= swap.nbytes:
            room[span] = [value - swap.nbytes for value in room[span]]
            kept.add(swap.key)
    less = predicted(trace, replace(plan, swaps=tuple(swap for swap in plan.swaps if swap.key in kept)))
    assert less.prediction is not None
    peak = max(less.prediction.peak_bytes.values())
    told = (
        f"the plan needs {format_bytes(need)} of host memory and {format_bytes(host_bytes)} are to be had: trimmed "
        f"from {format_bytes(plan.swap_bytes)} to {format_bytes(less.swap_bytes)} of swap"
    )
    remedy = f"--swap-host-memory {need / GIB + 0.005:.2f} would do"
    if peak > most:
        needs = f"with which the step needs {format_bytes(peak)} of {format_bytes(most)} on the device"
        return Planned(None, f"{told}, {needs}; {remedy}")
    return Planned(less, f"{told} ({remedy})", host_peak(trace, less))


def host_peak(trace: StepTrace, plan: Plan) -> int:
    """Most bytes on the host at once: from the save, where the copy out begins, to the read."""
    records = {record.key: record for record in trace.saved}
    delta = [0] * (len(trace.points) + 1)
    for swap in plan.swaps:
        record = records[swap.key]
        delta[record.saved] += swap.nbytes
        delta[_back(trace, record.first_read)] -= swap.nbytes
    return max(accumulate(delta))


def _back(trace: StepTrace, first_read: int | None) -> int:
    return len(trace.points) if first_read is None else first_read
