"""One accelerator per test, on an empty device. Our patches are found in the checkout as they are when installed."""
import sys
from collections.abc import Iterator

import pytest
import torch_npu  # noqa: F401
from npu_device import device

import patches
from mindspeed_swap.core.accelerator.npu import NpuAccelerator

sys.modules["mindspeed_swap.patches"] = patches


@pytest.fixture
def npu() -> Iterator[NpuAccelerator]:
    with device() as accelerator:
        yield accelerator
