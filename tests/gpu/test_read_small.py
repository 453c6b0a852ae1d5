"""Token counts come back by a kernel: the same values, and not behind the copies of a plan."""
from __future__ import annotations

import pytest
import torch
from cuda_device import needs_gpu, needs_kernels

from mindspeed_swap.core.accelerator.cuda import MOST_SMALL_BYTES, CudaAccelerator
from mindspeed_swap.units import MIB

pytestmark = [needs_gpu, needs_kernels]


@pytest.fixture(scope="module")
def accelerator():
    device = CudaAccelerator()
    yield device
    device.close()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (8,), (4, 8), ()])
def test_the_same_values_in_page_locked_memory(accelerator, dtype, shape):
    tensor = torch.randint(-(2**31), 2**31 - 1, shape, device="cuda").to(dtype)
    found = accelerator.read_small(tensor)
    torch.cuda.synchronize()
    assert found.device.type == "cpu" and found.is_pinned() and found.dtype == dtype
    assert torch.equal(found, tensor.cpu()) and found.shape == tensor.shape
    turned = torch.arange(12, device="cuda", dtype=dtype).view(3, 4).t()
    found = accelerator.read_small(turned)
    torch.cuda.synchronize()
    assert torch.equal(found, turned.cpu())


def test_what_is_large_no_integer_or_elsewhere_is_left_to_others(accelerator):
    assert accelerator.read_small(torch.arange(8)) is None
    large = torch.zeros(MOST_SMALL_BYTES // 8 + 1, dtype=torch.int64, device="cuda")
    assert accelerator.read_small(large) is None
    assert accelerator.read_small(torch.zeros(8, device="cuda")) is None
    assert accelerator.read_small(torch.zeros(0, dtype=torch.int64, device="cuda")) is None


def test_it_overtakes_copies_that_are_queued(accelerator):
    device = torch.zeros(1024 * MIB, dtype=torch.uint8, device="cuda")
    host = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True)
    counts, copies = torch.arange(8, device="cuda"), accelerator.new_stream()
    accelerator.read_small(counts)  # what the first one loads and allocates
    torch.cuda.synchronize()
    accelerator.copy(host, device, copies)
    after = accelerator.record(copies)
    found = accelerator.read_small(counts)
    torch.cuda.current_stream().synchronize()
    overtaken = not accelerator.done(after)
    assert found.tolist() == list(range(8)) and overtaken
