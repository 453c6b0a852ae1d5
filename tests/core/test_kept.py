"""What the device was asked for once is not asked for again by calls that run again."""
from __future__ import annotations

import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager
from test_again import LAYERS, Blocks, plan_of

pytestmark = pytest.mark.usefixtures("light_or_not")


class Counting(Blocks):
    """The mlp asks the device for two numbers, which its result depends on."""

    asked = 0

    def ask(self, tensor):
        def answer():
            self.asked += 1
            return int(tensor.detach().abs().sum() * 1000) % 7 + 1, [self.asked]

        if self.manager is None:
            return answer()
        return self.manager.calls.kept(answer)

    def mlp(self, hidden, *, up, down):
        first, _ = self.ask(hidden)
        hidden = hidden * first
        self.calls += 1
        second, order = self.ask(hidden)
        assert len(order) == 1
        hidden = hidden / second
        hidden = self.call("mlp.act", torch.nn.functional.gelu, hidden @ up)
        return self.dropped(hidden) @ down

    def dropped(self, hidden):
        return torch.nn.functional.dropout(hidden, self.drop)

    def step(self, *args, **kwargs):
        self.asked = 0
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("name", ["mlp", "layer"])
def test_it_is_asked_for_once(sim, name):
    model, manager = Counting(drop=0.3), new_manager(sim)
    plain = model.step(None)
    trace = model.step(manager, record=True).trace
    assert model.asked == 2 * LAYERS
    plan = plan_of(trace, name)
    for record in (False, True, False):
        outcome = model.step(manager, plan, record=record)
        assert_same(outcome, plain)
        assert outcome.stats.recomputed_calls == len(plan.recomputes) >= LAYERS - 1
        assert model.asked == 2 * LAYERS
    assert_nothing_left(manager)


def test_outside_a_call_that_runs_again_it_is_the_plain_function(sim):
    calls = new_manager(sim).calls
    found = []
    assert calls.kept(lambda: found.append(1)) is None and calls.kept(lambda: found.append(2) or 3) == 3
    assert found == [1, 2]


class Greedy(Counting):
    """It asks once more than the first time."""

    def dropped(self, hidden):
        if self.calls > LAYERS:
            self.ask(hidden)
        return super().dropped(hidden)


def test_a_forward_that_asks_more_than_the_first_time_is_told_so(sim):
    model, manager = Greedy(drop=0.3), new_manager(sim)
    plan = plan_of(model.step(manager, record=True).trace, "mlp")
    with pytest.raises(RuntimeError, match="recompute of mlp .*did other things"):
        model.step(manager, plan)
