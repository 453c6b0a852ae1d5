"""trace.json of real steps on the simulated device, against what the device itself counted."""
import itertools
import random

import pytest
import torch
from swapping import blocks, capacity, new_manager, recorded_plan, run_step, swap_all

from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.spans import PREFIX
from mindspeed_swap.core.step import ExecutedStep
from mindspeed_swap.report.chrome import ALLOCATED, LANES, LAYERS, STALLS, TO_DEVICE, TO_HOST, chrome_trace
from mindspeed_swap.report.figures import figures, hidden_share
from mindspeed_swap.sim import device


def events(step, kind="X", lane=None):
    found = chrome_trace(step, 0, "run")["traceEvents"]
    return [e for e in found if e["ph"] == kind and (lane is None or e["tid"] == lane)]


def executed(body, leaves, manager, plan, **options):
    outcome = run_step(body, leaves, manager, plan, record=True, **options)
    return ExecutedStep(plan or Plan("test", 0), outcome.stats, outcome.trace)


@pytest.fixture
def swapped(sim):
    """A step of two microbatches in which all that can be swapped is."""
    body, leaves = blocks(6, width=64, tokens=128)
    manager = new_manager(sim)
    trace = run_step(body, leaves, manager, record=True, microbatches=2).trace
    return executed(body, leaves, manager, swap_all(trace, release=2, prefetch=3), microbatches=2)


def link_bytes():
    stats = device.stats()
    return stats["d2h_bytes"], stats["h2d_bytes"]


def test_every_swapped_byte_is_in_it(swapped):
    sums = [sum(e["args"]["bytes"] for e in events(swapped, lane=lane)) for lane in (TO_HOST, TO_DEVICE)]
    assert sums == [swapped.plan.swap_bytes] * 2 == [swapped.stats.offloaded_bytes, swapped.stats.loaded_bytes]
    copies = [e["args"] for e in events(swapped, lane=TO_HOST)]
    named = {tuple(copy[n] for n in ("microbatch", "chunk", "layer", "ordinal")) for copy in copies}
    assert named == {tuple(swap.key) for swap in swapped.plan.swaps}
    assert all(copy["planned"] for copy in copies)


def test_every_byte_that_the_link_carried_is_in_it_under_eviction(sim):
    body, leaves = blocks(6, width=64, tokens=128)
    manager = new_manager(sim)
    guard = OomGuard(manager)
    plain = run_step(body, leaves)
    for leaf in leaves:
        leaf.grad = None
    sim.synchronize()
    before = link_bytes()
    base = device.memory_allocated()
    with capacity(base + int((plain.peak_bytes - base) * 0.6)):
        step = executed(body, leaves, manager, None)
    guard.close()
    sim.synchronize()
    carried = [after - b for after, b in zip(link_bytes(), before, strict=True)]
    found = [sum(e["args"]["bytes"] for e in events(step, lane=lane)) for lane in (TO_HOST, TO_DEVICE)]
    assert found == carried and carried[0] > 0 and step.stats.evictions > 0
    assert not any(e["args"]["planned"] for e in events(step, lane=TO_HOST))


def test_spans_of_a_lane_do_not_overlap(swapped):
    for lane in LANES:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events(swapped, lane=lane))
        assert spans or lane == STALLS
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-6, LANES[lane]


def test_memory_counter_equals_the_allocator_at_50_positions(sim):
    body, leaves = blocks(8, width=32, tokens=64)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager, release=2, prefetch=3)
    seen = []
    manager.on_interval = lambda interval: seen.append((device.memory_allocated(), interval.peak_bytes))
    step = executed(body, leaves, manager, plan)
    counters = [e["args"]["bytes"] for e in events(step, "C") if e["name"] == ALLOCATED]
    assert len(counters) == len(seen) == len(step.trace.points)
    for i in random.Random(0).sample(range(len(seen)), 50):
        assert counters[i] == seen[i][0]
        assert step.trace.points[i].peak_bytes == seen[i][1]
    times = [e["ts"] for e in events(step, "C") if e["name"] == ALLOCATED]
    assert times == sorted(times)


def test_layers_fill_the_step(swapped):
    spans = events(swapped, lane=LAYERS)
    assert sum(e["dur"] for e in spans) >= 0.95 * 1e3 * swapped.trace.step_ms
    names = [e["name"] for e in spans]
    for m in (0, 1):
        forward = [n for n in names if n.endswith(f"forward {m}") and n.startswith("layer")]
        assert forward == [f"layer {i} forward {m}" for i in range(1, 7)]
        backward = [n for n in names if n.endswith(f"backward {m}") and n.startswith("layer")]
        assert backward == [f"layer {i} backward {m}" for i in range(6, 0, -1)]


def test_a_slow_link_shows_as_stalls(sim):
    body, leaves = blocks(4, width=64, tokens=256)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    run_step(body, leaves, manager, plan)
    device.set_link(0.001, 0.001)  # whatever compute takes on a busy machine
    step = executed(body, leaves, manager, plan)
    stalls = events(step, lane=STALLS)
    assert sum(e["dur"] for e in stalls) == pytest.approx(1e3 * step.trace.stall_ms, rel=0.05)
    assert step.trace.stall_ms > 0.5 * step.trace.step_ms
    assert {e["name"] for e in stalls} == {"copy to host not done", "copy to device not done"}
    assert hidden_share(step.trace) < 0.5
    told = figures(step)
    assert told["stall_ms"]["measured"] == pytest.approx(step.trace.stall_ms)  # summed in another order
    assert told["step_ms"]["without_plan"] < 0.5 * told["step_ms"]["measured"]
    # The times of the trace are those without waits; measured_ms puts the waits back.
    assert step.trace.measured_ms()[-1] == pytest.approx(step.trace.step_ms, rel=0.05)


def test_our_work_is_named_in_the_users_own_profiler(sim):
    body, leaves = blocks(2)
    manager = new_manager(sim)
    plan = recorded_plan(body, leaves, manager)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run_step(body, leaves, manager, plan)
    names = [e.key for e in profiler.key_averages() if e.key.startswith(PREFIX)]
    assert f"{PREFIX}forward of microbatch 0" in names and f"{PREFIX}forward of layer 2" in names
    for what in ("copy to host of", "copy to device of"):
        assert sum(name.startswith(PREFIX + what) for name in names) == len(plan.swaps)
