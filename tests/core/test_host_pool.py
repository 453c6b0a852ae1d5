"""Host pool: exact bytes, no pinning in the hot path, stream-ordered reuse, one budget."""
import gc
import mmap
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mindspeed_swap.core import host_pool
from mindspeed_swap.core.host_pool import ALIGNMENT, SLAB_BYTES, HostPool
from mindspeed_swap.units import GIB, MIB


class Device:
    """Registers, and says of an event whether it has passed; nothing else."""

    def __init__(self):
        self.registered, self.passed, self.refuse = {}, set(), False

    def page_locked(self, nbytes):
        return None

    def slab_bytes(self, nbytes):
        return nbytes

    def register_host(self, address, nbytes):
        if self.refuse:
            raise RuntimeError("driver says no")
        assert address % mmap.PAGESIZE == 0
        self.registered[address] = nbytes

    def unregister_host(self, address):
        del self.registered[address]

    def done(self, event):
        return event in self.passed

    def synchronize(self, event=None):
        pass


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def weightless(monkeypatch):
    """Slabs without memory, for tests of how much is pinned, not of what is in it."""

    class Slab:
        tensor = torch.empty(0, dtype=torch.uint8)
        _addresses = iter(range(1, 1 << 30))

        def __init__(self, nbytes, accelerator):
            self.nbytes, self.free, self.free_ends, self.marks = nbytes, {}, {}, []
            self.address = next(self._addresses) * mmap.PAGESIZE
            accelerator.register_host(self.address, nbytes)

    monkeypatch.setattr(host_pool, "Slab", Slab)


def check_consistent(pool):
    """Free regions tile what is neither out nor kept for the next request of its size, no two touch, marks lie in free
    regions, the sorted list tells the same."""
    listed = sorted((id(slab), start, start + size) for size, _, slab, start in pool._regions)
    assert [r[:2] for r in pool._regions] == sorted(r[:2] for r in pool._regions)
    assert listed == sorted((id(s), start, end) for s in pool._slabs for start, (end, _) in s.free.items())
    for slab in pool._slabs:
        assert slab.free_ends == {end: start for start, (end, _) in slab.free.items()}
        assert not set(slab.free) & set(slab.free_ends), "neighbours did not coalesce"
        last = 0
        for start, end, events in slab.marks:
            assert last <= start < end and events
            assert any(a <= start and end <= b for a, (b, _) in slab.free.items())
            last = end


# ---- bytes
def test_block_is_host_memory_of_exactly_the_bytes_asked(device):
    pool = HostPool(device, 64 * MIB)
    blocks = [pool.alloc(n) for n in (1, 511, 512, 513, 1_000_003)]
    assert [b.tensor.numel() for b in blocks] == [b.nbytes for b in blocks] == [1, 511, 512, 513, 1_000_003]
    for i, block in enumerate(blocks):
        assert block.tensor.dtype == torch.uint8 and block.tensor.dim() == 1 and block.tensor.is_contiguous()
        assert block.tensor.data_ptr() % ALIGNMENT == 0 and block.pending == ()
        block.tensor.fill_(i + 1)
    assert all(bool((b.tensor == i + 1).all()) for i, b in enumerate(blocks))
    assert pool.used_bytes == pool.peak_used_bytes == sum(b.nbytes for b in blocks)
    (address, nbytes), = device.registered.items()
    assert nbytes == pool.pinned_bytes
    assert all(address <= b.tensor.data_ptr() <= address + nbytes - b.nbytes for b in blocks)
    with pytest.raises(ValueError):
        pool.alloc(0)
    pool.close()


def test_slab_made_in_inference_mode_can_be_written_outside(device):
    pool = HostPool(device, 64 * MIB)
    with torch.inference_mode():
        pool.reserve(MIB)
    pool.alloc(100).tensor.copy_(torch.ones(100, dtype=torch.uint8))
    pool.close()


@pytest.mark.parametrize(
    ("low", "high"),
    [(1, 40 * MIB), (1, 8 * MIB), (20 * MIB, 60 * MIB), (33 * MIB + 1,) * 2, (1000, 200 * MIB), (5 * MIB, 9 * MIB)],
)
def test_case_27_odd_sizes_pin_what_was_asked(device, weightless, low, high):
    rng, pool = random.Random(27), HostPool(device, 64 * GIB)
    asked = 0
    while asked < 5 * GIB:
        size = rng.randint(low, high)
        assert pool.alloc(size) is not None
        asked += size
    assert pool.used_bytes == asked
    assert asked <= pool.pinned_bytes <= 1.05 * asked
    assert sum(device.registered.values()) == pool.pinned_bytes


def test_case_27_power_of_two_plus_one_with_real_memory(device):
    pool = HostPool(device, GIB)
    block = pool.alloc(128 * MIB + 1)
    assert block.nbytes <= pool.pinned_bytes <= block.nbytes + mmap.PAGESIZE
    block.tensor[-1] = 7
    pool.close()


# ---- the hot path
def train_step(pool, sizes):
    blocks = [pool.alloc(n) for n in sizes]
    assert None not in blocks
    for block in reversed(blocks):
        pool.free(block)


def test_case_28_no_host_allocation_after_step_3(device, weightless):
    pool = HostPool(device, 64 * GIB)
    sizes = [int(s * MIB) for _ in range(8) for s in (64, 64.3, 192, 0.7, 344, 1.01, 172)]
    counts = []
    for _ in range(12):
        train_step(pool, sizes)
        counts.append(pool.allocations)
    assert len(set(counts[2:])) == 1
    assert len(device.registered) == pool.slab_count


def test_case_28_reserve_pins_once_for_the_whole_step(device, weightless):
    pool = HostPool(device, 64 * GIB)
    sizes = [40 * MIB + 1] * 30 + [3 * MIB] * 30
    assert pool.reserve(sum(-(-s // ALIGNMENT) * ALIGNMENT for s in sizes))
    assert pool.allocations == pool.slab_count == 1
    for _ in range(5):
        train_step(pool, sizes)
    assert pool.allocations == 1
    assert pool.reserve(GIB) and pool.allocations == 1, "what is there counts"


def test_case_28_reserved_for_blocks_that_tails_of_slabs_are_too_small_for(device, weightless):
    pool = HostPool(device, 64 * GIB)
    train_step(pool, [40 * MIB, 3 * MIB])  # slabs of 40 and of 64 MiB
    sizes = [50 * MIB, 61 * MIB, 61 * MIB, 2 * MIB]
    assert pool.reserve(sum(sizes), sizes)
    allocations = pool.allocations
    assert pool.pinned_bytes == (40 + 64 + 122) * MIB
    train_step(pool, sizes)
    assert pool.allocations == allocations
    assert pool.reserve(sum(sizes), sizes) and pool.allocations == allocations
    assert pool.reserve(120 * MIB, [*sizes, 500 * MIB]) and pool.allocations == allocations, "those that fit in that"
    check_consistent(pool)


@pytest.mark.parametrize("together", [True, False], ids=["whole step varies", "each tensor varies"])
def test_case_30_jitter_does_not_grow_the_pool(device, weightless, together):
    rng, pool = random.Random(30), HostPool(device, 64 * GIB)
    pinned = []
    for _ in range(200):
        factor = rng.uniform(0.7, 1.3)
        factors = [factor if together else rng.uniform(0.7, 1.3) for _ in range(128)]
        train_step(pool, [int(mib * MIB * f) for mib, f in zip((6, 20, 2, 40) * 32, factors, strict=True)])
        check_consistent(pool)
        pinned.append(pool.pinned_bytes)
    assert pinned[-1] <= 1.25 * pool.peak_used_bytes
    assert pinned[-1] <= 1.1 * pinned[20]
    assert sum(device.registered.values()) == pool.pinned_bytes


def test_case_30_reserved_for_the_largest_step_is_flat_at_once(device, weightless):
    rng, pool = random.Random(31), HostPool(device, 64 * GIB)
    base = [6, 20, 2, 40] * 32
    pool.reserve(int(1.35 * MIB * sum(base)))
    for _ in range(50):
        factor = rng.uniform(0.7, 1.3)
        train_step(pool, [int(mib * MIB * factor) for mib in base])
    assert pool.allocations == 1


def test_growing_requests_replace_idle_slabs(device, weightless):
    pool = HostPool(device, 64 * GIB)
    for mib in range(100, 200):
        train_step(pool, [mib * MIB])
        assert pool.pinned_bytes == mib * MIB and pool.slab_count == 1


# ---- order
def test_freed_memory_is_reused_at_once_and_says_what_to_wait_for(device):
    pool = HostPool(device, MIB)
    first = pool.alloc(1000)
    address = first.tensor.data_ptr()
    pool.free(first, "copy out")
    again = pool.alloc(1024)
    assert again.tensor.data_ptr() == address and again.pending == ("copy out",)
    device.passed.add("copy out")
    pool.free(again, "copy in")
    device.passed.add("copy in")
    assert pool.alloc(1024).pending == ()
    pool.close()


def test_coalesced_region_gives_the_events_of_the_bytes_taken(device):
    pool = HostPool(device, MIB)
    blocks = [pool.alloc(1024) for _ in range(4)]
    rest = pool.alloc(pool.pinned_bytes - 4096)
    for i in (2, 0, 3, 1):
        pool.free(blocks[i], f"e{i}")
    check_consistent(pool)
    device.passed.add("e1")
    assert pool.alloc(2560).pending == ("e0", "e2"), "undone ones of the first 2.5 blocks"
    assert pool.alloc(512).pending == ("e2",), "the rest of a cut mark"
    assert pool.alloc(1024).pending == ("e3",)
    assert rest is not None and pool.used_bytes == pool.pinned_bytes
    pool.close()


def test_block_never_used_keeps_its_pending_events(device):
    pool = HostPool(device, MIB)
    pool.free(pool.alloc(1024), "slow")
    block = pool.alloc(1024)
    assert block.pending == ("slow",)
    pool.free(block)  # abandoned: nobody waited
    assert pool.alloc(1024).pending == ("slow",)
    pool.close()


def test_the_next_of_the_same_bytes_takes_its_place_another_makes_regions_of_all(device):
    pool = HostPool(device, MIB)
    blocks = [pool.alloc(1000) for _ in range(4)]
    addresses = [block.tensor.data_ptr() for block in blocks]
    rest = pool.alloc(pool.pinned_bytes - 4096)
    for i in (2, 0, 1, 3):
        pool.free(blocks[i], f"e{i}")
    again = pool.alloc(1000)
    assert again.tensor.data_ptr() == addresses[2] and again.pending == ("e2",) and again.nbytes == 1000
    pool.free(again)
    assert pool.alloc(4096).pending == ("e0", "e1", "e2", "e3") and rest is not None, "all four, in one piece"
    pool.close()


def test_a_freed_block_answers_a_request_that_is_a_little_smaller(device):
    """What an expert saves differs from step to step."""
    pool = HostPool(device, MIB)
    sizes = (9000, 8500, 8800, 8438)
    block, address = pool.alloc(9000), None
    for number, nbytes in enumerate(sizes):
        address = address or block.tensor.data_ptr()
        pool.free(block, f"e{number}")
        block = pool.alloc(nbytes)
        assert block.tensor.data_ptr() == address and block.tensor.numel() == block.nbytes == nbytes == pool.used_bytes
        assert block.pending[-1] == f"e{number}"
    pool.free(block)
    small = pool.alloc(8192)
    assert small.nbytes == 8192, "of 9000 too much would be lost: it is cut anew"
    rest = pool.alloc(pool.pinned_bytes - 8192)
    assert rest is not None and pool.slab_count == 1, "so there is room for all but these bytes"
    pool.close()


def test_a_block_that_fits_exactly_is_taken_however_little_slack_is_left(device, weightless):
    """A budget may fall below what it was when blocks a little too large were handed out."""
    pool = HostPool(device, GIB)
    kept, other = pool.alloc(64 * MIB), pool.alloc(8 * MIB)
    pool.free(kept)
    kept = pool.alloc(61 * MIB)
    pool.free(other, "copy")
    assert pool.charge(pool.budget_bytes - 80 * MIB), "3 MiB of slack are more than a part of that"
    pool._settle = None  # no regions are to be made
    assert pool.alloc(8 * MIB).pending == ("copy",) and kept is not None


@pytest.mark.parametrize("small", [MIB, MIB // 2])
def test_of_smaller_and_more_blocks_as_much_fits_as_plans_count_on(device, weightless, small):
    """What blocks take beyond what was asked for is bounded, however many they are."""
    pool, need = HostPool(device, GIB), int(0.95 * GIB)
    blocks = [pool.alloc(1600 * 1024) for _ in range(need // (1600 * 1024))]
    count = len(blocks)
    for block in blocks:
        pool.free(block)
    wanted = [1500 * 1024 + 512] * count
    wanted += [small] * ((need - sum(wanted)) // small)
    assert all(pool.alloc(nbytes) is not None for nbytes in wanted)


def test_equal_regions_are_reused_oldest_first(device, weightless):
    pool = HostPool(device, GIB)
    blocks = [pool.alloc(20 * MIB) for _ in range(3)]
    for i in (1, 2, 0):
        pool.free(blocks[i], f"e{i}")
    assert [pool.alloc(20 * MIB).pending for _ in range(3)] == [("e1",), ("e2",), ("e0",)]


def test_slab_with_a_running_copy_is_not_given_back(device, weightless):
    pool = HostPool(device, GIB)
    pool.free(pool.alloc(100 * MIB), "copy")
    big = pool.alloc(200 * MIB)
    assert pool.slab_count == 2
    device.passed.add("copy")
    pool.free(big)
    pool.alloc(320 * MIB)
    assert pool.slab_count == 1 and pool.pinned_bytes == 320 * MIB


def test_events_of_the_past_are_dropped(device):
    pool = HostPool(device, MIB)
    for i in range(500):
        block = pool.alloc(1024)
        device.passed.add(i)
        pool.free(block, i)
        pool.free(pool.alloc(2048), None)
    assert sum(len(s.marks) for s in pool._slabs) == 0
    pool.close()


def test_double_free_and_use_after_free_are_errors(device):
    pool = HostPool(device, MIB)
    block = pool.alloc(10)
    pool.free(block)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(block)
    with pytest.raises(RuntimeError, match="after it was freed"):
        _ = block.tensor
    pool.close()


# ---- budget
def test_budget_is_kept_and_none_is_the_answer(device, weightless):
    pool = HostPool(device, 100 * MIB)
    blocks = []
    while (block := pool.alloc(7 * MIB)) is not None:
        blocks.append(block)
        assert pool.pinned_bytes <= pool.budget_bytes
    assert len(blocks) >= 13, "a small budget is usable"
    assert pool.alloc(101 * MIB) is None and not pool.reserve(101 * MIB)
    pool.free(blocks.pop())
    assert pool.alloc(7 * MIB) is not None


def test_whole_budget_in_one_block_replaces_idle_slabs(device, weightless):
    pool = HostPool(device, 100 * MIB)
    train_step(pool, [MIB] * 90)
    kept = pool.alloc(1)
    before = pool.pinned_bytes, pool.slab_count
    assert pool.alloc(100 * MIB) is None
    assert (pool.pinned_bytes, pool.slab_count) == before, "a request that cannot be met costs nothing"
    pool.free(kept)
    assert pool.alloc(100 * MIB) is not None and pool.pinned_bytes == 100 * MIB


@pytest.mark.parametrize("budget", [0, 1, mmap.PAGESIZE - 1, -5])
def test_budget_below_a_page_gives_nothing(device, budget):
    pool = HostPool(device, budget)
    assert pool.alloc(1) is None and pool.pinned_bytes == 0
    pool.close()


def test_budget_of_a_page_gives_a_page(device):
    pool = HostPool(device, mmap.PAGESIZE)
    assert pool.alloc(mmap.PAGESIZE) is not None and pool.alloc(1) is None
    pool.close()


def test_default_slab(device, weightless):
    pool = HostPool(device, 64 * GIB)
    pool.alloc(1)
    assert pool.pinned_bytes == SLAB_BYTES


def test_driver_refusal_is_one_line_and_a_smaller_budget(device, capsys):
    pool = HostPool(device, 64 * MIB)
    block = pool.alloc(MIB)
    pinned, device.refuse = pool.pinned_bytes, True
    assert pool.alloc(30 * MIB) is None and pool.alloc(30 * MIB) is None
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "driver says no" in out
    assert pool.budget_bytes == pool.pinned_bytes == pinned
    pool.free(block)
    assert pool.alloc(MIB) is not None, "what is there goes on working"
    pool.close()


# ---- the end
def test_close_unregisters_all_and_leaves_memory_of_blocks_that_are_out(device):
    pool = HostPool(device, 64 * MIB)
    blocks = [pool.alloc(5 * MIB) for _ in range(4)]
    blocks[0].tensor.fill_(3)
    pool.close()
    pool.close()
    assert device.registered == {} and pool.pinned_bytes == 0
    assert bool((blocks[0].tensor == 3).all())
    pool.free(blocks[0])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks[0])
    with pytest.raises(RuntimeError, match="closed"):
        pool.alloc(1)


def test_close_tries_every_slab_even_if_the_device_fails(device):
    pool = HostPool(device, 64 * MIB)
    for _ in range(3):
        pool.alloc(9 * MIB)

    def fail(event=None):
        raise RuntimeError("device lost")

    device.synchronize = fail
    with pytest.raises(RuntimeError, match="device lost"):
        pool.close()
    assert device.registered == {}


def test_a_pool_that_is_dropped_unregisters_too(device):
    """Else the addresses, mapped anew, could not be registered again (CUDA error 712)."""
    pool = HostPool(device, 64 * MIB)
    pool.alloc(5 * MIB)
    assert device.registered
    del pool
    gc.collect()
    assert device.registered == {}


def test_unmapped_when_the_last_block_dies(device):
    pool = HostPool(device, 64 * MIB)
    block = pool.alloc(9 * MIB)
    address = f"{block.tensor.data_ptr():x}-"
    pool.close()
    assert address in Path("/proc/self/maps").read_text()
    del block
    assert address not in Path("/proc/self/maps").read_text()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_neither_has_the_memory_nor_unregisters_it(device):
    pool = HostPool(device, 64 * MIB)
    block = pool.alloc(MIB)
    address = f"{block.tensor.data_ptr():x}-"
    child = os.fork()
    if child == 0:
        mapped = address in Path("/proc/self/maps").read_text()
        pool.close()
        os._exit(1 if mapped or not device.registered else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


# ---- many at once
def test_threads(device):
    pool, failures = HostPool(device, 256 * MIB), []

    def work(seed):
        rng, mine = random.Random(seed), []
        try:
            for _ in range(400):
                if mine and rng.random() < 0.5:
                    block, value = mine.pop(rng.randrange(len(mine)))
                    assert bool((block.tensor == value).all())
                    pool.free(block)
                elif (block := pool.alloc(rng.randint(1, 300_000))) is not None:
                    value = rng.randint(0, 255)
                    block.tensor.fill_(value)
                    mine.append((block, value))
            for block, _ in mine:
                pool.free(block)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == [] and pool.used_bytes == 0
    pool._settle()
    check_consistent(pool)
    assert all(s.free.keys() == {0} and s.free[0][0] == s.nbytes for s in pool._slabs)
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    """Against a model that knows, byte range by byte range, which undone events must be waited for."""

    @initialize(budget=st.sampled_from([40_000, 300_000, 5_000_000]))
    def start(self, budget):
        self.device = Device()
        self.pool = HostPool(self.device, budget)
        self.out = []  # (block, address, value)
        self.busy = []  # (address, end, event) of freed ranges
        self.events = 0

    @rule(
        size=st.one_of(st.sampled_from([1000, 5000, 9000]), st.integers(1, 3000), st.integers(1, 400_000)),
        value=st.integers(0, 255),
    )
    def alloc(self, size, value):
        block = self.pool.alloc(size)
        if block is None:
            return
        start = block.tensor.data_ptr()
        assert size <= block._size < size * 1.1, "it may have been a little larger when it was freed"
        end = start + -(-block._size // ALIGNMENT) * ALIGNMENT
        for other, address, _ in self.out:
            assert end <= address or address + other.nbytes <= start, "two blocks share bytes"
        must_wait = {e for a, b, e in self.busy if a < end and start < b and e not in self.device.passed}
        assert set(block.pending) == must_wait
        block.tensor.fill_(value)
        self.out.append((block, start, value))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), with_event=st.booleans())
    def free(self, data, with_event):
        block, start, value = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        assert bool((block.tensor == value).all()), "someone else wrote here"
        end = start + -(-block._size // ALIGNMENT) * ALIGNMENT
        self.busy += [(start, end, e) for e in block.pending]
        event = None
        if with_event:
            self.events += 1
            event = self.events
            self.busy.append((start, end, event))
        self.pool.free(block, event)

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def event_passes(self, data):
        self.device.passed.add(data.draw(st.integers(1, self.events)))

    @rule(nbytes=st.integers(0, 500_000))
    def reserve(self, nbytes):
        if self.pool.reserve(nbytes):
            assert self.pool.pinned_bytes >= nbytes

    @rule(blocks=st.lists(st.integers(1, 100_000), max_size=6))
    def reserve_for_blocks(self, blocks):
        self.pool.reserve(sum(blocks) + self.pool.used_bytes, blocks)

    @invariant()
    def figures(self):
        pool = self.pool
        check_consistent(pool)
        assert pool.used_bytes == sum(b.nbytes for b, _, _ in self.out)
        assert pool.used_bytes <= pool.pinned_bytes <= pool.budget_bytes
        assert sum(self.device.registered.values()) == pool.pinned_bytes
        free = sum(end - start for s in pool._slabs for start, (end, _) in s.free.items())
        taken = sum(-(-b._size // ALIGNMENT) * ALIGNMENT for b, _, _ in self.out)
        kept = sum(-(-n // ALIGNMENT) * ALIGNMENT * len(blocks) for n, blocks in pool._freed.items())
        assert free + kept + taken == pool.pinned_bytes

    def teardown(self):
        for block, _, _ in self.out:
            self.pool.free(block)
        self.pool._settle()
        assert all(s.free == {0: (s.nbytes, s.free[0][1])} for s in self.pool._slabs), "not everything came back"
        self.pool.close()
        assert self.device.registered == {}


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_random_use = PoolMachine.TestCase
