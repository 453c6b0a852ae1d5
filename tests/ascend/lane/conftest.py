"""One accelerator per test, on an empty device."""
from collections.abc import Iterator

import pytest
import torch_npu  # noqa: F401
from npu_device import device

from mindspeed_swap.core.accelerator.npu import NpuAccelerator


@pytest.fixture
def npu() -> Iterator[NpuAccelerator]:
    with device() as accelerator:
        yield accelerator
