"""A backward that writes into a saved tensor: from the first read on the device copy is the truth."""
import pytest
import torch
from swapping import assert_nothing_left, assert_same, new_manager, recorded_plan, run_step

from mindspeed_swap.core.oom_guard import OomGuard

TOKENS, WORDS = 32, 64


class CrossEntropy(torch.autograd.Function):
    """As Megatron's: the saved softmax becomes the gradient, in place."""

    @staticmethod
    def forward(ctx, logits, target):
        softmax = logits.softmax(-1)
        ctx.save_for_backward(softmax, target)
        return -softmax[torch.arange(len(target)), target].log()

    @staticmethod
    def backward(ctx, grad):
        softmax, target = ctx.saved_tensors
        if counted:  # as a kernel that autograd knows nothing of would
            softmax = softmax.data
        softmax[torch.arange(len(target)), target] -= 1.0
        softmax.mul_(grad[:, None])
        pressure()
        return softmax, None


counted = False


def pressure() -> None:
    """Set by the test: what happens right after the write."""


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_case_42_cross_entropy_under_pressure(sim, planned, through_data, monkeypatch):
    leaf = torch.randn(TOKENS, WORDS, requires_grad=True)
    target = torch.randint(WORDS, (TOKENS,))
    monkeypatch.setitem(globals(), "counted", through_data)

    def body(layer):
        with layer(1):
            logits = leaf * 3.0
        with layer(2):
            return CrossEntropy.apply(logits.sin(), target).mean()

    plain = run_step(body, [leaf])
    manager = new_manager(sim)
    guard = OomGuard(manager)
    plan = recorded_plan(body, [leaf], manager) if planned else None
    monkeypatch.setitem(globals(), "pressure", lambda: manager.evict(1 << 40))
    assert_same(run_step(body, [leaf], manager, plan), plain)
    guard.close()
    assert_nothing_left(manager)


def test_case_42_written_evicted_and_read_again(sim):
    """A write that no counter saw, then an eviction: the next reader finds what was written."""
    manager = new_manager(sim)
    base = torch.randn(64, 64)
    expected = base * 2.0
    with manager.forward(0):
        handle = manager._pack(base)
    del base
    for _ in range(2):
        assert manager.evict(1 << 40) == 64 * 64 * 4
        found = manager.unpack(handle)
        if _ == 0:
            found.data.mul_(2.0)
        del found
    assert manager.evict(1 << 40) == 64 * 64 * 4
    assert torch.equal(manager.unpack(handle), expected)
