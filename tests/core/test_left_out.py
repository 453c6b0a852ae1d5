"""A module that must not run twice (a router counts what goes through it) inside calls that run again: it is left out,
and gives what it gave the first time."""
from __future__ import annotations

import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager
from test_again import LAYERS, TOKENS, WIDTH, Blocks, plan_of

from mindspeed_swap.core.recompute import modules_of
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import ALL_VERBS, floor, solve
from mindspeed_swap.core.trace import ModuleKey

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
    model, manager = Routed(12), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = sum(r.nbytes for r in trace.saved) / (20 * trace.step_ms)
    least = floor(trace, ALL_VERBS).reachable_bytes
    peak = max(point.peak_bytes for point in trace.points)
    for share in (0.8, 0.5, 0.2, 0.05):
        plan = solve(trace, int(least + share * (peak - least)), ALL_VERBS)
        outcome = model.step(manager, plan, record=True)
        assert_same(outcome, plain)
        assert model.gates == 12
        assert max(point.peak_bytes for point in outcome.trace.points) <= plan.budget_bytes * 1.02
        assert outcome.stats.on_demand_loads == 0
    assert plan.recomputes
    assert_nothing_left(manager)


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
