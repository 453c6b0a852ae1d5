"""Case 32: memory "saved" while the peak did not move, because it sat in another phase. Peaks are reported by phase,
and a plan that does not touch the phase of the peak says so."""
import gc

import torch
from swapping import blocks, new_manager, new_trace, swap_all

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.report.figures import figures


def step_with_optimizer(body, leaves, manager, plan, optimizer_bytes):
    for leaf in leaves:
        leaf.grad = None
    manager.begin_step(plan, trace=new_trace())
    with manager.forward(0):
        loss = body(manager.layer)
    loss.backward()
    del loss
    manager.enter_optimizer()
    torch.empty(optimizer_bytes, dtype=torch.uint8)
    stats, trace = manager.end_step()
    return ExecutedStep(plan or Plan(trace.model, 0), stats, trace)


def run(sim, optimizer_bytes):
    gc.collect()  # what earlier tests left would go between the two runs
    body, leaves = blocks(6, width=64, tokens=256)
    manager = new_manager(sim)
    plain = step_with_optimizer(body, leaves, manager, None, optimizer_bytes)
    plan = swap_all(plain.trace)
    return figures(plain), figures(step_with_optimizer(body, leaves, manager, plan, optimizer_bytes))


def peaks(told, which):
    return {name: phase["peak_allocated_bytes"][which] for name, phase in told["phases"].items()}


def test_a_plan_that_does_not_touch_the_peak_says_so(sim):
    plain, swapped = run(sim, optimizer_bytes=16 << 20)
    assert list(swapped["phases"]) == ["forward", "backward", "optimizer"]
    before, after = peaks(plain, "measured"), peaks(swapped, "measured")
    assert after["forward"] < before["forward"] and after["backward"] < before["backward"]
    assert max(after.values()) == max(before.values()) == after["optimizer"]
    assert peaks(swapped, "without_plan") == before
    (note,) = swapped["notes"]
    assert note.startswith("the plan does not lower the peak: the step needs most in the optimizer phase (")
    assert note.endswith("; it lowers forward and backward")
    assert plain["notes"] == []


def test_a_plan_that_does_touch_it_says_nothing(sim):
    plain, swapped = run(sim, optimizer_bytes=1 << 10)
    assert max(peaks(swapped, "measured").values()) < max(peaks(plain, "measured").values())
    assert swapped["notes"] == []
