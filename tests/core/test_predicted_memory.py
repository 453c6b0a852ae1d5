"""What is predicted of a step under a plan is what the allocator measures, in every interval: random nets of calls
within calls, recomputed by name or as the planner decides, with swaps beside."""
from __future__ import annotations

import random

import pytest
import torch
from swapping import assert_same, new_manager, run_step
from torch.nn import functional

from mindspeed_swap.core.plan import Plan, Recompute
from mindspeed_swap.core.recompute import Chosen, modules_of
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import ALL_VERBS, floor, solve

WIDTH, TOKENS = 32, 64
# The state of the CPU's generator, which the simulated device counts while a module runs again; no GPU does.
NOISE_BYTES = torch.get_rng_state().nbytes


class Net:
    """``layers`` alike, each a random tree of calls and operators."""

    def __init__(self, seed: int, layers: int) -> None:
        self._random, values = random.Random(seed), torch.Generator().manual_seed(seed)

        def parameters(*shape):
            return [torch.nn.Parameter(torch.randn(*shape, generator=values) / 5) for _ in range(layers)]

        self.square, self.up, self.down = parameters(WIDTH, WIDTH), parameters(WIDTH, 128), parameters(128, WIDTH)
        self.inputs = torch.randn(TOKENS, WIDTH, generator=values)
        self.tree, self.manager = self._tree(2), None

    @property
    def leaves(self):
        return [*self.square, *self.up, *self.down]

    def _tree(self, depth: int):
        """Of names of operators, and of trees, which are calls."""
        calls = [self._random.random() < 0.45 and depth > 0 for _ in range(self._random.randint(2, 4))]
        return [self._tree(depth - 1) if call else self._random.choice(sorted(OPERATORS)) for call in calls]

    def _run(self, tree, x, layer, prefix):
        for number, one in enumerate(tree):
            if isinstance(one, str):
                x = OPERATORS[one](x, self.square[layer], self.up[layer], self.down[layer])
            else:
                name = f"{prefix}m{number}"
                x = self._call(name, lambda y, one=one, name=name: self._run(one, y, layer, f"{name}."), x)
        return x

    def _call(self, name, function, *args, **options):
        return self.manager.calls.call(name, function, args, {}, **options) if self.manager else function(*args)

    def _layer(self, x, number):
        return self._run(self.tree, x @ self.square[number], number, "")

    def __call__(self, layer):
        torch.manual_seed(7)
        x = self.inputs
        for number in range(len(self.square)):
            with layer(number + 1):
                x = self._call("layer", self._layer, x, number, **({"keeps_outputs": True} if self.manager else {}))
        return x.square().mean()

    def step(self, manager, plan=None, record=False):
        self.manager = manager
        return run_step(self, self.leaves, manager, plan, record=record)


def _gated(gate, value):
    return torch.cat((functional.silu(gate) * value, value), -1)


OPERATORS = {
    "product": lambda x, square, up, down: x @ square,
    "wide": lambda x, square, up, down: functional.silu(x @ up) @ down,
    "gelu": lambda x, *_: functional.gelu(x),
    "sigmoid": lambda x, *_: torch.sigmoid(x * 0.5),  # saves what it gives, and nobody what it is given
    "dropout": lambda x, *_: functional.dropout(x, 0.2),
    "norm": lambda x, *_: functional.layer_norm(x, (WIDTH,)),
    "scale": lambda x, *_: x * 0.9,
    "residual": lambda x, *_: x + torch.tanh(x),
    "attention": lambda x, *_: ((x @ x.t()) / 8).softmax(-1) @ x,
    "gated": lambda x, *_: _gated(*x.chunk(2, -1)),
    "working": lambda x, *_: (x.repeat(1, 8) * 0.5).sigmoid().reshape(TOKENS, 8, WIDTH).mean(1),
}


def by_name(trace, names) -> Plan:
    """Recomputes all calls of these names, but those that conflict with an earlier one."""
    modules = modules_of(trace)
    chosen = Chosen(modules)
    for m, module in enumerate(modules):
        if module.record.key.name in names and not chosen.conflicts(m):
            chosen.add(m)
    found = [Recompute(m.record.key, m.freed_bytes, m.record.forward_ms) for m in chosen.members()]
    return Plan(trace.model, 0, (), tuple(found))


def check(model, manager, trace, plan, plain, most_over=1.03, most_over_again=1.15) -> None:
    outcome = model.step(manager, plan, record=True)
    assert_same(outcome, plain)
    assert outcome.stats.on_demand_loads == outcome.stats.evictions == 0
    predicted, measured = simulate(trace, plan).curve, [point.peak_bytes for point in outcome.trace.points]
    short = [(i, b - a) for i, (a, b) in enumerate(zip(predicted, measured, strict=True)) if a < b - NOISE_BYTES]
    assert not short
    assert max(predicted) <= most_over * max(measured)
    # The trace of that step tells nearly the same peaks, of the plan and without it: not too low ones, but what is held
    # by a call only, or twice, is so without the plan, too.
    sizes = {module.record.key: module.freed_bytes for module in modules_of(outcome.trace)}
    recorded = max(point.peak_bytes for point in trace.points)
    for one, peak in ((plan, max(measured)), (Plan(trace.model, 0, ()), recorded)):
        if all(sizes.get(again.key) == again.nbytes for again in one.recomputes):
            assert peak - NOISE_BYTES <= simulate(outcome.trace, one).peak <= most_over_again * peak


@pytest.mark.parametrize("seed", range(12))
def test_recomputed_by_name(sim, seed):
    model, manager = Net(seed, 4), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    names = sorted({module.record.key.name for module in modules_of(trace)})
    pairs = [random.Random(seed + n).sample(names, 2) for n in range(2)] if len(names) > 1 else []
    for chosen in [*([name] for name in names), *pairs]:
        check(model, manager, trace, by_name(trace, chosen), plain)


@pytest.mark.parametrize("seed", range(8))
def test_as_the_planner_decides(sim, seed):
    model, manager = Net(seed, 6), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    trace.has_optimizer_state = True
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = sum(r.nbytes for r in trace.saved) / (2 * trace.step_ms)
    low, high = floor(trace, ALL_VERBS).reachable_bytes, max(point.peak_bytes for point in trace.points)
    for share in (0.7, 0.4, 0.15, 0.02):
        plan = solve(trace, int(low + share * (high - low)), ALL_VERBS)
        assert plan.recomputes or plan.swaps
        check(model, manager, trace, plan, plain)


def test_what_is_released_where_a_module_runs_again_makes_room_for_it(sim):
    """Its release comes first, then the forward."""
    model, manager = Net(1, 6), new_manager(sim)
    trace = model.step(manager, record=True).trace
    plan = by_name(trace, ["layer"])
    runs = {module.run for module in modules_of(trace) if module.record.key.name == "layer"}
    order = []
    act, run_again = manager.act, manager.calls.run_again
    manager.act = lambda position: (order.append(position), act(position))[1]
    manager.calls.run_again = lambda call, wanted: (order.append(call.key), run_again(call, wanted))[1]
    model.step(manager, plan, record=True)  # without swaps nobody else wants to know of positions
    for run in runs:
        at = order.index(trace.points[run].position)
        assert order[at + 1].name == "layer"


class Special:
    """One layer, of which ``body`` is the forward."""

    def __init__(self, body) -> None:
        values = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=values) / 5)
        self.inputs = torch.randn(2048, WIDTH, generator=values)
        self.body, self.manager = body, None

    def call(self, name, function, *args, **options):
        return self.manager.calls.call(name, function, args, {}, **options)

    def step(self, manager, plan=None, record=False):
        self.manager = manager

        def forward(layer):
            with layer(1):
                return self.body(self, self.inputs @ self.weight).sum(1).sin().mean()

        return run_step(forward, [self.weight], manager, plan, record=record)


def check_special(sim, body, names, **most):
    model, manager = Special(body), new_manager(sim)
    plain = model.step(manager)
    trace = model.step(manager, record=True).trace
    plan = by_name(trace, names)
    assert len(plan.recomputes) == len(names)
    check(model, manager, trace, plan, plain, **{"most_over": 1.01} | most)


def test_an_input_that_others_have_read_before_is_kept_by_the_call(sim):
    def body(model, x):
        y = model.call("gate", lambda t: torch.sigmoid(t * 0.5).exp(), x)
        z = (y.sum(1, keepdim=True).expand(-1, 64) * 1.0).square()  # its backward is the peak
        return z.mean(1, keepdim=True) * x

    check_special(sim, body, ["gate"])


def test_what_others_hold_is_there_twice_once_it_has_been_made_again(sim):
    held = []

    def body(model, x):
        held.clear()  # of the step before

        def function(t, weight):
            made = torch.sigmoid(t @ weight)
            if model.manager.scope is not None:  # in forward
                held[:] = [made.detach()]
            return torch.tanh(made).exp().exp()

        return model.call("f", function, x, model.weight)

    check_special(sim, body, ["f"])
    held.clear()


def test_inputs_that_nobody_has_saved_yet_are_no_saved_tensors(sim):
    def function(t, weight):
        with torch.no_grad():
            scale = (t.repeat(1, 16) * 1.0).abs().max()  # works before t is saved
        return torch.tanh(t / scale @ weight)

    check_special(sim, lambda model, x: model.call("f", function, x, model.weight) + 1.0, ["f"])


def test_a_pointwise_part_waits_in_its_middle_for_what_it_is_run_from(sim):
    def wide(t):
        return t.repeat(1, 16) * 1.0

    def outer(model, t):
        mine = wide(t)  # there while the inner one runs
        made = model.call("outer.inner", lambda u: torch.sigmoid(wide(u).reshape(-1, 16, WIDTH).sum(1)), t)
        return torch.tanh(made * made) + mine.reshape(-1, 16, WIDTH).sum(1)

    def body(model, x):
        return model.call("outer", outer, model, x, keeps_outputs=True)

    check_special(sim, body, ["outer.pointwise", "outer.inner"], most_over=1.5, most_over_again=1.5)
