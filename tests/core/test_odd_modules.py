"""What users' modules do, too: under a plan from a recorded step it must be as it is without one, to the last bit."""
from __future__ import annotations

import dataclasses
import functools
import gc

import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager, run_step

from mindspeed_swap.core.plan import Plan, Recompute
from mindspeed_swap.core.recompute import modules_of

pytestmark = pytest.mark.usefixtures("light_or_not")

N, T = 32, 256


class Step:
    """``body(call, hidden)`` is one microbatch. ``forwards``: microbatches before the first backward."""

    def __init__(self, forwards=1):
        random = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(N, N, generator=random) / 5)
        self.up = torch.nn.Parameter(torch.randn(N, N, generator=random) / 5)
        self.inputs = torch.randn(T, N, generator=random)
        self.forwards, self.manager = forwards, None
        self.reset()

    leaves = property(lambda self: [self.weight, self.up])

    def reset(self):
        pass

    def state(self):
        return []

    def call(self, name, function, *args, **kwargs):
        if self.manager is None:
            return function(*args, **kwargs)
        return self.manager.calls.call(name, function, args, kwargs)

    def run(self, layer):
        with layer(1):
            return self.body(self.inputs @ self.weight).square().mean()

    def step(self, manager, plan=None, record=False):
        self.manager = manager
        self.reset()
        torch.manual_seed(3)
        how = {"microbatches": self.forwards, "forwards_first": True}
        return run_step(self.run, self.leaves, manager, plan, record=record, **how)


def check(model, sim, *names):
    """Planned is all of these names that may be."""
    manager = new_manager(sim)
    manager.movable.keep_on_device(model.leaves)
    plain = model.step(None)
    state = [x.clone() if isinstance(x, torch.Tensor) else x for x in model.state()]
    random = torch.get_rng_state()
    trace = model.step(manager, record=True).trace
    found = [module for module in modules_of(trace) if not names or module.record.key.name in names]
    plan = Plan(trace.model, 0, (), tuple(Recompute(m.record.key, 1, 0.0) for m in found))
    outcome = model.step(manager, plan)
    assert_same(outcome, plain)
    assert torch.equal(torch.get_rng_state(), random)
    for a, b in zip(model.state(), state, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert_nothing_left(manager)


gelu = torch.nn.functional.gelu


def test_is(sim):
    class M(Step):
        def body(self, hidden):
            def cross(q, k):
                return gelu(q * 2.0).sin() if q is k else gelu(q * 3.0).sin()

            return self.call("m", cross, hidden, hidden)

    check(M(), sim, "m")


def test_input_changed_later(sim):
    """residual.add_(mlp(residual)), where nothing saves the residual itself."""

    class M(Step):
        def body(self, hidden):
            hidden = hidden * 1.0
            made = self.call("m", lambda x: gelu(x + 1.0) * 2.0, hidden)
            hidden += made
            return hidden @ self.up

    check(M(), sim, "m")


def test_no_grad_call(sim):
    class M(Step):
        def body(self, hidden):
            def frozen(x):
                out = torch.empty(T, N)
                torch.mm(x, self.up, out=out)
                return gelu(out)

            with torch.no_grad():
                y = self.call("frozen", frozen, hidden)
            return hidden * y

    check(M(), sim, "frozen")


def test_encoder_fast_path(sim):
    class M(Step):
        def reset(self):
            torch.manual_seed(1)
            self.enc = torch.nn.TransformerEncoderLayer(N, 2, 64, batch_first=True, activation="gelu").eval()

        def body(self, hidden):
            with torch.no_grad():
                y = self.call("frozen", torch.nn.TransformerEncoderLayer.forward, self.enc, hidden.detach()[None])[0]
            return hidden * y

    check(M(), sim, "frozen")


class Mod(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.par = torch.nn.Parameter(torch.zeros(N), requires_grad=False)
        self.register_buffer("later", None)
        self.box = {"mean": torch.zeros(N)}
        self.list = [torch.zeros(N)]
        self.count = 0
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, hidden):
        now = hidden.detach().mean(0)
        if self.how == "parameter":
            self.par.lerp_(now, 0.1)
        elif self.how == "dict":
            self.box["mean"].lerp_(now, 0.1)
        elif self.how == "list":
            self.list[0].lerp_(now, 0.1)
        elif self.how == "number":
            self.count += 1
        elif self.how == "generator":
            hidden = hidden * torch.rand(N, generator=self.generator)
        elif self.how == "none buffer":
            self.later = now if self.later is None else self.later + now
        return (hidden * 2.0 - now).tanh().square()

    def state(self):
        later = torch.zeros(N) if self.later is None else self.later
        return [self.par.detach(), self.box["mean"], self.list[0], later, self.count, self.generator.get_state()]


@pytest.mark.parametrize("kind", ["parameter", "dict", "list", "none buffer", "number", "generator"])
def test_state(sim, kind):
    class M(Step):
        def reset(self):
            self.mod = Mod(kind)

        def state(self):
            return self.mod.state()

        def body(self, hidden):
            return self.call("m", Mod.forward, self.mod, hidden) @ self.up

    check(M(), sim, "m")


@pytest.mark.parametrize("how", ["kwarg", "bound", "partial", "container", "closure"])
def test_reached_otherwise(sim, how):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(N))

        def forward(self, hidden, unused=None):
            now = hidden.detach().mean(0)
            self.mean.lerp_(now, 0.1)
            return (hidden * 2.0 - now).tanh().square()

    class M(Step):
        def reset(self):
            self.mod = Mean()

        def state(self):
            return [self.mod.mean]

        def body(self, hidden):
            f, mod = Mean.forward, self.mod
            if how == "kwarg":
                return self.call("m", lambda x, *, mod: f(mod, x), hidden, mod=mod) @ self.up
            if how == "bound":
                return self.call("m", mod.forward, hidden) @ self.up
            if how == "partial":
                return self.call("m", functools.partial(f, mod), hidden) @ self.up
            if how == "container":
                return self.call("m", lambda x, mods: mods[0](x), hidden, [mod]) @ self.up
            return self.call("m", lambda x: mod(x), hidden) @ self.up

    check(M(), sim, "m")


def test_told_the_microbatch(sim):
    """As Megatron tells its layers: it is no state that would keep them from running again."""

    class M(Step):
        def reset(self):
            self.mod = torch.nn.Tanh()

        def body(self, hidden):
            self.mod.current_microbatch = getattr(self.mod, "current_microbatch", -1) + 1
            return self.call("m", torch.nn.Tanh.forward, self.mod, hidden * 2.0) @ self.up

    model, manager = M(forwards=3), new_manager(sim)
    found = [module.record.key.microbatch for module in modules_of(model.step(manager, record=True).trace)]
    assert found == [0, 1, 2]
    check(model, sim, "m")


def test_hook_after_changes_what_forward_read(sim):
    """A forward hook (outside of the call) that updates the mean which forward subtracted."""

    class Centre(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(N))

        def forward(self, hidden):
            return (hidden * 2.0 - self.mean).tanh().square()

    class M(Step):
        def reset(self):
            self.mod = Centre()

        def body(self, hidden):
            made = self.call("m", Centre.forward, self.mod, hidden)
            self.mod.mean += hidden.detach().mean(0)
            return made @ self.up

        def state(self):
            return [self.mod.mean]

    check(M(), sim, "m")


def test_spectral_norm_called_twice(sim):
    class M(Step):
        def reset(self):
            torch.manual_seed(1)
            self.lin = torch.nn.utils.spectral_norm(torch.nn.Linear(N, N))

        def body(self, hidden):
            orig = type(self.lin).forward
            me = self

            class L(torch.nn.Linear):
                def forward(self, x):
                    return me.call("lin", orig, self, x)

            self.lin.__class__ = L
            return self.lin(self.lin(hidden).tanh()) @ self.up

        def state(self):
            return [self.lin.weight_u]

    check(M(2), sim, "lin", "lin#2")


@pytest.mark.parametrize("reset", [False, True])
def test_attribute_as_argument(sim, reset):
    """Set by whoever calls it, for each microbatch."""

    class Scaled(torch.nn.Module):
        def forward(self, hidden):
            return (hidden * 2.0 + self.scale).tanh().square()

    class M(Step):
        def reset(self):
            self.mod, self.n = Scaled(), 0

        def body(self, hidden):
            self.n += 1
            self.mod.scale = hidden.detach() * self.n
            made = self.call("m", Scaled.forward, self.mod, hidden)
            if reset:
                self.mod.scale = 0.0
            return made @ self.up

    check(M(1 if reset else 2), sim, "m")


def test_enough_is_swallowed(sim):
    class M(Step):
        def reset(self):
            self.fused = True

        def state(self):
            return [self.fused]

        def body(self, hidden):
            def outer(hidden):
                hidden = gelu(hidden * 2.0)
                try:
                    return self.call("inner", lambda x: x @ self.up, hidden)
                except Exception:
                    self.fused = False
                    return hidden @ self.up

            return self.call("outer", outer, hidden) + hidden

    check(M(), sim, "outer")


def test_recorded_step_keeps_last(sim):
    """What modules remember of their last input is as short-lived in a recorded step as in any other."""
    class Keeps(torch.nn.Module):
        def forward(self, hidden):
            self.last = hidden
            return (hidden * 2.0).tanh().square()

    class M(Step):
        def reset(self):
            self.mod = Keeps()

        def body(self, hidden):
            return self.call("m", Keeps.forward, self.mod, hidden) @ self.up

    model, manager = M(), new_manager(sim)
    model.manager = manager
    peaks = []
    for record in (False, True):
        model.reset()
        gc.collect()
        peaks.append(run_step(model.run, model.leaves, manager, record=record, microbatches=8).peak_bytes)
    assert peaks[1] == peaks[0]


def test_grad_inside(sim):
    class M(Step):
        def body(self, hidden):
            def m(x):
                y = gelu(x * 2.0).sin()
                g, = torch.autograd.grad(y.sum(), x, create_graph=True)
                return y * g

            return self.call("m", m, hidden)

    check(M(), sim, "m")


class Shape(tuple):
    """As torch.Size, no structure to pytree."""


def test_shape_as_argument(sim):
    class M(Step):
        def body(self, hidden):
            return self.call("m", lambda x, shape: gelu(x * 2.0).view(shape).sin(), hidden, Shape((N, T))).T @ self.up.T

    check(M(), sim, "m")


def test_input_view_base_changed(sim):
    class M(Step):
        def body(self, hidden):
            both = torch.cat([hidden, hidden]) * 1.0
            made = self.call("m", lambda x: gelu(x + 1.0), both[:T])
            both[T:] += 1.0
            return (made + both[T:]) @ self.up

    check(M(), sim, "m")


def test_generator_argument(sim):
    class M(Step):
        def reset(self):
            self.gen = torch.Generator().manual_seed(5)

        def state(self):
            return [self.gen.get_state()]

        def body(self, hidden):
            return self.call("m", lambda x, gen: gelu(x * torch.rand(N, generator=gen)).sin(), hidden, self.gen)

    check(M(), sim, "m")


def test_scripted_batch_norm(sim):
    class M(Step):
        def reset(self):
            self.bn = torch.jit.script(torch.nn.BatchNorm1d(N))

        def state(self):
            return [self.bn.running_mean.clone()]

        def body(self, hidden):
            return self.call("m", lambda bn, x: bn(x * 2.0).sin(), self.bn, hidden)

    check(M(), sim, "m")


@pytest.mark.xfail(strict=True, reason="what is in a dataclass that a call is given is not looked at")
def test_dataclass_changed(sim):
    @dataclasses.dataclass
    class Box:
        x: torch.Tensor

    class M(Step):
        def body(self, hidden):
            box = Box(hidden * 1.0)

            def m(box):
                made = gelu(box.x + 1.0)
                box.x += 2.0
                return made

            return self.call("m", m, box) @ self.up

    check(M(), sim, "m")


def test_tensor_attributes(sim):
    class M(Step):
        def body(self, hidden):
            hidden.scale = 3.0
            return self.call("m", lambda x: gelu(x * x.scale).sin(), hidden)

    check(M(), sim, "m")


@pytest.mark.xfail(strict=True, reason="see ModuleState")
@pytest.mark.parametrize("kind", ["attribute", "dict", "data", "object"])
def test_state_that_is_not_seen(sim, kind):
    class Unseen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(N))
            self.box, self.total, self.kept = {"mean": torch.zeros(N)}, torch.zeros(N), Kept()

        def forward(self, hidden):
            now = hidden.detach().mean(0)
            if kind == "attribute":
                self.total = self.total + now
            elif kind == "dict":
                self.box["mean"] = self.box["mean"] + now
            elif kind == "data":
                self.mean.data.lerp_(now, 0.1)
            else:
                self.kept.mean.lerp_(now, 0.1)
            return (hidden * 2.0 - now).tanh().square()

    class Kept:
        def __init__(self):
            self.mean = torch.zeros(N)

    class M(Step):
        def reset(self):
            self.mod = Unseen()

        def state(self):
            return [self.mod.total, self.mod.box["mean"], self.mod.mean, self.mod.kept.mean]

        def body(self, hidden):
            return self.call("m", Unseen.forward, self.mod, hidden) @ self.up

    check(M(), sim, "m")
