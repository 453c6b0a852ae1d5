"""New streams in every step grew the allocator's pools: after the third step nothing grows any more."""
from swapping import assert_nothing_left, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.core.accelerator.sim import SimAccelerator

STEPS, WARM = 100, 3


class CountsStreams(SimAccelerator):
    made = 0

    def new_stream(self):
        self.made += 1
        return super().new_stream()


def test_case_11_reserved_memory_is_flat(sim):
    accelerator = CountsStreams()
    body, leaves = blocks(3, width=16, tokens=32)
    manager = new_manager(accelerator)
    plan = recorded_plan(body, leaves, manager)
    assert plan.swaps
    seen = []
    for _ in range(STEPS):
        run_step(body, leaves, manager, plan)
        for leaf in leaves:
            leaf.grad = None
        accelerator.synchronize()
        seen.append((accelerator.memory().reserved_bytes, manager.pool.pinned_bytes, accelerator.made))
    assert len(set(seen[WARM:])) == 1
    assert accelerator.made == 2  # one per direction, once
    assert_nothing_left(manager)
