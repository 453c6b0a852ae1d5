"""What a module computes between the modules inside it, recomputed without running any of these again."""
from __future__ import annotations

import gc

import pytest
import torch
from swapping import Outcome, assert_nothing_left, assert_same, new_manager, run_step

from mindspeed_swap.core.plan import Plan, Recompute, Swap
from mindspeed_swap.core.recompute import modules_of
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import ALL_VERBS, solve
from mindspeed_swap.core.trace import ModuleKey, pointwise_of

pytestmark = pytest.mark.usefixtures("light_or_not")

WIDTH, TOKENS, LAYERS = 32, 1024, 4
HIDDEN, WIDE = TOKENS * WIDTH * 4, TOKENS * WIDTH * 4 * 4


class Gated:
    """Layers of a gated mlp whose two products are modules, with dropout in and behind the first of them."""

    def __init__(self, drop: float = 0.0, layers: int = LAYERS) -> None:
        random = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return torch.nn.Parameter(torch.randn(*shape, generator=random) / 5)

        self.weights = [(parameter(WIDTH, 8 * WIDTH), parameter(4 * WIDTH, WIDTH)) for _ in range(layers)]
        self.inputs = torch.randn(TOKENS, WIDTH, generator=random)
        self.drop = drop
        self.ran: list[str] = []
        self.manager = None

    @property
    def leaves(self):
        return [weight for pair in self.weights for weight in pair]

    def call(self, name, function, *args):
        return self.manager.calls.call(name, function, args, {}) if self.manager else function(*args)

    def up(self, hidden, weight):
        self.ran.append("up")
        return torch.nn.functional.dropout(hidden @ weight, self.drop), None  # as Megatron's: with a bias apart

    def down(self, hidden, weight):
        self.ran.append("down")
        return hidden @ weight

    def mlp(self, hidden, up, down):
        both, bias = self.call("mlp.up", self.up, hidden, up)
        assert bias is None
        gate, value = both.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * (value + 0.5)
        return self.call("mlp.down", self.down, torch.nn.functional.dropout(hidden, self.drop), down)

    def __call__(self, layer):
        torch.manual_seed(7)
        hidden = self.inputs
        for number, (up, down) in enumerate(self.weights, 1):
            with layer(number):
                hidden = hidden + self.call("mlp", self.mlp, hidden, up, down)
        return hidden.square().mean()

    def step(self, manager, plan: Plan | None = None, record: bool = False) -> Outcome:
        self.manager = manager
        self.ran.clear()
        return run_step(self, self.leaves, manager, plan, record=record)


def part_of(layer: int) -> ModuleKey:
    return pointwise_of(ModuleKey(0, 0, layer, "mlp"))


def chosen(trace, name="mlp.pointwise"):
    modules = [m for m in modules_of(trace) if m.record.key.name == name]
    return tuple(Recompute(m.record.key, m.freed_bytes, m.record.forward_ms) for m in modules)


def test_what_it_frees_and_what_it_is_run_from(sim):
    trace = Gated().step(new_manager(sim), record=True).trace
    sizes = {record.key: record.nbytes for record in trace.saved}
    found = {module.key: module for module in trace.modules}[part_of(2)]
    # silu's output, the other half with its offset, and what the second product is given; run from the first product's.
    assert [sizes[key] for key in found.frees] == [WIDE, WIDE, WIDE]
    assert sorted(sizes[key] for key in found.keeps) == [HIDDEN, 2 * WIDE]
    whole = {module.key: module for module in trace.modules}[ModuleKey(0, 0, 2, "mlp")]
    assert found.forward_ms < whole.forward_ms


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("record", [False, True])
def test_same_bits_and_no_product_again(sim, drop, record):
    model, manager = Gated(drop), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    plan = Plan(trace.model, 0, (), chosen(trace))
    assert len(plan.recomputes) == LAYERS
    outcome = model.step(manager, plan, record=record)
    assert_same(outcome, plain)
    assert model.ran == ["up", "down"] * LAYERS
    assert outcome.stats.recomputed_calls == LAYERS
    assert outcome.peak_bytes < plain.peak_bytes - 2 * LAYERS * WIDE
    assert_nothing_left(manager)


@pytest.mark.parametrize("product_too", [False, True])
def test_predicted_peak_is_measured(sim, product_too):
    """``product_too``: what it is run from has to be made again first."""
    model, manager = Gated(layers=8), new_manager(sim)
    trace = model.step(manager, record=True).trace
    trace.has_optimizer_state = True
    plan = Plan(trace.model, 0, (), (*chosen(trace), *(chosen(trace, "mlp.up") if product_too else ())))
    measured = model.step(manager, plan).peak_bytes
    assert max(simulate(trace, plan).curve) == pytest.approx(measured, rel=0.02)


def test_what_it_is_run_from_may_be_on_the_host(sim):
    model, manager = Gated(), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    kept = {key for module in trace.modules if module.key.name == "mlp.pointwise" for key in module.keeps}
    swaps = []
    for record in trace.saved:
        if record.key in kept and record.key.layer < LAYERS and record.sole is not None:
            out, back = max(record.sole, record.last_use) + 1, record.first_read - 8
            swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    outcome = model.step(manager, Plan(trace.model, 0, tuple(swaps), chosen(trace)))
    assert_same(outcome, plain)
    assert outcome.stats.offloaded_bytes >= 2 * WIDE * (LAYERS - 1)


def test_a_module_inside_may_be_recomputed_too(sim):
    """Its own dropout and what it saves are its own affair."""
    model, manager = Gated(0.3), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    plan = Plan(trace.model, 0, (), (*chosen(trace), *chosen(trace, "mlp.up")))
    assert_same(model.step(manager, plan), plain)
    assert_nothing_left(manager)


def test_one_inside_another(sim):
    """What a module is given by the outer one, and saves when the inner one is over, is recomputed all the same."""

    class Nested(Gated):
        def block(self, hidden, up, down):
            normed = self.call("block.norm", torch.nn.functional.layer_norm, hidden, (WIDTH,))
            return self.call("block.mlp", self.mlp, normed * normed + 2.0, hidden, up, down)

        def mlp(self, scaled, hidden, up, down):
            both = self.call("block.mlp.up", self.gated, hidden, up)
            return self.call("block.mlp.down", self.down, both, down) * scaled

        def gated(self, hidden, up):
            both, _ = self.call("block.mlp.up.linear", self.up, hidden, up)
            gate, value = both.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * (value + 0.5)

        def __call__(self, layer):
            hidden = self.inputs
            for number, (up, down) in enumerate(self.weights, 1):
                with layer(number):
                    hidden = hidden + self.call("block", self.block, hidden, up, down)
            return hidden.square().mean()

    model, manager = Nested(layers=8), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    trace.has_optimizer_state = True
    both = (*chosen(trace, "block.pointwise"), *chosen(trace, "block.mlp.up.pointwise"))
    assert len(both) == 2 * 8 - 1  # the first layer's normed input has no gradient
    plan = Plan(trace.model, 0, (), both)
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert max(simulate(trace, plan).curve) == pytest.approx(outcome.peak_bytes, rel=0.02)


def test_an_output_that_nobody_saves_is_not_kept_for_it(sim):
    """Running it again from there would take more memory than it frees."""

    class Scaled(Gated):
        def mlp(self, hidden, up, down):
            both, _ = self.call("mlp.up", self.up, hidden, up)
            gate = torch.sigmoid(both.sum(dim=-1, keepdim=True))  # saves what it gives, not what it gets
            return self.call("mlp.down", self.down, gate.expand(-1, 4 * WIDTH) * 1.0, down)

    trace = Scaled().step(new_manager(sim), record=True).trace
    assert part_of(2) not in {module.key for module in trace.modules}


def test_the_planner_takes_it_where_a_product_again_would_cost_more(sim):
    trace = Gated(layers=8).step(new_manager(sim), record=True).trace
    trace.has_optimizer_state = True
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = 1.0  # no swap
    for module in trace.modules:
        module.forward_ms = {"mlp": 10.0, "mlp.pointwise": 1.0}.get(module.key.name, 9.0)
    peak = max(point.peak_bytes for point in trace.points)
    plan = solve(trace, int(0.85 * peak), ALL_VERBS)
    assert {recompute.key.name for recompute in plan.recomputes} == {"mlp.pointwise"}


def test_a_module_inside_that_returns_what_it_was_given_makes_no_circle(sim):
    """As an IdentityOp does. Without a backward what the call keeps goes with the graph, not with the next garbage
    collection."""
    weight, inputs, manager = torch.nn.Parameter(torch.randn(64, 64) / 8), torch.randn(64, 64), None

    def call(name, function, *args):
        return manager.calls.call(name, function, args, {}) if manager else function(*args)

    def outer(hidden):
        return torch.exp(0.1 * call("inner", lambda given: given, torch.exp(hidden)))

    def body(layer):
        with layer(1):
            return call("outer", outer, inputs @ weight).square().mean()

    plain, manager = run_step(body, [weight]), new_manager(sim)
    plan = Plan("test", 0, (), (Recompute(pointwise_of(ModuleKey(0, 0, 1, "outer")), 1, 0.0),))
    outcome = run_step(body, [weight], manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.recomputed_calls == 1
    assert_nothing_left(manager)
    gc.disable()
    try:
        manager.begin_step(plan)
        with manager.forward(0):
            loss = body(manager.layer)
        del loss
        manager.begin_step()
        assert not any(manager.bytes_in.values())
    finally:
        gc.enable()
