"""A module that changes its buffers as it runs must not run twice: its running means and counts would be others."""
from __future__ import annotations

import pytest
import torch
from swapping import assert_same, new_manager, run_step
from test_again import LAYERS, WIDTH, Blocks

from mindspeed_swap.core.module_state import ModuleState, keepers_in
from mindspeed_swap.core.recompute import modules_of
from mindspeed_swap.core.solve import KEEP, RECOMPUTE, floor, solve

pytestmark = pytest.mark.usefixtures("light_or_not")


class Mean(torch.nn.Module):
    """Less its running mean; how that is kept is up to ``kept``."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("never", None)
        self.total = torch.zeros(WIDTH)  # in no state_dict

    def forward(self, hidden):
        now = hidden.detach().mean(0)
        if self.kept == "in place":
            self.mean.lerp_(now, 0.1)
        elif self.kept == "replaced":
            self.mean = self.mean.lerp(now, 0.1)
        elif self.kept == "attribute":
            self.total += now
        self.last = now
        return (hidden - now).tanh().square()


class Block(torch.nn.Module):
    def __init__(self, kept: str) -> None:
        super().__init__()
        self.inner = Mean(kept)

    def forward(self, model, hidden, up, down):
        normed = model.call("norm", Mean.forward, self.inner, hidden)
        return hidden + model.call("mlp", model.mlp, normed, up=up, down=down)


class Averaged(Blocks):
    once = False

    def __init__(self, kept: str, layers: int = LAYERS) -> None:
        super().__init__(layers)
        self.blocks = [Block(kept) for _ in range(layers)]
        self.layer = 0

    def call(self, name, function, *args, **kwargs):
        if self.manager is None:
            return function(*args, **kwargs)
        once = self.once and name == "norm"
        return self.manager.calls.call(name, function, args, kwargs, keeps_outputs=name == "layer", once=once)

    def block(self, hidden, up, down):
        raise AssertionError("the layers are modules")

    def __call__(self, layer):
        hidden = self.inputs
        for number, (block, (up, down)) in enumerate(zip(self.blocks, self.weights, strict=True), 1):
            with layer(number):
                hidden = self.call("layer", Block.forward, block, self, hidden, up, down)
        return hidden.square().mean()

    def step(self, *args, **kwargs):
        for block in self.blocks:
            block.inner.mean, block.inner.total = torch.zeros(WIDTH), torch.zeros(WIDTH)
        return super().step(*args, **kwargs)

    def means(self):
        return [torch.cat([block.inner.mean, block.inner.total]) for block in self.blocks]


def recomputable(trace):
    return {module.record.key.name for module in modules_of(trace)}


@pytest.mark.parametrize("kept", ["in place", "replaced", "attribute"])
def test_neither_it_nor_what_is_around_it_runs_again(sim, kept):
    model, manager = Averaged(kept), new_manager(sim)
    assert recomputable(model.step(manager, record=True).trace) == {"mlp", "mlp.act"}


def test_one_that_changes_nothing_does(sim):
    model, manager = Averaged("not"), new_manager(sim)
    assert recomputable(model.step(manager, record=True).trace) == {"mlp", "mlp.act", "norm", "layer"}


def test_where_it_is_left_out_what_is_around_it_runs_again(sim):
    model, manager = Averaged("in place"), new_manager(sim)
    model.once = True
    assert recomputable(model.step(manager, record=True).trace) == {"mlp", "mlp.act", "layer"}


@pytest.mark.parametrize("kept, once", [
    ("in place", False), ("in place", True), ("replaced", False), ("attribute", False), ("not", False),
])  # fmt: skip
def test_it_is_as_it_would_be(sim, kept, once):
    """All is recomputed that may be."""
    model, manager, verbs = Averaged(kept), new_manager(sim), (KEEP, RECOMPUTE)
    model.once = once
    plain = model.step(None)
    means = model.means()
    trace = model.step(manager, record=True).trace
    plan = solve(trace, floor(trace, verbs).reachable_bytes, verbs)
    outcome = model.step(manager, plan)
    assert outcome.stats.recomputed_calls == len(plan.recomputes) > 0
    assert_same(outcome, plain)
    assert all(torch.equal(found, expected) for found, expected in zip(model.means(), means, strict=True))


def test_a_change_before_its_backward(sim):
    """By whoever it may be: run again, the first microbatch would find what the second one was given."""

    class Warming(Averaged):
        def __call__(self, layer):
            for block in self.blocks:
                block.inner.mean += 1
            return super().__call__(layer)

    model, manager = Warming("not"), new_manager(sim)
    model.manager = manager
    trace = run_step(model, model.leaves, manager, record=True, microbatches=2, forwards_first=True).trace
    found = [{m.record.key.name for m in modules_of(trace) if m.record.key.microbatch == mb} for mb in range(2)]
    assert found == [{"mlp", "mlp.act"}, {"mlp", "mlp.act", "norm", "layer"}]


def test_what_is_left_out_may_change():
    inner = torch.nn.BatchNorm1d(2)
    outer = torch.nn.Sequential(torch.nn.BatchNorm1d(2), inner)
    seen, of_inner = (ModuleState(keepers_in(print, given)) for given in ([outer, 3, None], [inner]))
    inner.running_mean.add_(1)
    assert seen.changed and of_inner.changed
    seen.leave_out(of_inner)
    assert not seen.changed
    outer[0].num_batches_tracked += 1
    assert seen.changed
