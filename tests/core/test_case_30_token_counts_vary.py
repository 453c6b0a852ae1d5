"""Experts save more or less with every batch: the plan still moves their tensors, and host memory stays flat."""
import random

import torch
from swapping import assert_nothing_left, assert_same, new_manager, recorded_plan, run_step

WIDTH, TOKENS, EXPERTS, SPREAD = 64, 128, 4, 0.3


def test_case_30_pinned_bytes_are_flat(sim):
    rng = random.Random(1)
    experts = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(EXPERTS)]
    tokens = [TOKENS] * EXPERTS

    def body(layer):
        total = torch.zeros(())
        for number, (expert, count) in enumerate(zip(experts, tokens, strict=True), 1):
            with layer(number):
                inputs = torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH)
                total = total + (inputs @ expert).sigmoid().exp().sum()
        return total

    manager = new_manager(sim)
    plan = recorded_plan(body, experts, manager)
    assert len(plan.swaps) >= 2 * EXPERTS
    pinned = []
    for _ in range(40):
        tokens[:] = [round(TOKENS * rng.uniform(1 - SPREAD, 1 + SPREAD)) for _ in tokens]
        plain = run_step(body, experts)
        manager.pool.reserve(plan.swap_bytes)
        outcome = run_step(body, experts, manager, plan)
        assert_same(outcome, plain)
        assert outcome.stats.offloaded_bytes > 0.9 * (1 - SPREAD) * plan.swap_bytes
        pinned.append(manager.pool.pinned_bytes)
    assert pinned[20:] == [pinned[20]] * 20
    assert_nothing_left(manager)


def test_case_30_what_is_planned_where_an_expert_has_no_tokens_is_done_all_the_same(sim):
    """Its tensors are too small to be moved then; but others are released, and wanted back, where they are saved and
    read."""
    experts = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(EXPERTS)]
    tokens = [TOKENS] * EXPERTS

    def body(layer):
        total = torch.zeros(())
        with layer(1):
            for expert, count in zip(experts, tokens, strict=True):
                inputs = torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH)
                total = total + (inputs @ expert).sigmoid().exp().sum()
        return total

    manager = new_manager(sim)
    plan = recorded_plan(body, experts, manager)
    without = {swap.key for swap in plan.swaps}
    tokens[1] = 0
    there = {record.key for record in run_step(body, experts, manager, record=True).trace.saved}
    missing, others = without - there, [swap for swap in plan.swaps if swap.key in there]
    assert any(swap.release[1:] in missing for swap in others) and any(swap.prefetch[1:] in missing for swap in others)
    plain, outcome = run_step(body, experts), run_step(body, experts, manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.on_demand_loads == 0
    assert outcome.stats.loaded_bytes == sum(swap.nbytes for swap in others)
    assert_nothing_left(manager)
