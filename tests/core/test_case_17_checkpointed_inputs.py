"""A checkpoint hides what its layer saves from hooks, but not its input: that is swapped, reentrant or not."""
import pytest
import torch
from swapping import check_swapped, new_manager, recorded_plan, run_step
from torch.utils.checkpoint import checkpoint

from mindspeed_swap.core.trace import OUTSIDE

SIZE, LAYERS = 32, 4


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5) for _ in range(LAYERS)]


def block(hidden, weight):
    return (hidden @ weight).sigmoid()


@pytest.mark.parametrize("reentrant", [True, False])
def test_case_17_the_input_is_swapped(sim, reentrant):
    parameters = weights()

    def body(layer):
        hidden = parameters[0] * 2.0
        for number, weight in enumerate(parameters, 1):
            with layer(number):
                hidden = checkpoint(block, hidden, weight, use_reentrant=reentrant)
        return hidden.sum()

    _, plan, _ = check_swapped(body, parameters, sim)
    assert [swap.key.layer for swap in plan.swaps] == list(range(1, LAYERS + 1))
    assert {swap.nbytes for swap in plan.swaps} == {SIZE * SIZE * 4}


def test_case_17_saved_after_the_layer_has_returned(sim):
    """Megatron checkpoints around its layers: what is saved belongs to the last layer that ran inside."""
    parameters, manager = weights(), new_manager(sim)

    def body(layer):
        def some_layers(hidden, start):
            for number in (start, start + 1):
                with layer(number):
                    hidden = block(hidden, parameters[number - 1])
            return hidden

        hidden = parameters[0] * 2.0
        for start in range(1, LAYERS + 1, 2):
            with manager.recomputed():
                hidden = checkpoint(some_layers, hidden, start, use_reentrant=True)
        return hidden.sin().sum()

    trace = run_step(body, parameters, manager, record=True).trace
    assert trace is not None
    assert [record.key.layer for record in trace.saved] == [2, 4, OUTSIDE]
    assert [swap.key.layer for swap in recorded_plan(body, parameters, manager).swaps] == [2, 4, OUTSIDE]
