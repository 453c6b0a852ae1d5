"""The simulated device as fixtures, installed once per process and as new for every test, and the host pools of a test.

A conftest takes them with ``from simulated import fresh_sim, sim``.
"""
from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.sim import device

LARGE = 64 << 30
_pools: list[HostPool] = []


def new_pool(accelerator: Accelerator, host_bytes: int) -> HostPool:
    """Closed by ``close_pools``."""
    _pools.append(HostPool(accelerator, host_bytes))
    return _pools[-1]


def close_pools() -> None:
    """After each test: late copies would write to memory that is unmapped while it is registered."""
    while _pools:
        _pools.pop().close()


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
def fresh_sim() -> Iterator[None]:
    yield
    close_pools()
    if device.installed():
        device.extension().set_pressure_handler(None)
        device.extension().shutdown()
        if device.memory_allocated():  # in reference cycles: a later test would count it into a limit
            gc.collect()
        device.set_capacity(LARGE)
        device.set_link(device.DEFAULT_LINK_GBPS, device.DEFAULT_LINK_GBPS)
        device.reset_peak()


@pytest.fixture
def late_writes() -> Iterator[None]:
    """Nothing may be freed into which a copy was still to write. (The counter is the process's.)"""
    before = device.stats()["late_writes"]
    yield
    assert device.stats()["late_writes"] == before
