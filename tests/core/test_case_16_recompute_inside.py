"""Layers that are recomputed, beside layers that are not: what a recompute saves in backward is its own business."""
import torch
from swapping import check_swapped
from torch.utils.checkpoint import checkpoint

SIZE = 32


def test_case_16_recomputed_layers_beside_others(sim):
    weights = [torch.nn.Parameter(torch.randn(SIZE, SIZE) / SIZE**0.5) for _ in range(4)]
    saves_inside = 3

    def block(hidden, weight):
        return (hidden @ weight).sigmoid().exp()

    def body(layer):
        hidden = weights[0] * 2.0
        for number, weight in enumerate(weights, 1):
            with layer(number):
                recompute = number in (2, 3)
                hidden = checkpoint(block, hidden, weight, use_reentrant=True) if recompute else block(hidden, weight)
        return hidden.square().sum()

    _, _, outcome = check_swapped(body, weights, sim)
    inputs, others = 2, 2 * saves_inside
    assert outcome.stats.saved == inputs + others - 1  # the last layer's output is its own saved result
