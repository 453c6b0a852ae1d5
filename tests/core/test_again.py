"""Module calls that are recomputed: what they free, when they run again, and that nothing of the result changes."""
from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from swapping import Outcome, assert_nothing_left, assert_same, new_manager, run_step
from torch.utils._pytree import tree_flatten

from mindspeed_swap.core import step
from mindspeed_swap.core.again import RandomState, tensors
from mindspeed_swap.core.plan import Plan, Recompute, Swap
from mindspeed_swap.core.recompute import modules_of
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import ALL_VERBS, floor, solve
from mindspeed_swap.core.trace import BACKWARD, MODULE_BORDER, POINTWISE, ModuleKey, StepTrace

pytestmark = pytest.mark.usefixtures("light_or_not")

WIDTH, TOKENS, LAYERS = 32, 1024, 4


class Blocks:
    """Layers of norm and mlp with a residual; ``drop`` is dropout, ``calls`` counts forwards of the mlp."""

    def __init__(self, layers: int = LAYERS, drop: float = 0.0) -> None:
        random = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return torch.nn.Parameter(torch.randn(*shape, generator=random) / 5)

        self.weights = [(parameter(WIDTH, 4 * WIDTH), parameter(4 * WIDTH, WIDTH)) for _ in range(layers)]
        self.inputs = torch.randn(TOKENS, WIDTH, generator=random)
        self.drop, self.calls, self.products = drop, 0, 0
        self.manager = None

    @property
    def leaves(self):
        return [weight for pair in self.weights for weight in pair]

    def call(self, name, function, *args, **kwargs):
        if self.manager is None:
            return function(*args, **kwargs)
        return self.manager.calls.call(name, function, args, kwargs, keeps_outputs=name == "layer")

    def norm(self, hidden):
        return torch.nn.functional.layer_norm(hidden, (WIDTH,))

    def mlp(self, hidden, *, up, down):
        self.calls += 1
        hidden = self.call("mlp.act", torch.nn.functional.gelu, hidden @ up)
        hidden = torch.nn.functional.dropout(hidden, self.drop)
        self.products += 1
        return hidden @ down

    def block(self, hidden, up, down):
        normed = self.call("norm", self.norm, hidden)
        return hidden + self.call("mlp", self.mlp, normed, up=up, down=down)

    def __call__(self, layer):
        torch.manual_seed(7)
        hidden = self.inputs
        for number, (up, down) in enumerate(self.weights, 1):
            with layer(number):
                hidden = self.call("layer", self.block, hidden, up, down)
        return hidden.square().mean()

    def step(self, manager, plan: Plan | None = None, record: bool = False) -> Outcome:
        self.manager, self.calls, self.products = manager, 0, 0
        return run_step(self, self.leaves, manager, plan, record=record)


def plan_of(trace: StepTrace, *names: str, layers=range(1, LAYERS + 1)) -> Plan:
    chosen = [m for m in modules_of(trace) if m.record.key.name in names and m.record.key.layer in layers]
    assert chosen
    return Plan(trace.model, 0, (), tuple(Recompute(m.record.key, m.freed_bytes, m.record.forward_ms) for m in chosen))


def test_calls_are_recorded(sim):
    model, manager = Blocks(2), new_manager(sim)
    trace = model.step(manager, record=True).trace
    found = {module.key: module for module in trace.modules}
    # The norm frees its own saves and what the product saves of its output; the act what the second product saves.
    assert {key.name for key in found} == {"layer", "norm", "mlp", "mlp.act"}
    hidden, wide, rows = TOKENS * WIDTH * 4, TOKENS * WIDTH * 4 * 4, TOKENS * 4
    sizes = {record.key: record.nbytes for record in trace.saved}

    def freed(name: str) -> list[int]:
        return sorted(sizes[key] for key in found[ModuleKey(0, 0, 2, name)].frees)

    def kept(name: str) -> list[int]:
        return sorted(sizes[key] for key in found[ModuleKey(0, 0, 2, name)].keeps)

    assert freed("norm") == [rows, rows, hidden] and kept("norm") == [hidden]
    assert freed("mlp") == [wide, wide] and kept("mlp") == [hidden]
    assert freed("mlp.act") == [wide] and kept("mlp.act") == [wide]
    assert freed("layer") == [rows, rows, hidden, wide, wide] and kept("layer") == [hidden]
    round_trip = StepTrace.from_json(trace.to_json())
    assert round_trip.modules == trace.modules


@pytest.mark.parametrize("names", [("layer",), ("mlp",), ("norm",), ("mlp.act",), ("norm", "mlp.act"), ("norm", "mlp")])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_equal_and_smaller(sim, names, drop):
    model, manager = Blocks(drop=drop), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    if drop and "mlp.act" in names:
        names = tuple(name for name in names if name != "mlp.act") or ("mlp",)  # nobody saves what the dropout gets
    plan = plan_of(trace, *names)
    for record in (False, True, False):
        outcome = model.step(manager, plan, record=record)
        assert_same(outcome, plain)
        assert outcome.stats.recomputed_calls == len(plan.recomputes)
    if record_peak := {"layer": 0.6, "mlp": 0.75}.get(names[0]):
        assert outcome.peak_bytes < record_peak * plain.peak_bytes
    assert outcome.peak_bytes < plain.peak_bytes
    assert_nothing_left(manager)


def test_predicted_peak_is_measured(sim):
    model, manager = Blocks(8), new_manager(sim)
    trace = model.step(manager, record=True).trace
    trace.has_optimizer_state = True
    for names in (("mlp",), ("layer",), ("norm", "mlp.act"), ("norm", "mlp")):
        plan = plan_of(trace, *names, layers=range(1, 9))
        again = model.step(manager, plan, record=True).trace
        predicted, measured = simulate(trace, plan), max(point.peak_bytes for point in again.points)
        assert 0.99 * measured <= predicted.peak <= 1.05 * measured  # that it stops early is not counted on
        # The trace of that step tells the same of a step without recompute as the first one.
        assert {m.record.key: m.freed_bytes for m in modules_of(again)} == {
            m.record.key: m.freed_bytes for m in modules_of(trace)
        }
        assert 0.99 * measured <= simulate(again, plan).peak <= 1.05 * measured


def test_what_nobody_saves_is_kept_by_whom_it_is_given_to(sim):
    """As in the step that was recorded, where it is an input of the second module and nothing that the first frees."""

    class FromUnsaved(Blocks):
        def block(self, hidden, up, down):
            def user(made):
                made = made * 2.0
                for _ in range(6):
                    made = torch.nn.functional.silu(made) + 0.1
                return made

            def maker(hidden):
                return torch.nn.functional.gelu(hidden @ up) @ down

            return self.call("user", user, self.call("maker", maker, hidden))

    model, manager = FromUnsaved(8), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    assert all(module.input_bytes for module in trace.modules if module.key.name == "user")
    trace.has_optimizer_state = True
    plan = plan_of(trace, "maker", "user", layers=range(1, 9))
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert simulate(trace, plan).peak == pytest.approx(outcome.peak_bytes, rel=0.05)
    assert_nothing_left(manager)


def test_a_module_has_not_made_what_it_was_given(sim):
    class GivesBack(Blocks):
        def block(self, hidden, up, down):
            def through(x):
                return torch.nn.functional.gelu(x * 1.5) @ up, x

            made, given = self.call("through", through, hidden * 1.0)
            return hidden + made @ down + torch.nn.functional.silu(given)  # only now saved

    model, manager = GivesBack(), new_manager(sim)
    plain = model.step(None)
    plan = plan_of(model.step(manager, record=True).trace, "through")
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.recomputed_calls == LAYERS
    assert_nothing_left(manager)


def test_stops_when_all_is_there(sim):
    """The product behind what was saved last is not computed again: not run, and its time not counted."""

    class Linear(torch.autograd.Function):
        """As Megatron's: a Function that is stopped while it saves would leak."""

        @staticmethod
        def forward(ctx, hidden, weight):
            model.products += 1
            ctx.save_for_backward(hidden, weight)
            return hidden @ weight

        @staticmethod
        def backward(ctx, grad):
            hidden, weight = ctx.saved_tensors
            return grad @ weight.t(), hidden.t() @ grad

    class Linears(Blocks):
        def mlp(self, hidden, *, up, down):
            hidden = torch.nn.functional.gelu(self.call("mlp.fc1", Linear.apply, hidden, up))
            return self.call("mlp.fc2", Linear.apply, hidden, down)

    model, manager = Linears(), new_manager(sim)
    plain = model.step(None)
    for name in ("mlp", "layer"):
        trace = model.step(manager, record=True).trace
        plan = plan_of(trace, name)
        assert_same(model.step(manager, plan), plain)
        assert model.products == 2 * LAYERS + LAYERS
        found = {module.key: module for module in trace.modules}
        stops = found[ModuleKey(0, 0, 2, name)].begin, trace.points[found[ModuleKey(0, 0, 2, "mlp.fc1")].end]
        spent = found[ModuleKey(0, 0, 2, name)].forward_ms
        begins = trace.points[stops[0]].time_ms
        assert stops[1].time_ms <= begins + spent < trace.points[found[ModuleKey(0, 0, 2, name)].end].time_ms
        assert_nothing_left(manager)


def assert_right_within_budgets(model, sim, shares):
    """On a link so slow, beside what was measured, that recompute is worth it. ``shares``: of what can be had."""
    manager = new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = sum(r.nbytes for r in trace.saved) / (20 * trace.step_ms)
    least = floor(trace, ALL_VERBS).reachable_bytes
    peak = max(point.peak_bytes for point in trace.points)
    for share in shares:
        plan = solve(trace, int(least + share * (peak - least)), ALL_VERBS)
        outcome = model.step(manager, plan, record=True)
        assert_same(outcome, plain)
        assert outcome.trace is not None
        assert max(point.peak_bytes for point in outcome.trace.points) <= plan.budget_bytes * 1.02
        assert outcome.stats.on_demand_loads == 0
        yield
    assert plan.recomputes
    assert_nothing_left(manager)


def test_all_verbs_within_a_budget(sim):
    assert len(list(assert_right_within_budgets(Blocks(12), sim, (0.8, 0.5, 0.2, 0.02)))) == 4


def test_inputs_of_recomputed_layers_are_swapped(sim):
    """Full recompute and the swap of what it keeps add up."""
    model, manager = Blocks(12), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    again = plan_of(trace, "layer", layers=range(1, 13))
    kept = {key for module in trace.modules if module.key.name == "layer" for key in module.keeps}
    records = [record for record in trace.saved if record.key in kept and record.movable]
    swaps = []
    for record in records:
        run = min(m.run for m in modules_of(trace) if record.key in m.record.keeps and m.record.key.name == "layer")
        release = max(record.sole, record.last_use) + 1
        if release < run - 2:
            position = trace.points[run - 1].position
            swaps.append(Swap(record.key, record.nbytes, trace.points[release].position, position))
    plan = Plan(trace.model, 0, tuple(swaps), again.recomputes)
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.offloaded_bytes == plan.swap_bytes > 8 * TOKENS * WIDTH * 4
    assert outcome.peak_bytes < model.step(manager, again).peak_bytes
    assert_nothing_left(manager)


def test_random_state_is_put_back(sim):
    """After a recompute the generator goes on where it was."""
    model, manager = Blocks(drop=0.5), new_manager(sim)
    model.step(None)
    expected = torch.rand(4)
    plan = plan_of(model.step(manager, record=True).trace, "layer")
    model.step(manager, plan)
    assert torch.equal(torch.rand(4), expected)


def test_generators_of_a_framework(sim):
    class Counted(RandomState):
        gets = 0

        def get(self):
            Counted.gets += 1
            return super().get()

    model, manager = Blocks(), new_manager(sim)
    manager.calls.random = Counted()
    plan = plan_of(model.step(manager, record=True).trace, "mlp")
    model.step(manager, plan)
    assert Counted.gets == 2 * LAYERS  # at its forward, and what there is when it runs again


def test_a_forward_that_stops_leaves_no_attributes(sim):
    class Keeping(torch.nn.Module):
        held = "before"

        def forward(self, hidden, up, down):
            self.held = self.new = hidden * 2.0
            hidden = hidden + model.call("mlp", model.mlp, hidden, up=up, down=down)
            hidden = model.call("end", torch.add, hidden, 1.0)
            self.held = "after"
            del self.new
            return hidden

    model, manager, module = Blocks(1), new_manager(sim), Keeping()
    model.block = lambda *args: model.call("module", Keeping.forward, module, *args)
    plain = model.step(None)
    plan = plan_of(model.step(manager, record=True).trace, "module")
    assert_same(model.step(manager, plan), plain)
    assert module.held == "after" and not hasattr(module, "new")


def test_forward_that_is_not_the_same_again(sim):
    model, manager = Blocks(), new_manager(sim)
    plan = plan_of(model.step(manager, record=True).trace, "mlp")

    def mlp(hidden, *, up, down):
        return Blocks.mlp(model, hidden, up=up, down=down) if model.calls < LAYERS else hidden @ up @ down

    model.mlp = mlp
    with pytest.raises(RuntimeError, match=r"recompute of mlp \(layer 4, microbatch 0\): its forward did other things"):
        model.step(manager, plan)


def test_changed_in_place_is_refused_as_without(sim):
    class Changing(Blocks):
        def block(self, hidden, up, down):
            normed = self.call("norm", self.norm, hidden)
            after = hidden + self.call("mlp", self.mlp, normed, up=up, down=down)
            normed.add_(1.0)  # the product has saved it
            return after

    model, manager = Changing(), new_manager(sim)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.step(None)
    plan = plan_of(Blocks().step(new_manager(sim), record=True).trace, "norm")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.step(manager, plan)


def test_call_that_must_not_run_again_is_recorded_and_never_run(sim):
    class Once(Blocks):
        def call(self, name, function, *args, **kwargs):
            if self.manager is None:
                return function(*args, **kwargs)
            return self.manager.calls.call(name, function, args, kwargs, once=name == "mlp")

    model, manager = Once(2), new_manager(sim)
    trace = model.step(manager, record=True).trace
    calls = [module for module in trace.modules if module.key.name == "mlp"]
    assert len(calls) == 2 and all(call.frees == [] and call.keeps for call in calls)
    plan = Plan(trace.model, 0, (), tuple(Recompute(call.key, 0, 0.0) for call in calls))
    assert model.step(manager, plan).stats.recomputed_calls == 0
    assert model.calls == 2


def test_call_that_changes_its_input_is_no_candidate(sim):
    class Changing(Blocks):
        def norm(self, hidden):
            return super().norm(hidden)

        def mlp(self, hidden, *, up, down):
            return super().mlp(hidden.mul_(2.0), up=up, down=down)

    trace = Changing(2).step(new_manager(sim), record=True).trace
    assert "mlp" not in {module.key.name for module in trace.modules if module.frees}
    assert "layer" in {module.key.name for module in trace.modules}


def test_retained_graph_and_no_backward(sim):
    model, manager = Blocks(), new_manager(sim)
    plan = plan_of(model.step(manager, record=True).trace, "layer")
    plain = Blocks()
    expected = plain(_nothing)
    grads = [torch.autograd.grad(expected, plain.leaves, retain_graph=True) for _ in range(2)]
    model.manager = manager
    manager.begin_step(plan)
    with manager.forward(0):
        loss = model(manager.layer)
    for each in grads:
        found = torch.autograd.grad(loss, model.leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, each, strict=True))
    del loss
    manager.end_step()
    manager.begin_step(plan)
    with manager.forward(0):
        loss = model(manager.layer)
    del loss
    manager.end_step()
    assert_nothing_left(manager)


def _nothing(number):
    from contextlib import nullcontext

    return nullcontext()


Pair = namedtuple("Pair", "first second")


def test_tensors_come_in_the_order_of_tree_flatten():
    a, b, c, d, e, f, g = (torch.full((1,), float(n)) for n in range(7))
    for value in (
        a, None, 3, "x", (), [], {}, (a, [b, (c, {"z": d, "a": e})], "y", None), Pair(a, [b, 1]), deque([a, (b,)]),
        OrderedDict(z=a, a=[b]), defaultdict(list, {"k": [a, b], "c": c}), torch.Size([2]), object(),
        ((a, Pair({"q": b}, deque([c]))), {"r": OrderedDict(s=d), "p": torch.nn.Parameter(e)}, torch.nn.Linear(1, 1)),
        [f, g, f],
    ):  # fmt: skip
        expected = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        found = tensors(value)
        assert len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


def test_modules_that_nobody_asks_for_are_plain_calls(sim):
    """Neither recorded nor recomputed, and nothing of the plan happens at their borders: not even a name is given."""
    model, manager = Blocks(), new_manager(sim)
    trace = model.step(manager, record=True).trace
    named, points = [], []
    scope, at = step.Scope.next_call, manager.at
    manager.at = lambda position: (points.append(position), at(position))[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.Scope, "next_call", lambda self, name: (named.append(name), scope(self, name))[1])
        model.step(manager)
        assert not named and not any(position.ordinal < MODULE_BORDER for position in points)
        model.step(manager, plan_of(trace, "mlp"))
        assert set(named) == {"mlp", "mlp.act"}, "of what runs inside a module that runs again, all is known"
    assert not any(position.ordinal < MODULE_BORDER for position in points)


@pytest.mark.parametrize("end", ["release", "prefetch"])
def test_what_is_planned_for_the_border_of_a_module_happens_there(sim, end):
    model, manager = Blocks(), new_manager(sim)
    plain = model.step(manager)
    trace = model.step(manager, record=True).trace
    record = next(r for r in trace.saved if r.movable and r.key.layer == 1)
    borders = [p.position for p in trace.points if p.position.ordinal < MODULE_BORDER]
    reads = [p.position for p in trace.points if p.position.phase == BACKWARD and p.position.layer == 2]
    release = borders[-2] if end == "release" else trace.points[max(record.sole, record.last_use) + 1].position
    back = borders[-1] if end == "prefetch" else reads[0]
    outcome = model.step(manager, Plan(trace.model, 0, (Swap(record.key, record.nbytes, release, back),)))
    assert_same(outcome, plain)
    assert outcome.stats.offloaded_bytes == record.nbytes == outcome.stats.loaded_bytes
    assert outcome.stats.on_demand_loads == 0
    assert_nothing_left(manager)


def test_a_module_of_an_unhappy_name_is_found_again(sim):
    """That of a module, not of the part of one that lies between the modules inside."""
    model, manager = Blocks(), new_manager(sim)
    plain, call = model.step(None), manager.calls.call
    manager.calls.call = lambda name, *a, **k: call({"mlp": "conv.pointwise"}.get(name, name), *a, **k)
    plan = plan_of(model.step(manager, record=True).trace, "conv.pointwise")
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.recomputed_calls == len(plan.recomputes) == LAYERS


@pytest.mark.parametrize("planned", [None, "outer", "inner", f"outer{POINTWISE}"])
@pytest.mark.parametrize("kind", ["of inference mode", "sparse"])
def test_arguments_without_a_version_or_a_storage(sim, kind, planned):
    """As what an evaluation in inference mode left in a cache. Plain PyTorch takes them where nothing saves them."""
    with torch.inference_mode(kind == "of inference mode"):
        bias = torch.randn(TOKENS, WIDTH)
        bias = bias.to_sparse() if kind == "sparse" else bias
    weight, inputs = torch.nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(TOKENS, WIDTH)

    def call(name, function, *args):
        return manager.calls.call(name, function, args, {}) if manager else function(*args)

    def outer(hidden, bias):
        return torch.exp(call("inner", lambda hidden, bias: torch.tanh(hidden + bias), hidden, bias)) @ weight

    def body(layer):
        with layer(1):
            return call("outer", outer, inputs @ weight, bias).square().mean()

    manager = None
    plain = run_step(body, [weight])
    manager = new_manager(sim)
    plan = Plan("test", 0, (), (Recompute(ModuleKey(0, 0, 1, planned), 1, 0.0),)) if planned else None
    outcome = run_step(body, [weight], manager, plan, record=planned is None)
    assert_same(outcome, plain)
    assert outcome.stats.recomputed_calls == (planned is not None)
    assert_nothing_left(manager)


def test_autocast_is_that_of_all_devices_that_are_there(sim):
    """The first of the arguments may be elsewhere: what counts tokens of experts is on the host."""
    elsewhere, weight, manager = torch.empty(3, device="meta"), torch.nn.Parameter(torch.randn(WIDTH, WIDTH)), None
    inputs = torch.randn(TOKENS, WIDTH)

    def body(layer):
        arguments = elsewhere, inputs @ weight
        with layer(1), torch.autocast("cpu", torch.bfloat16):
            made = manager.calls.call("mod", mod, arguments, {}) if manager else mod(*arguments)
            return made.float().square().mean()

    def mod(_, hidden):
        return torch.exp(torch.tanh(hidden @ weight))

    plain, manager = run_step(body, [weight]), new_manager(sim)
    plan = Plan("test", 0, (), (Recompute(ModuleKey(0, 0, 1, "mod"), 1, 0.0),))
    outcome = run_step(body, [weight], manager, plan)
    assert_same(outcome, plain)
    assert outcome.stats.recomputed_calls == 1
