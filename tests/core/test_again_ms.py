"""How long a module takes to run again is what it took, or the device's part of its forward."""
from __future__ import annotations

from dataclasses import replace

import pytest
from swapping import new_manager
from test_again import Blocks, plan_of
from traces import Shape, megatron_trace

from mindspeed_swap.core.plan import Swap
from mindspeed_swap.core.recompute import CALL_HOST_MS, DROP_HOST_MS, HOSTS_SHARE, modules_of
from mindspeed_swap.core.recorder import Recorder
from mindspeed_swap.core.trace import BACKWARD, RECOMPUTED, StepTrace

SHAPE = Shape(layers=4, sites_mib=(16, 32, 64), transient_mib=32, static_mib=256, optimizer_mib=32, logits_mib=16)


def prices(trace: StepTrace) -> list[tuple[float, float]]:
    """Of each module: its forward, and what running it again is taken to cost without what that takes the host."""
    found = []
    for module in modules_of(trace):
        host_ms = (CALL_HOST_MS + DROP_HOST_MS * len(module.frees)) * trace.forward_waits
        found.append(module.record.forward_ms - host_ms)
    return found


def waiting(trace: StepTrace, waits: bool, **more: float) -> StepTrace:
    return replace(trace, points=[replace(point, waits_for_host=waits) for point in trace.points], **more)


@pytest.mark.parametrize("backward_waits, left", [(0.0, 1 - HOSTS_SHARE), (1.0, 1.0), (0.5, 1 - HOSTS_SHARE / 2)])
def test_where_forward_waited_for_the_host_the_device_had_less_to_do(backward_waits, left):
    trace = megatron_trace(SHAPE)
    before = prices(waiting(trace, False))
    assert before == pytest.approx([module.record.forward_ms for module in modules_of(trace)]) and min(before) > 0.0
    after = prices(waiting(trace, True, forward_waits=1.0, backward_waits=backward_waits))
    assert after == pytest.approx([left * each for each in before])


def test_only_what_waits_within_the_module_counts():
    """``waits_for_host`` at a point speaks of what follows it."""
    trace = replace(waiting(megatron_trace(SHAPE), False), forward_waits=0.0)
    before, module = prices(trace), modules_of(trace)[1]
    begin, end, times = module.record.begin, module.record.end, [point.time_ms for point in trace.points]
    assert end > begin + 1

    def price(*waiting: int) -> float:
        points = [replace(point, waits_for_host=i in waiting) for i, point in enumerate(trace.points)]
        return prices(replace(trace, points=points))[1]

    assert price(begin - 1, end) == pytest.approx(before[1])
    waited = (times[begin + 1] - times[begin]) / (times[end] - times[begin])
    assert 0.0 < waited < 1.0
    assert price(begin) == pytest.approx(before[1] * (1 - HOSTS_SHARE * waited))


def test_one_that_ran_again_took_what_it_took():
    trace = megatron_trace(SHAPE)
    modules = [module.record for module in modules_of(waiting(trace, True))]
    modules[1] = replace(modules[1], again_ms=0.125)
    told = waiting(replace(trace, modules=modules), True)
    assert prices(told)[1] == 0.125 and prices(told)[0] != 0.125
    assert StepTrace.from_json(told.to_json()).modules[1].again_ms == 0.125


def test_it_is_measured_in_a_recorded_step(sim):
    model, manager = Blocks(4), new_manager(sim)
    trace = model.step(manager, record=True).trace
    assert all(module.again_ms is None for module in trace.modules)
    plan = plan_of(trace, "mlp", layers=(2, 3))
    again = model.step(manager, plan, record=True).trace
    found = {module.key: module.again_ms for module in again.modules if module.again_ms is not None}
    assert found.keys() == {recompute.key for recompute in plan.recomputes} and min(found.values()) > 0.0
    waits = [wait.end_ms - wait.start_ms for wait in again.waits]
    assert sorted(found.values()) == pytest.approx(sorted(waits))


def test_each_by_itself_where_one_runs_within_another(sim):
    model, manager = Blocks(4), new_manager(sim)
    trace = model.step(manager, record=True).trace
    plan = plan_of(trace, "norm", "mlp", layers=(3,))  # the mlp asks for what the norm makes
    outcome = model.step(manager, plan, record=True)
    found = {m.key.name: m.again_ms for m in outcome.trace.modules if m.again_ms is not None}
    (wait,) = outcome.trace.waits
    assert outcome.stats.recomputed_calls == 2 and found.keys() == {"norm", "mlp"} and min(found.values()) > 0.0
    assert sum(found.values()) == pytest.approx(wait.end_ms - wait.start_ms)


class Slow:
    """A device on which each event is a millisecond after the one before."""

    def elapsed_ms(self, before: int, after: int) -> float:
        return float(after - before)


def test_without_what_it_waits_for():
    recorder = Recorder.__new__(Recorder)
    recorder._accelerator, recorder._waits, recorder._again = Slow(), [(None, 0, "USE_AFTER_LOAD", 0, 50)], []
    outer = recorder.here(100)
    recorder._waits.append((None, 0, "USE_AFTER_LOAD", 110, 115))
    inner = recorder.here(120)
    recorder._waits.append((None, 0, "USE_AFTER_LOAD", 121, 128))
    recorder.ran_again("inner", inner, recorder.here(130))
    recorder.ran_again("outer", outer, recorder.here(200))
    recorder.ran_again("next", recorder.here(300), recorder.here(301))
    assert recorder._again_ms() == {"inner": 3.0, "outer": 100.0 - 5.0 - 7.0 - 3.0, "next": 1.0}


def test_an_input_that_comes_late_is_none_of_its_time(sim):
    model, manager = Blocks(4), new_manager(sim)
    trace = model.step(manager, record=True).trace
    (norm,) = (m for m in trace.modules if m.key.layer == 3 and m.key.name == "norm")
    plan, points = plan_of(trace, "norm", layers=(3,)), trace.points
    read = next(i for i, p in enumerate(points) if p.position.phase == BACKWARD and p.position.layer == 3)
    (kept,) = norm.keeps
    record = next(r for r in trace.saved if r.key == kept)
    swap = Swap(kept, record.nbytes, points[record.last_use + 1].position, points[read].position)
    again = model.step(manager, replace(plan, swaps=(swap,)), record=True).trace
    (ran,) = (wait.end_ms - wait.start_ms for wait in again.waits if wait.cause == RECOMPUTED)
    (module,) = (m for m in again.modules if m.again_ms is not None)
    assert module.key == norm.key and 0.0 < module.again_ms <= ran
