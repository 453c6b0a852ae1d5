"""Each wait of the streamed optimizer is needed: without it the result is wrong, or memory is freed under a copy.

Compute is synchronous on the simulated device: what comes after compute is always in order there, and those waits are
seen to be called.
"""
from __future__ import annotations

import pytest
import torch
from adams import differences, groups_of, parameters, train

from mindspeed_swap.core.accelerator.sim import COMPUTE
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.sim import device
from mindspeed_swap.virtual_optimizer.arena import Arena, choose
from mindspeed_swap.virtual_optimizer.streamed import Streamed
from mindspeed_swap.virtual_optimizer.waits import Wait

SHAPES = ((32, 1000),) * 6
UNSEEN = (Wait.LOAD_AFTER_COMPUTE, Wait.STORE_AFTER_STEP)


SLOW, FAST = 0.05, 0.0  # 10^9 bytes per second; 0: at once
# (out, in) that makes the lack of a wait show, however busy the machine is.
LINKS = {Wait.STEP_AFTER_LOAD: (FAST, SLOW), Wait.REFILL_AFTER_STORE: (SLOW, FAST), Wait.END_AFTER_STORE: (SLOW, FAST)}


def train_streamed(accelerator, skip=frozenset(), link=(0.5, 0.5), steps=range(2)):
    """True if the state at the end of each step is that of the plain optimizer."""
    device.set_link(*link)
    optimizer = torch.optim.AdamW(groups_of(parameters(SHAPES)))
    pool = HostPool(accelerator, 64 << 20)
    arena = Arena(optimizer, choose(optimizer, accelerator, None), accelerator, pool)
    streams = (accelerator.new_stream(), accelerator.new_stream())
    Streamed(arena, accelerator, streams, slice_bytes=128 << 10, skip_waits=skip)
    plain = torch.optim.AdamW(groups_of(parameters(SHAPES)))
    right = True
    for step in steps:
        train(optimizer, range(step, step + 1))
        train(plain, range(step, step + 1))
        right = right and not differences(optimizer, plain)
    device.synchronize()
    pool.close()
    return right


def test_with_all_waits(sim):
    before = device.stats()["freed_under_copy"]
    assert all(train_streamed(sim, link=link) for link in LINKS.values())
    assert device.stats()["freed_under_copy"] == before


@pytest.mark.parametrize("wait", LINKS, ids=lambda wait: wait.name)
def test_without(sim, wait):
    before = device.stats()["freed_under_copy"]
    right = train_streamed(sim, frozenset({wait}), LINKS[wait])
    assert not right or device.stats()["freed_under_copy"] > before


@pytest.mark.parametrize("wait", UNSEEN, ids=lambda wait: wait.name)
def test_unseen_waits_are_called(sim, wait):
    calls = []

    class Listening(type(sim)):
        def record(self, stream):
            event = super().record(stream)
            if stream == COMPUTE:
                marks.append(event)
            return event

        def wait(self, stream, event):
            if any(event is mark for mark in marks):
                calls.append(stream)
            super().wait(stream, event)

    marks: list = []
    train_streamed(Listening())
    every = len(calls)
    calls.clear()
    train_streamed(Listening(), frozenset({wait}))
    assert 0 < len(calls) < every
