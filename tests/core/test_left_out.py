"""A module that must not run twice (a router counts what goes through it) inside calls that run again: it is left out,
and gives what it gave the first time."""
from __future__ import annotations

import gc

import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager, run_step
from test_again import LAYERS, TOKENS, WIDTH, Blocks, assert_right_within_budgets, plan_of
from torch.nn.functional import gelu

from mindspeed_swap.core.plan import Plan, Recompute
from mindspeed_swap.core.recompute import Chosen, modules_of
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.trace import ModuleKey
from mindspeed_swap.sim import device

pytestmark = pytest.mark.usefixtures("light_or_not")

ROW = TOKENS * WIDTH * 4  # bytes of a hidden state


class Routed(Blocks):
    """The mlp asks a gate, which draws random numbers, has a module of its own inside, and saves what only it was given
    as well as what it makes."""

    def __init__(self, layers: int = LAYERS, drop: float = 0.3) -> None:
        super().__init__(layers, drop)
        self.gates = self.inner = 0

    def call(self, name, function, *args, **kwargs):
        if self.manager is None:
            return function(*args, **kwargs)
        calls = self.manager.calls
        return calls.call(name, function, args, kwargs, keeps_outputs=name == "layer", once=name.startswith("mlp.gate"))

    def scores(self, hidden):
        self.inner += 1
        return torch.sigmoid(hidden * 1.5)

    def gate(self, hidden):
        self.gates += 1
        scores = self.call("mlp.gate.scores", self.scores, hidden.tanh())
        noise = torch.rand(TOKENS, 1)
        return torch.nn.functional.dropout(scores, self.drop), (scores.sum(1, keepdim=True) > noise * WIDTH)

    def mlp(self, hidden, *, up, down):
        self.calls += 1
        before = torch.nn.functional.silu(hidden)
        weight, chosen = self.call("mlp.gate", self.gate, before * before)
        hidden = torch.where(chosen, hidden * weight, before)
        hidden = self.call("mlp.act", torch.nn.functional.gelu, hidden @ up)
        return torch.nn.functional.dropout(hidden, self.drop) @ down

    def step(self, *args, **kwargs):
        self.gates = self.inner = 0
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("names, drop", [
    (("mlp",), 0.3), (("layer",), 0.3), (("norm", "mlp"), 0.3), (("norm", "mlp.act"), 0.0), (("mlp.pointwise",), 0.0)
])  # fmt: skip
def test_it_runs_once_and_nothing_of_the_result_changes(sim, names, drop, kind=Routed):
    model, manager = kind(drop=drop), new_manager(sim)
    plain = model.step(None)
    plan = plan_of(model.step(manager, record=True).trace, *names)
    for record in (False, True, False):
        outcome = model.step(manager, plan, record=record)
        assert_same(outcome, plain)
        assert outcome.stats.recomputed_calls == len(plan.recomputes)
        assert model.gates == model.inner == LAYERS
    again = sum(recompute.key.name in ("layer", "mlp", "mlp.pointwise") for recompute in plan.recomputes)
    assert model.calls == LAYERS + again and again in (LAYERS, LAYERS - 1, 0)
    assert outcome.peak_bytes < plain.peak_bytes
    assert_nothing_left(manager)


def test_what_calls_around_it_free(sim):
    """All but what it saves and gives; what it was given is made again before it is asked."""
    trace = Routed(2).step(new_manager(sim), record=True).trace
    found = {module.key: module for module in trace.modules}
    assert found[ModuleKey(0, 0, 2, "mlp.gate")].frees == found[ModuleKey(0, 0, 2, "mlp.gate.scores")].frees == []
    sizes = {record.key: record.nbytes for record in trace.saved}
    gate, points = found[ModuleKey(0, 0, 2, "mlp.gate")], {record.key: record.saved for record in trace.saved}
    inside = {key for key, point in points.items() if gate.begin < point <= gate.end}
    assert len(inside) >= 3
    norm = found[ModuleKey(0, 0, 2, "norm")]
    for name in ("mlp", "layer"):
        module = found[ModuleKey(0, 0, 2, name)]
        assert not inside & set(module.frees)
        assert all(size in (ROW, 4 * ROW, *(sizes[key] for key in norm.frees)) for size in map(sizes.get, module.frees))
        weight = [key for key in module.keeps if gate.begin < points[key]]
        assert len(weight) == 2, "its outputs, which are saved by what uses them"
    assert set(norm.frees) < set(found[ModuleKey(0, 0, 2, "layer")].frees)


def test_its_time_is_not_counted(sim):
    trace = Routed(2).step(new_manager(sim), record=True).trace
    found = {module.key: module for module in trace.modules}
    mlp, gate = found[ModuleKey(0, 0, 2, "mlp")], found[ModuleKey(0, 0, 2, "mlp.gate")]
    spent = [trace.points[m.end].time_ms - trace.points[m.begin].time_ms for m in (mlp, gate)]
    assert 0.0 < mlp.forward_ms <= spent[0] - spent[1] + 1e-9


def test_predicted_peak_is_measured(sim):
    model, manager = Routed(8), new_manager(sim)
    trace = model.step(manager, record=True).trace
    trace.has_optimizer_state = True
    for names in (("mlp",), ("layer",), ("norm", "mlp")):
        plan = plan_of(trace, *names, layers=range(1, 9))
        again = model.step(manager, plan, record=True).trace
        predicted, measured = simulate(trace, plan), max(point.peak_bytes for point in again.points)
        assert 0.99 * measured <= predicted.peak <= 1.05 * measured, names
        assert {m.record.key: m.freed_bytes for m in modules_of(again)} == {
            m.record.key: m.freed_bytes for m in modules_of(trace)
        }


def test_all_verbs_within_a_budget(sim):
    model = Routed(12)
    for _ in assert_right_within_budgets(model, sim, (0.8, 0.5, 0.2, 0.05)):
        assert model.gates == 12


def test_what_is_given_to_nobody_else_comes_back(sim):
    """Only the gate saves its input; and it hands on a view of it, which the mlp saves."""

    class HandsOn(Routed):
        def gate(self, hidden):
            self.gates += 1
            self.inner += 1
            return hidden.sigmoid().square(), hidden.view(-1, WIDTH)

        def mlp(self, hidden, *, up, down):
            self.calls += 1
            weight, same = self.call("mlp.gate", self.gate, hidden * 2.0)
            return (self.call("mlp.act", torch.nn.functional.gelu, (weight * same) @ up)) @ down

    test_it_runs_once_and_nothing_of_the_result_changes(sim, ("mlp",), 0.0, HandsOn)
    test_it_runs_once_and_nothing_of_the_result_changes(sim, ("layer",), 0.0, HandsOn)


def test_a_retained_graph_runs_it_again_without_it(sim):
    model, manager = Routed(), new_manager(sim)
    plan = plan_of(model.step(manager, record=True).trace, "mlp")
    plain = model.step(None)
    model.manager, model.gates = manager, 0
    manager.begin_step(plan)
    with manager.forward(0):
        loss = model(manager.layer)
    for _ in range(2):
        grads = torch.autograd.grad(loss, model.leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(grads, plain.grads, strict=True))
    assert model.gates == LAYERS
    del loss
    manager.end_step()
    assert_nothing_left(manager)


class One:
    """One layer, which is ``body`` with its modules; those named ``once`` must not run twice."""

    def __init__(self, body):
        random = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=random) / 5)
        self.inputs = torch.randn(TOKENS, WIDTH, generator=random)
        self.body, self.manager = body, None

    def call(self, name, function, *args):
        if self.manager is None:
            return function(*args)
        return self.manager.calls.call(name, function, args, {}, once=name.startswith("once"))

    def __call__(self, layer):
        with layer(1):
            return self.body(self.call, self.inputs @ self.weight).square().mean()

    def step(self, manager, plan=None, record=False):
        self.manager = manager
        return run_step(self, [self.weight], manager, plan, record=record)


def candidates(body, sim):
    """{name: frees of it} as a recorded step tells them."""
    trace = One(body).step(new_manager(sim), record=True).trace
    return {module.record.key.name: module.record.frees for module in modules_of(trace)}


def assert_right(body, sim, *names):
    """Planned, they give up what the recorded step told, the bits are the same, and nothing is left."""
    model, manager = One(body), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    found = [module.record for module in modules_of(trace) if module.record.key.name in names]
    assert len(found) == len(names)
    plan = Plan(trace.model, 0, (), tuple(Recompute(record.key, 1, 0.0) for record in found))
    for record in (False, True):
        assert_same(model.step(manager, plan, record=record), plain)
    model.manager = manager
    held_bytes = []
    for light in (False, True):  # in a light step few are in the books, and no more is held
        manager.begin_step(plan, light=light)
        with manager.forward(0):
            loss = model(manager.layer)
        manager.drain()
        gc.collect()
        held_bytes.append(device.memory_allocated())
        dropped = [saved.key for saved in manager.live.by_serial.values() if saved.state is State.DROPPED]
        assert light or sorted(dropped) == sorted(key for record in found for key in record.frees)
        del loss
        manager.end_step()
        assert_nothing_left(manager)
    assert held_bytes[0] == held_bytes[1]


@pytest.mark.parametrize("use", [torch.sin, lambda gave: gave], ids=["saved", "saved by nobody"])
def test_what_it_gave_is_given_on(sim, use):
    def body(call, hidden):
        def outer(hidden):
            return gelu(hidden * 1.5), call("once", lambda x: x * 0.5 + 1, hidden)

        made, gave = call("outer", outer, hidden)
        return made + use(gave)

    assert_right(body, sim, "outer")


@pytest.mark.parametrize("name", ["once", "inner"])
def test_what_was_saved_in_vain_and_is_saved_again(sim, name):
    """By an operator inside of which nobody wants anything in the end; then outside."""

    def body(call, hidden):
        def inner(x):
            made = x * 0.5 + 1
            return made, torch.sin(made)

        def outer(hidden):
            made, (gave, _) = gelu(hidden * 1.5), call(name, inner, hidden)
            return made, gave

        made, gave = call("outer", outer, hidden)
        return made * torch.sin(gave)

    assert_right(body, sim, "outer")


def test_what_changes_its_input_is_left_out_of_nothing(sim):
    def body(call, hidden):
        def once(x):
            x.add_(1.0)
            return x.sum(1, keepdim=True)

        def outer(hidden):
            scaled = hidden * 1.5
            gave = call("once", once, scaled)
            return gelu(scaled) + gave

        return call("outer", outer, hidden)

    assert candidates(body, sim) == {}


@pytest.mark.parametrize("make", [lambda x: x * 0.5 + 1, lambda x: x.sum(1, keepdim=True)], ids=["large", "small"])
def test_what_it_gave_and_is_changed_in_place_is_made_again_by_nobody(sim, make):
    """As the routing map that is padded for quantized experts."""

    def body(call, hidden):
        def outer(hidden):
            gave = call("once", make, hidden)
            gave.mul_(3.0)
            return gelu(hidden * 1.5) + gave

        return call("outer", outer, hidden)

    assert candidates(body, sim) == {}
    model = One(body)
    assert_same(model.step(new_manager(sim), Plan("test", 0)), model.step(None))


def test_a_module_that_changes_its_input_has_nothing_pointwise_around_it(sim):
    def body(call, hidden):
        def inner(x):
            x.add_(1.0)
            return torch.sigmoid(x)

        def outer(hidden):
            scaled = hidden * 1.5
            gave = call("inner", inner, scaled)
            return gelu(scaled) * gave

        return call("outer", outer, hidden)

    assert set(candidates(body, sim)) == {"outer"}
    assert_right(body, sim, "outer")


def test_what_was_saved_before_and_is_given_back_stays(sim):
    def body(call, hidden):
        def outer(hidden):
            scaled = hidden * 1.5
            before = gelu(scaled)
            same, total = call("once", lambda x: (x, x.sigmoid().sum(1, keepdim=True)), scaled)
            return before * total + torch.tanh(same)

        return call("outer", outer, hidden)

    assert_right(body, sim, "outer")


def test_one_within_a_module_within_one(sim):
    def body(call, hidden):
        def once(x):
            return torch.sigmoid(torch.tanh(torch.sigmoid(x * 1.5)) * 0.5)

        def outer(x):
            return torch.tanh(torch.exp(call("once", once, torch.sin(x * 0.3))))

        return call("once.top", lambda x: call("outer", outer, x) * 2.0, hidden)

    assert_right(body, sim, "outer")


@pytest.mark.parametrize("name", ["outer", "outer.pointwise"])
def test_what_it_saves_without_being_given_it(sim, name):
    def body(call, hidden):
        def outer(hidden):
            seen = torch.sin(hidden)
            gave = call("mid", lambda x: call("once", lambda: x.sigmoid() * x + torch.cos(x)), seen)
            return torch.tanh(gave * torch.exp(seen))

        return call("outer", outer, hidden)

    assert_right(body, sim, name)


def test_one_that_raises_is_not_running_any_more_and_never_runs_again(sim):
    runs = []

    def body(call, hidden):
        def once(x):
            runs.append(x.shape)
            if len(runs) % 2:
                raise ValueError
            return x * 2

        def outer(hidden):
            try:
                gave = call("once", once, hidden)
            except ValueError:
                gave = call("once", once, hidden)
            return gelu(gelu(hidden * 1.5) * gave)

        return call("outer", outer, hidden)

    model, manager = One(body), new_manager(sim)
    trace = model.step(manager, record=True).trace
    (outer,) = [module.record for module in modules_of(trace) if module.record.key.name == "outer"]
    assert sorted(key.ordinal for key in outer.frees) == [1, 3, 4, 5], "with the sum outside"
    assert [key.ordinal for key in outer.keeps] == [2], "what it gave"
    plan = Plan(trace.model, 0, (), (Recompute(outer.key, 1, 0.0),))
    with pytest.raises(RuntimeError, match="its forward did other things"):
        model.step(manager, plan)
    assert len(runs) == 4


def test_two_views_of_what_a_module_made_are_one(sim):
    def body(call, hidden):
        def outer(hidden):
            first, second = call("two", lambda x: gelu(x * 1.5).chunk(2, 1), hidden)
            return torch.sin(first) * torch.sin(second)

        return call("outer", outer, hidden)

    assert all(len(set(frees)) == len(frees) for frees in candidates(body, sim).values())
    assert_right(body, sim, "two")
    trace = One(body).step(new_manager(sim), record=True).trace
    chosen = Chosen(modules_of(trace))
    for _ in range(2):
        for m in range(len(chosen.modules)):
            chosen.add(m)
    assert len(chosen.members()) == 1
