"""Page-locked slabs come from torch_npu's own pinned allocator: copies to and from them are asynchronous."""
from __future__ import annotations

import torch
from npu_device import NUMBERS, SLOW, content, fake, marked, on_device

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.units import MIB

NBYTES = 4 * NUMBERS


def locked_bytes() -> int:
    torch.npu.host_empty_cache()
    return torch.npu.host_memory_stats()["allocated_bytes.current"]


def test_blocks_are_page_locked_and_exact(npu):
    before = locked_bytes()
    pool = HostPool(npu, 64 * MIB)
    block = pool.alloc(1000)
    assert block.tensor.numel() == 1000 and block.tensor.is_pinned()
    assert pool.pinned_bytes == 8 * MIB and 0 <= locked_bytes() - before - 8 * MIB < MIB  # nothing is rounded up
    pool.free(block)
    pool.close()


def test_the_budget_holds(npu):
    pool = HostPool(npu, 8 * MIB)
    blocks = [pool.alloc(2 * MIB) for _ in range(4)]
    assert all(blocks) and pool.alloc(1) is None and pool.pinned_bytes == 8 * MIB
    for block in blocks:
        pool.free(block)
    pool.close()


def test_what_others_allocate_is_charged(npu):
    pool = HostPool(npu, 8 * MIB)
    assert not pool.charge(9 * MIB) and pool.charge(5 * MIB)
    assert pool.budget_bytes == 3 * MIB and pool.alloc(4 * MIB) is None and pool.alloc(2 * MIB) is not None
    pool.close()


def test_slabs_that_grow_do_not_pile_up(npu):
    before = locked_bytes()
    pool = HostPool(npu, 64 * MIB)
    for size in (9, 17, 33, 60):
        block = pool.alloc(size * MIB)
        assert pool.pinned_bytes == locked_bytes() - before  # of a power of two, all of which can be used
        pool.free(block)
        del block
    assert pool.pinned_bytes == 64 * MIB and pool.slab_count == 1
    pool.close()


def test_a_plan_is_reserved_as_far_as_the_budget_allows(npu):
    pool = HostPool(npu, 48 * MIB)
    assert pool.reserve(20 * MIB) and pool.pinned_bytes == 32 * MIB
    assert not pool.reserve(50 * MIB) and pool.pinned_bytes == 32 * MIB
    pool.close()


def test_copies_run_while_the_host_goes_on(npu):
    pool, stream, source = HostPool(npu, 8 * MIB), npu.new_stream(), on_device(3)
    block = pool.alloc(NBYTES)
    block.tensor.zero_()
    torch.npu.synchronize()
    fake.fakecann_set_link(SLOW, SLOW)
    npu.copy(block.tensor, source.view(torch.uint8), stream)
    event = npu.record(stream)
    assert not npu.done(event), "the copy was waited for by the host"
    assert not torch.equal(block.tensor.view(torch.float32), content(3))
    npu.synchronize(event)
    assert npu.done(event) and torch.equal(block.tensor.view(torch.float32), content(3))
    start = npu.record(stream)
    back = npu.empty(NBYTES)
    npu.wait(stream, npu.record(npu.compute_stream()))
    npu.copy(back, block.tensor, stream)
    npu.wait(npu.compute_stream(), npu.record(stream))
    assert torch.equal(back.cpu().view(torch.float32), content(3))
    end = npu.record(stream)
    npu.synchronize(end)
    assert npu.elapsed_ms(start, end) > 50
    pool.free(block)
    pool.close()


def test_a_freed_block_names_the_copies_that_use_it(npu):
    pool, stream, source = HostPool(npu, NBYTES), npu.new_stream(), marked(NBYTES, 7)
    block = pool.alloc(NBYTES)
    torch.npu.synchronize()
    fake.fakecann_set_link(SLOW, 0)
    npu.copy(block.tensor, source, stream)
    event = npu.record(stream)
    pool.free(block, event)
    again = pool.alloc(NBYTES)
    assert again.pending == (event,)
    npu.synchronize(event)
    pool.free(again)
    pool.close()
