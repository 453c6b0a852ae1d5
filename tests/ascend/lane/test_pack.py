"""Steps whose saved tensors all go to the host and back over a slow link: bit for bit what plain torch_npu computes."""
from __future__ import annotations

import torch
from npu_device import device, fake, manager_of, same_bits

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.link import GBPS, probe_link
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.units import MIB

LAYERS, WIDTH, TOKENS = 4, 64, 128


class Model:
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        values = [torch.randn(WIDTH, WIDTH, generator=random) / 8 for _ in range(LAYERS)]
        self.weights = [torch.nn.Parameter(value.npu()) for value in values]
        self.inputs = torch.randn(TOKENS, WIDTH, generator=random).npu()

    def loss(self, layer) -> torch.Tensor:
        hidden = self.inputs
        for number, weight in enumerate(self.weights, 1):
            with layer(number):
                hidden = hidden + torch.tanh(torch.mm(hidden, weight)) * hidden
        return hidden.square().sum()

    def results(self, loss: torch.Tensor) -> list[torch.Tensor]:
        grads = [weight.grad.cpu() for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return [loss.detach().cpu(), *grads]


def plain_step(model: Model) -> list[torch.Tensor]:
    from contextlib import nullcontext

    loss = model.loss(lambda number: nullcontext())
    loss.backward()
    return model.results(loss)


def step(model: Model, manager, plan: Plan | None = None, trace: StepTrace | None = None):
    manager.begin_step(plan, trace=trace)
    with manager.forward(0):
        loss = model.loss(manager.layer)
    loss.backward()
    stats, recorded = manager.end_step()
    return model.results(loss), stats, recorded


def swap_all(trace: StepTrace) -> Plan:
    swaps = []
    for record in trace.saved:
        if record.movable:
            out = max(record.sole, record.last_use)
            back = max(record.first_read - 2, out + 1)
            swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    return Plan(trace.model, 0, tuple(swaps))


def test_all_that_can_move_moves_and_no_bit_changes():
    with device() as npu, manager_of(npu) as manager:
        model = Model()
        plain = plain_step(model)
        memory = npu.memory()
        trace = StepTrace("test", memory.capacity_bytes, memory.allocated_bytes, 1e6, 1e6)
        found, _, recorded = step(model, manager, trace=trace)
        assert all(map(same_bits, found, plain))
        plan = swap_all(recorded)
        assert len(plan.swaps) >= LAYERS
        for gbps in (0.0, 0.05):
            fake.fakecann_set_link(gbps, gbps)
            for _ in range(2):
                found, stats, _ = step(model, manager, plan)
                assert all(map(same_bits, found, plain))
                assert stats.offloaded_bytes == stats.loaded_bytes == plan.swap_bytes
        assert manager.pool.used_bytes == 0


def test_the_link_is_measured(npu):
    """Not as faster than it is; on a busy machine the fake's copies are late."""
    fake.fakecann_set_link(0.5, 0.25)
    pool = HostPool(npu, 16 * MIB)
    link = probe_link(npu, pool)
    pool.close()
    assert 0 < link.d2h_bytes_per_ms < 1.1 * 0.5 * GBPS
    assert 0 < link.h2d_bytes_per_ms < 1.1 * 0.25 * GBPS
