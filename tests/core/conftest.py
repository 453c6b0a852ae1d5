"""The simulated device for tests of the core: installed once per process, as new for every test."""
from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.sim import device

LARGE = 64 << 30


@pytest.fixture(scope="session")
def sim() -> Iterator[SimAccelerator]:
    """The simulated accelerator, with a capacity that nothing reaches. From here on CPU tensors are device memory."""
    for variable in (device.CAPACITY_VARIABLE, device.LINK_VARIABLE):
        os.environ.pop(variable, None)
    device.install(LARGE)
    accelerator = SimAccelerator()
    yield accelerator
    accelerator.close()


@pytest.fixture(autouse=True)
def _fresh_sim() -> Iterator[None]:
    yield
    if device.installed():
        device.extension().set_pressure_handler(None)
        device.extension().shutdown()
        device.set_capacity(LARGE)
        device.set_link(device.DEFAULT_LINK_GBPS, device.DEFAULT_LINK_GBPS)
        device.reset_peak()
