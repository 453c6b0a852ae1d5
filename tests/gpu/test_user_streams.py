"""Cases 7, 8 and 10 in one model: views of saved tensors returned, streams of the user's choice, memory overwritten as
soon as it is given up; copies, releases and compute are late at random. (``test_races.py`` removes each wait.)
"""
from __future__ import annotations

import os
import random

import pytest
import torch
from cuda_device import needs_gpu, needs_kernels
from simulated import close_pools, new_pool
from swapping import assert_equal_bits, swap_all

from mindspeed_swap.core.accelerator.cuda import CudaAccelerator
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.units import MIB

pytestmark = [needs_gpu, needs_kernels]

# Read when the first product is asked for: equal results whichever stream they are computed on.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

RUNS = 50
LATE_CYCLES = 10_000_000  # about 6 ms


class DelayedCuda(CudaAccelerator):
    """Copies out and back, and compute before it waits for one, sleep for as many cycles as these functions say."""

    def __init__(self):
        super().__init__()
        self.streams = (self.new_stream(), self.new_stream())
        self.punctual()

    def punctual(self):
        self.out = self.back = self.release = lambda: 0

    def sleep(self, stream, cycles):
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)

    def copy(self, dst, src, stream):
        self.sleep(stream, self.out() if stream == self.streams[0] else self.back())
        super().copy(dst, src, stream)

    def wait(self, stream, event):
        if stream not in self.streams:
            self.sleep(stream, self.release())
        super().wait(stream, event)


@pytest.fixture(scope="module")
def accelerator():
    device = DelayedCuda()
    yield device
    device.close()


@pytest.fixture(autouse=True)
def _clean(accelerator):
    accelerator.punctual()
    yield
    torch.cuda.synchronize()
    close_pools()
    torch.cuda.empty_cache()


class ReturnsAView(torch.autograd.Function):
    """Case 7: its gradient is a part of what it saved, as it is."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return saved[8 : 8 + grad.shape[0]].view_as(grad), None


LAYERS, TOKENS, WIDTH = 4, 512, 1024


class Model:
    def __init__(self):
        generator = torch.Generator(device="cuda").manual_seed(1)

        def random_tensor(*shape):
            return torch.randn(*shape, generator=generator, device="cuda") / WIDTH**0.5

        self.inputs = random_tensor(TOKENS, WIDTH)
        self.leaves = []
        for _ in range(LAYERS):
            for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (TOKENS, WIDTH)):
                self.leaves.append(random_tensor(*shape).requires_grad_())

    def forward(self, layer, disturb) -> torch.Tensor:
        hidden = self.inputs
        for number in range(LAYERS):
            up, down, bias = self.leaves[3 * number : 3 * number + 3]
            with layer(number + 1):
                disturb()
                hidden = hidden + torch.nn.functional.gelu(hidden @ up) @ down
                hidden = hidden + ReturnsAView.apply(bias, hidden.detach().new_ones(TOKENS + 16, WIDTH).cumsum(0))
            # Case 10: as large as what has been given up, and overwritten at once.
            spoil = [torch.full_like(hidden, -7.0) for _ in range(3)]
            del spoil
        return hidden.square().mean()

    def step(self, manager=None, plan=None, *, trace=None, stream=None, disturb=lambda: None):
        """Loss and gradients on the host and, with a manager, the step's counts and trace."""
        for leaf in self.leaves:
            leaf.grad = None
        stream = stream or torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        if manager is not None:
            manager.begin_step(plan, trace=trace)
        with torch.cuda.stream(stream):
            if manager is None:
                loss = self.forward(lambda number: torch.enable_grad(), disturb)
            else:
                with manager.forward(0):
                    loss = self.forward(manager.layer, disturb)
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        ended = manager.end_step() if manager is not None else None
        torch.cuda.synchronize()
        return [loss.detach().cpu(), *(leaf.grad.cpu() for leaf in self.leaves)], ended


def planned(accelerator, model):
    pool = new_pool(accelerator, 256 * MIB)
    manager = SwapManager(accelerator, pool, min_bytes=1024, copy_streams=accelerator.streams)
    memory = accelerator.memory()
    trace = StepTrace("test", memory.capacity_bytes, memory.allocated_bytes, 1e6, 1e6)
    _, (_, trace) = model.step(manager, trace=trace)
    plan = swap_all(trace, prefetch=2)
    assert len(plan.swaps) >= 3 * LAYERS
    return manager, plan


def test_cases_7_8_10_in_50_disturbed_runs(accelerator):
    """On streams of the user's choice, with copies, releases and compute late at random."""
    choose = random.Random(10)
    model = Model()
    expected, _ = model.step()
    again, _ = model.step()
    for one, other in zip(again, expected, strict=True):
        assert_equal_bits(one, other)  # else equality says nothing
    manager, plan = planned(accelerator, model)
    streams = [None, torch.cuda.Stream(), torch.cuda.Stream()]

    def sometimes():
        return choose.choice((0, 0, choose.randrange(LATE_CYCLES // 4)))

    for _ in range(RUNS):
        accelerator.out = accelerator.back = accelerator.release = sometimes
        found, (stats, _) = model.step(
            manager, plan, stream=choose.choice(streams), disturb=lambda: torch.cuda._sleep(sometimes() + 1)
        )
        assert stats.offloaded_bytes == stats.loaded_bytes == plan.swap_bytes and stats.ineffective_bytes == 0
        for one, other in zip(found, expected, strict=True):
            assert_equal_bits(one, other)
