"""What the hooks cost the host. Printed (`pytest -s`), not asserted: the machine decides."""
import time

import torch
from swapping import new_manager, plan_everything

from mindspeed_swap.sim import device

ROUNDS = 400


def test_cost_of_the_hooks(sim, capsys):
    tensors = [torch.empty(1 << 12) for _ in range(ROUNDS)]
    device.set_link(0, 0)
    lines = []

    def measure(name, manager, plan=None):
        manager.begin_step(plan)
        start = time.perf_counter()
        with manager.forward(0):
            handles = [manager._pack(tensor) for tensor in tensors]
        packed = time.perf_counter()
        for handle in reversed(handles):
            manager.unpack(handle)
        end = time.perf_counter()
        pack, unpack = (packed - start) / ROUNDS * 1e6, (end - packed) / ROUNDS * 1e6
        lines.append(f"{name:<12} pack {pack:5.1f} us, unpack {unpack:5.1f} us")
        handles.clear()

    for _ in range(2):  # the first is the warm-up
        lines.clear()
        measure("passed on", new_manager(sim, min_bytes=1 << 30))
        measure("kept", new_manager(sim))
        manager = new_manager(sim)
        measure("swapped", manager, plan_everything(ROUNDS, 1 << 14))
        assert manager.stats.offloaded_bytes == ROUNDS << 14
    with capsys.disabled():
        print("\n" + "\n".join(lines))
