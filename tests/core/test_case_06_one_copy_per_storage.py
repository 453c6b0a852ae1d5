"""Views of one storage share one copy, whatever part of it each one covers."""
import torch
from swapping import check_swapped

from mindspeed_swap.sim import device

TOKENS, WIDTH = 32, 24


def test_case_06_q_k_v_of_one_projection(sim):
    leaf = torch.randn(TOKENS, 3 * WIDTH, requires_grad=True)

    def body(layer):
        with layer(1):
            q, k, v = (leaf * 2.0).chunk(3, dim=-1)  # each covers a third of the storage
            scores = q @ k.t()
            out = scores @ v
            del q, k, v, scores
        with layer(2):
            return out.sum()

    before = device.stats()
    _, plan, outcome = check_swapped(body, [leaf], sim, steps=1)
    qkv, scores = 4 * TOKENS * 3 * WIDTH, 4 * TOKENS * TOKENS
    assert sorted(swap.nbytes for swap in plan.swaps) == sorted([qkv, scores])
    assert device.stats()["d2h_bytes"] - before["d2h_bytes"] == 2 * (qkv + scores)  # a light step, and one that is not
    assert outcome.stats.saved == 2


def test_case_06_saved_as_output_and_as_input(sim):
    """The output of one node is the input of the next: one storage, although autograd makes two tensors of it."""
    leaf = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def body(layer):
        with layer(1):
            y = leaf.exp()  # saves its output
            out = y.sin() + y.square()  # save their input
            del y
        with layer(2):
            return out.sum()

    _, plan, outcome = check_swapped(body, [leaf], sim)
    assert [swap.nbytes for swap in plan.swaps] == [4 * TOKENS * WIDTH]
    assert outcome.stats.saved == 1
