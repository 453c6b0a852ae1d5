"""SwapStages: some transformer layers of one microbatch, and how many bytes of them may move. Pure; imports no torch.

A stage is (microbatch, chunk, number): ``num_attn_layers_per_stage`` layers of a chunk, counted from its first; what is
saved outside the layers is a stage of its own. A bucket is filled in the order of saving; what does not fit into what
is left of it stays, and smaller tensors after it may still go.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

from mindspeed_swap.core.lanes import Placed
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import plan_of, predicted
from mindspeed_swap.core.trace import OUTSIDE, Key, SavedRecord, StepTrace
from mindspeed_swap.core.windows import is_candidate, points_to_act, windows
from mindspeed_swap.smart_swap.policy import Policy

Stage = tuple[int, int, int]
NO_LAYER = -1


def stage_of(key: Key, layers_per_stage: int, first_layer: int) -> Stage:
    number = NO_LAYER if key.layer == OUTSIDE else (key.layer - first_layer) // layers_per_stage
    return key.microbatch, key.chunk, number


def stages(trace: StepTrace, policy: Policy) -> list[Stage]:
    """Of every record of ``trace.saved``."""
    first: dict[int, int] = {}  # chunk -> its first layer: a pipeline stage does not begin with layer 1
    for record in trace.saved:
        if record.key.layer != OUTSIDE:
            first[record.key.chunk] = min(first.get(record.key.chunk, record.key.layer), record.key.layer)
    return [stage_of(r.key, policy.layers_per_stage, first.get(r.key.chunk, OUTSIDE)) for r in trace.saved]


def eligible(trace: StepTrace, policy: Policy) -> StepTrace:
    """The trace as the policy lets the planner see it: other bandwidths, and what may not move marked so."""
    left: dict[Stage, int] = {}
    saved: list[SavedRecord] = []
    for record, stage in zip(trace.saved, stages(trace, policy), strict=True):
        why = ""
        if is_candidate(record):
            room = left.get(stage, policy.bucket_bytes)
            if record.nbytes < policy.tensor_size_filter:
                why = "smaller than tensor_size_filter"
            elif room is not None:
                if record.nbytes > room:
                    why = "no room in its stage's swap_bucket_size"
                else:
                    left[stage] = room - record.nbytes
        saved.append(replace(record, movable=False, reason=why) if why else record)
    return replace(
        trace,
        saved=saved,
        d2h_bytes_per_ms=policy.d2h_bytes_per_ms or trace.d2h_bytes_per_ms,
        h2d_bytes_per_ms=policy.h2d_bytes_per_ms or trace.h2d_bytes_per_ms,
        # Given ones hold whatever else the link does.
        d2h_both_bytes_per_ms=policy.d2h_bytes_per_ms or trace.d2h_both_bytes_per_ms,
        h2d_both_bytes_per_ms=policy.h2d_bytes_per_ms or trace.h2d_both_bytes_per_ms,
    )


def move_all(trace: StepTrace, policy: Policy, budget: int) -> Plan:
    """Every candidate goes: its device memory when the stage after its own has run, and it comes back one stage ahead
    of its use. Where that would not stay under the budget: as early and as late as it can."""
    plan = _plan(trace, budget, _by_stage(trace, policy))
    if plan.prediction is not None and plan.prediction.peak <= budget:
        return plan
    return _plan(trace, budget, [Placed(each.record, each.release, each.prefetch) for each in windows(trace)])


def _by_stage(trace: StepTrace, policy: Policy) -> list[Placed]:
    of = stages(trace, policy)
    last_saved: dict[Stage, int] = {}
    first_read: dict[Stage, int] = {}
    for record, stage in zip(trace.saved, of, strict=True):
        last_saved[stage] = max(last_saved.get(stage, 0), record.saved)
        if record.first_read is not None:
            first_read[stage] = min(first_read.get(stage, record.first_read), record.first_read)
    ends, begins = sorted(last_saved.values()), sorted(first_read.values())
    acts = points_to_act(trace)
    placed = []
    for window in windows(trace):
        stage = of[window.record]
        release = next((end for end in ends if end > last_saved[stage]), window.release)
        prefetch = next((begin for begin in reversed(begins) if begin < first_read[stage]), window.prefetch)
        prefetch = min(max(prefetch, window.release + 1), window.prefetch)
        prefetch = acts[bisect_left(acts, prefetch)]  # window.prefetch is one of them
        release = min(max(release, window.release), prefetch - 1)
        release = acts[bisect_right(acts, release) - 1]  # so is window.release
        placed.append(Placed(window.record, release, prefetch))
    return placed


def _plan(trace: StepTrace, budget: int, placed: list[Placed]) -> Plan:
    placed.sort(key=lambda item: (item.prefetch, trace.saved[item.record].first_read))
    return predicted(trace, plan_of(trace, budget, placed))
