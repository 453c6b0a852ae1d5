"""Users change the compute stream: what is copied is ordered behind the one that runs at that moment."""
import random

from swapping import assert_nothing_left, assert_same, blocks, new_manager, recorded_plan, run_step

from mindspeed_swap.core.accelerator.sim import COMPUTE, SimAccelerator
from mindspeed_swap.sim import device

RUNS = 50


class ManyComputeStreams(SimAccelerator):
    """Several names of the one compute stream. Marks must be set in the one that runs now; a release waits in the one
    that the tensor was saved in, because there its memory is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.now: object = COMPUTE
        self.marks = self.wrong = 0

    def compute_stream(self):
        return self.now

    def record(self, stream):
        if _is_compute(stream):
            self.marks += 1
            self.wrong += stream != self.now
        return super().record(_real(stream))

    def wait(self, stream, event):
        super().wait(_real(stream), event)

    def copy(self, dst, src, stream):
        assert not _is_compute(stream)
        super().copy(dst, src, stream)


def _is_compute(stream):
    return isinstance(stream, str) or stream == COMPUTE


def _real(stream):
    return COMPUTE if _is_compute(stream) else stream


def test_case_08_forward_in_another_stream(sim):
    choose = random.Random(8)
    accelerator = ManyComputeStreams()
    plain_body, leaves = blocks(4, width=32, tokens=32)

    def body(layer):
        accelerator.now = choose.choice([COMPUTE, "side", "other"])
        loss = plain_body(layer)
        accelerator.now = choose.choice([COMPUTE, "side", "other"])  # of backward
        return loss

    plain = run_step(plain_body, leaves)
    manager = new_manager(accelerator)
    plan = recorded_plan(plain_body, leaves, manager)
    for _ in range(RUNS):
        device.set_link(choose.choice([0.1, 1.0, 16.0]), choose.choice([0.1, 1.0, 16.0]))
        accelerator.marks = accelerator.wrong = 0
        assert_same(run_step(body, leaves, manager, plan), plain)
        assert accelerator.marks and not accelerator.wrong
    assert_nothing_left(manager)
