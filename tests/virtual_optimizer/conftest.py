"""The simulated device, as new for every test. (Processes that train real Megatron bring their own.)"""
from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from adams import close_pools

from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.sim import device

LARGE = 64 << 30


@pytest.fixture(scope="session")
def sim() -> Iterator[SimAccelerator]:
    for variable in (device.CAPACITY_VARIABLE, device.LINK_VARIABLE):
        os.environ.pop(variable, None)
    device.install(LARGE)
    accelerator = SimAccelerator()
    yield accelerator
    accelerator.close()


@pytest.fixture(autouse=True)
def _fresh_sim() -> Iterator[None]:
    yield
    close_pools()
    if device.installed():
        device.extension().shutdown()
        device.set_capacity(LARGE)
        device.set_link(device.DEFAULT_LINK_GBPS, device.DEFAULT_LINK_GBPS)
        device.reset_peak()
