"""State comes in during the last backward and leaves during the next forward: same bits and memory, fewer waits."""
from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from adams import MAKES, attach, differences, same
from overlapped import LAYERS, WIDTH, Training

from mindspeed_swap.core.accelerator.sim import COMPUTE
from mindspeed_swap.core.saved_tensor import State
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.sim import device
from mindspeed_swap.virtual_optimizer.overlap import (
    BACKWARD,
    BEGIN,
    END,
    FORWARD,
    OPTIMIZER,
    Overlap,
    Room,
)
from mindspeed_swap.virtual_optimizer.swap_tensor import to_host
from mindspeed_swap.virtual_optimizer.waits import Wait

STATE_BYTES = 2 * LAYERS * WIDTH * WIDTH * 4
SLOW = 0.01  # 10^7 bytes per second: the state takes 80 ms each way
FAST = 0.0  # at once


def trained(sim, overlaps, steps=4, **settings):
    training = Training(sim, overlaps, **settings)
    for _ in range(steps):
        training.step()
    return training


@pytest.fixture
def slow_link():
    device.set_link(SLOW, SLOW)


# ---- bits
@pytest.mark.parametrize("make", MAKES)
def test_same_bits(sim, slow_link, late_writes, make):
    ours = trained(sim, True, make=make)
    assert ours.pipeline.early_bytes > 0 and ours.pipeline.late_bytes > 0
    assert differences(ours.optimizer, trained(sim, None, make=make).optimizer) == []


def test_a_step_that_is_left_out(sim, slow_link, late_writes):
    """Gradients that are not finite: what came in is of no use."""
    ours, plain = trained(sim, True), trained(sim, None)
    for training in (ours, plain):
        training.step(update=False)
    assert ours.pipeline.held_bytes == 0
    for training in (ours, plain):
        training.step()
        training.step()
    assert differences(ours.optimizer, plain.optimizer) == []


def test_a_step_of_another_course(sim, slow_link, late_writes):
    """A microbatch more, an error in the midst, a step without: all go on right, and without memory of ours."""
    ours, plain = trained(sim, True), trained(sim, None)
    assert ours.pipeline.held_bytes > 0
    with pytest.raises(ArithmeticError), ours.overlap.step(True):
        with ours.overlap.forward():
            ours.forward().backward()
        raise ArithmeticError
    assert ours.pipeline.held_bytes == 0
    with ours.overlap.step(True):
        pass
    for training in (ours, plain):
        training.step()
        training.step()
    assert differences(ours.optimizer, plain.optimizer) == []


def test_two_optimizers_share_the_room(sim, slow_link, late_writes):
    """As Megatron has one for experts: what one holds the other may not. (The first is stepped first.)"""

    def trained_by_two(overlaps):
        gc.collect()
        base = device.memory_allocated()
        training = Training(sim, None)
        weights = training.weights
        training.optimizers = [MAKES["adamw-fused"]([{"params": part}]) for part in (weights[:3], weights[3:])]
        virtual = None if overlaps is None else attach(sim, *training.optimizers)
        if virtual:
            training.overlap, training.active = virtual.overlap, overlaps
        for _ in range(4):
            device.reset_peak()
            training.step()
        return training.optimizers, device.max_memory_allocated() - base, virtual.summary() if virtual else {}

    plain, _, _ = trained_by_two(None)
    _, peak, _ = trained_by_two(False)
    ours, overlapped_peak, figures = trained_by_two(True)
    assert figures["came_early_bytes"] > STATE_BYTES // 2 and figures["left_late_bytes"] > 0
    assert overlapped_peak <= peak
    assert all(differences(a, b) == [] for a, b in zip(ours, plain, strict=True))


def test_what_one_optimizer_keeps_the_other_may_not(sim):
    first, second = (SimpleNamespace(held_bytes=held, slice_bytes=0) for held in (30, 10))
    overlap = Overlap(sim, [first, second])
    overlap._room, overlap._point = SimpleNamespace(free_bytes=50), lambda kind: None
    overlap._active = True
    assert (overlap.may_keep(first), overlap.may_keep(second)) == (40, 20)


# ---- who looks into the state
LOOKS = {
    "read": lambda optimizer, p: optimizer.state[p]["exp_avg"].clone(),
    "get": lambda optimizer, p: optimizer.state.get(p)["exp_avg"].clone(),
    "values": lambda optimizer, p: [entry["exp_avg"].clone() for entry in optimizer.state.values()][0],
    "state_dict": lambda optimizer, p: optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    "copied": lambda optimizer, p: list(copy.copy(optimizer.state).values())[0]["exp_avg"].clone(),
    "dict": lambda optimizer, p: dict(optimizer.state)[p]["exp_avg"].clone(),
    "unpacked": lambda optimizer, p: {**optimizer.state}[p]["exp_avg"].clone(),
    "or": lambda optimizer, p: (optimizer.state | {})[p]["exp_avg"].clone(),
    "ror": lambda optimizer, p: ({} | optimizer.state)[p]["exp_avg"].clone(),
    "setdefault": lambda optimizer, p: optimizer.state.setdefault(p, {})["exp_avg"].clone(),
    "keys": lambda optimizer, p: (optimizer.state.keys(), dict.__getitem__(optimizer.state, p))[1]["exp_avg"].clone(),
    "popitem": lambda optimizer, p: optimizer.state.popitem()[1]["exp_avg"].clone(),
    "pickled": lambda optimizer, p: list(pickle.loads(pickle.dumps(optimizer.state)).values())[0]["exp_avg"].clone(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_what_the_step_has_written(sim, look):
    device.set_link(SLOW, FAST)
    ours, plain = trained(sim, True), trained(sim, None)
    assert ours.pipeline.late_bytes > 0
    # the last one is the one that leaves last
    at = 0 if look in ("values", "state_dict", "copied", "pickled") else -1
    found = LOOKS[look](ours.optimizer, ours.weights[at])
    assert same(found, plain.optimizer.state[plain.weights[at]]["exp_avg"])
    assert ours.pipeline.held_bytes == 0


def test_what_is_changed_after_state_came_in_counts(sim, slow_link):
    ours, plain = trained(sim, True), trained(sim, None)

    def halve(optimizer, *args):
        for entry in optimizer.state.values():
            entry["exp_avg"].mul_(0.5)

    for training in (ours, plain):
        training.optimizer.register_step_pre_hook(halve)
        training.step()
    assert differences(ours.optimizer, plain.optimizer) == []


def test_a_kept_tensor_is_read_by_to_host(sim):
    device.set_link(SLOW, FAST)
    ours, plain = trained(sim, True, steps=1), trained(sim, None, steps=1)
    kept = ours.optimizer.state[ours.weights[-1]]["exp_avg"]
    for training in (ours, plain):
        for _ in range(3):
            training.step()
    assert ours.pipeline.held_bytes > 0
    assert same(to_host(kept), plain.optimizer.state[plain.weights[-1]]["exp_avg"])
    assert ours.pipeline.held_bytes == 0


def test_main_parameters_changed_after_the_backward_count(sim, slow_link):
    """Anybody may write to a parameter, so it never comes in ahead of the step."""
    ours, plain = (trained(sim, overlaps, master=True) for overlaps in (True, None))

    def shrink(optimizer, *args):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)

    for training in (ours, plain):
        training.optimizer.register_step_pre_hook(shrink)
        for _ in range(3):
            training.step()
    assert ours.pipeline.early_bytes == ours.pipeline.late_bytes == 0
    assert differences(ours.optimizer, plain.optimizer) == []


def test_loaded_while_state_leaves(sim, slow_link):
    source = trained(sim, None, steps=2)
    file = io.BytesIO()
    torch.save(source.optimizer.state_dict(), file)
    ours, plain = Training(sim, None), trained(sim, None)
    virtual = attach(sim, ours.optimizer)
    ours.overlap, ours.active = virtual.overlap, True
    for _ in range(4):
        ours.step()
    for training in (ours, plain):
        file.seek(0)
        if training is ours:
            assert virtual.overlap._held > 0
        training.optimizer.load_state_dict(torch.load(file))
        for _ in range(3):
            training.step()
    assert virtual.summary()["came_early_bytes"] > 0
    assert differences(ours.optimizer, plain.optimizer) == []


# ---- memory
def test_the_peak_does_not_rise(sim, slow_link):
    peaks = {}
    for overlaps in (False, True):
        gc.collect()
        base = device.memory_allocated()
        training = trained(sim, overlaps)
        device.reset_peak()
        training.step()
        training.step()
        peaks[overlaps] = device.max_memory_allocated() - base
        early, late = training.pipeline.early_bytes, training.pipeline.late_bytes
        del training
    assert peaks[True] <= peaks[False]
    assert early == STATE_BYTES  # the activations are larger: all of it fits in what they leave
    assert 0 < late <= STATE_BYTES  # what has left by then is not counted


def test_memory_is_lower_by_what_moved_once_it_has_left(sim, monkeypatch):
    """At a step's end state is on its way out; when the next forward ends it is gone, to the byte."""
    device.set_link(FAST, FAST)
    # Whatever a busy machine takes: a copy that is asked for is over.
    monkeypatch.setattr(sim, "done", lambda event: sim.synchronize(event) or True)

    def at_the_end_of_forward(overlaps):
        gc.collect()
        base = device.memory_allocated()
        training = trained(sim, overlaps)
        left_late = training.pipeline.late_bytes if overlaps else 0
        with training.overlap.step(True) if overlaps else nullcontext():
            for weight in training.weights:
                weight.grad = None
            with training.overlap.forward() if overlaps else nullcontext():
                value = training.forward()
            used = device.memory_allocated() - base
            value.backward()
        return used, left_late

    used, left_late = at_the_end_of_forward(True)
    assert left_late == STATE_BYTES
    assert at_the_end_of_forward(None)[0] - used == STATE_BYTES


def test_within_a_cap_where_nothing_else_would_fit(sim, slow_link):
    gc.collect()
    plain = trained(sim, False)
    device.reset_peak()
    plain.step()
    cap = device.max_memory_allocated()
    del plain
    gc.collect()
    failed = []
    sim.on_pressure(lambda nbytes, attempt: failed.append(nbytes))
    device.set_capacity(cap)
    ours = trained(sim, True, steps=6)
    assert ours.pipeline.early_bytes > 0
    assert failed == []  # no buffer was asked for where there was no room


def test_memory_is_given_up_under_pressure(sim, slow_link, late_writes):
    ours, plain = trained(sim, True), trained(sim, None)
    held = ours.pipeline.held_bytes
    assert held > 0
    gc.collect()  # of earlier tests
    sim.on_pressure(lambda nbytes, attempt: ours.overlap.give_up() > 0)
    device.set_capacity(device.memory_allocated() + held // 4)
    large = torch.empty(held, dtype=torch.uint8)
    assert ours.pipeline.held_bytes == 0
    del large
    device.set_capacity(64 << 30)
    device.synchronize()

    given_up = []

    def want_memory(optimizer):  # in the step, with all that came ahead
        if given_up:
            return
        given_up.append(ours.pipeline.held_bytes)
        device.set_capacity(device.memory_allocated() + held // 4)
        torch.empty(held // 2, dtype=torch.uint8)
        device.set_capacity(64 << 30)

    ours.step()
    plain.step()
    own_step = ours.streamed._own_step
    ours.streamed._own_step = lambda optimizer: (want_memory(optimizer), own_step(optimizer))
    ours.step()
    plain.step()
    assert given_up[0] > 0
    assert differences(ours.optimizer, plain.optimizer) == []


def test_a_step_without_an_update_tells_nothing_of_what_one_needs(sim, slow_link):
    """What the update itself allocates is not seen in a step that has none: the next ones must not count on that."""
    gc.collect()
    peaks = {}
    for overlaps in (False, True):
        base = device.memory_allocated()
        training = Training(sim, overlaps)
        own_step = training.streamed._own_step
        training.streamed._own_step = lambda optimizer, own_step=own_step: (
            torch.empty(5 * STATE_BYTES, dtype=torch.uint8), own_step(optimizer),
        )  # fmt: skip
        for number in range(8):
            if number >= 6:
                device.reset_peak()
            training.step(update=number not in (4, 5))
            peaks[overlaps, number] = device.max_memory_allocated() - base
        del training
        gc.collect()
    assert peaks[True, 6] <= peaks[False, 6] and peaks[True, 7] <= peaks[False, 7]


def test_after_an_allocation_has_failed_again_steps_go_without_more_and_more_of_them(sim, slow_link):
    ours, early = trained(sim, True), []
    for _ in range(16):
        ours.step()
        early.append(ours.pipeline.early_bytes > 0)
        if ours.pipeline.held_bytes:
            assert ours.overlap.give_up() > 0
    # learns anew; one without, and learns anew; two without ...
    assert early == [True, False, True, False, False, True, False, False, False, True] + [False] * 5 + [True]


def test_a_step_keeps_the_buffers_that_it_needs(sim):
    ours = Training(sim, True)
    own_step, freed = ours.streamed._own_step, []
    ours.streamed._own_step = lambda optimizer: (freed.append(ours.pipeline.give_up()), own_step(optimizer))
    ours.step()
    assert freed and not any(freed)


# ---- time
@pytest.mark.parametrize("waited_for", [False, True])
def test_copies_out_begin_in_the_step_only_while_copies_in_are_waited_for(sim, monkeypatch, waited_for):
    """Else a figure that the trainer reads from the device at the step's end would come behind all of them."""
    device.set_link(FAST, FAST)
    training = trained(sim, True)
    begun, copy_ = [], sim.copy
    step = training.optimizer.step

    def watched_step():
        assert training.pipeline.held_bytes > 0
        monkeypatch.setattr(sim, "copy", lambda dst, src, stream: begun.append(stream) or copy_(dst, src, stream))
        sim.synchronize()  # whatever a busy machine takes
        if waited_for:
            monkeypatch.setattr(sim, "done", lambda event: False)
        step()
        monkeypatch.undo()

    training.optimizers = [SimpleNamespace(step=watched_step)]
    training.step()
    out = [stream for stream in begun if stream == training.pipeline._d2h]
    assert bool(out) is waited_for
    assert training.pipeline.late_bytes > 0
    plain = trained(sim, None, steps=5)
    assert differences(training.optimizer, plain.optimizer) == []


def test_compute_waits_less(sim):
    """Layers take long enough for all of the state to pass meanwhile."""

    class Watching(type(sim)):
        waited = 0.0

        def wait(self, stream, event):
            start = time.perf_counter()
            super().wait(stream, event)
            if stream == COMPUTE:
                self.waited += time.perf_counter() - start

    waited = {}
    device.set_link(0.01, 0.01)  # 80 ms each way
    for overlaps in (False, True):
        accelerator = Watching()
        training = trained(accelerator, overlaps, steps=3, layer_seconds=0.02)
        accelerator.waited = 0.0
        training.step()
        training.step()
        waited[overlaps] = accelerator.waited / 2
    print(f"\ncompute waits {waited[False] * 1e3:.0f} ms per step without overlap, {waited[True] * 1e3:.0f} ms with it")
    assert waited[True] < 0.5 * waited[False]


# ---- waits
LINKS = {Wait.STEP_AFTER_LOAD: (FAST, SLOW), Wait.END_AFTER_STORE: (SLOW, FAST), Wait.REFILL_AFTER_STORE: (SLOW, FAST)}


@pytest.mark.parametrize("wait", LINKS, ids=lambda wait: wait.name)
def test_each_wait_is_needed(sim, wait):
    device.set_link(*LINKS[wait])
    for skip in (frozenset(), frozenset({wait})):
        before = device.stats()["freed_under_copy"]
        ours, plain = Training(sim, True, skip=skip), Training(sim, None)
        for _ in range(4):
            ours.step()
            plain.step()
        right = not differences(ours.optimizer, plain.optimizer)
        right = right and device.stats()["freed_under_copy"] == before
        device.synchronize()
        assert right == (not skip)


@pytest.mark.parametrize("skip", [frozenset(), frozenset({Wait.DROP_AFTER_LOAD})], ids=["with", "without"])
def test_what_came_in_for_nothing_is_given_up_after_the_copy(sim, skip):
    ours = trained(sim, True, skip=skip)
    device.set_link(FAST, SLOW / 10)
    before = device.stats()["freed_under_copy"]
    ours.step(update=False)
    assert (device.stats()["freed_under_copy"] > before) == bool(skip)


# ---- the room, in figures
def learnt(peaks, margin=0):
    room = Room(margin)
    for _ in range(2):
        room.begin()
        for kind, peak in peaks:
            room.point(kind)
            room.peak(peak)
    room.begin()
    return room


STEP = [(BEGIN, 50), (FORWARD, 80), (FORWARD, 100), (BACKWARD, 70), (BACKWARD, 60), (OPTIMIZER, 55), (END, 500)]


@pytest.mark.parametrize(("margin", "ahead"), [(0, [0, 0, 0, 30, 40, 45]), (20, [0, 0, 0, 25, 25, 25])])
def test_room_below_the_peak(margin, ahead):
    room = learnt(STEP, margin)
    free, found = [], []
    for kind, _ in STEP[:-1]:
        room.point(kind)
        free.append(room.free_bytes)
        found.append(room.ahead_bytes)
    assert free == [50, 20, 0, 30, 40, 45]
    assert found == ahead
    room.point(END)
    assert room.free_bytes == 0  # an evaluation took more there


def test_no_room_is_known_once_the_order_differs():
    room = learnt(STEP)
    room.point(BEGIN)
    room.point(BACKWARD)
    room.point(FORWARD)
    room.point(BACKWARD)
    assert room.free_bytes == room.ahead_bytes == 0


def test_no_room_in_the_first_step():
    room = Room()
    room.begin()
    room.point(BEGIN)
    assert room.free_bytes == room.ahead_bytes == 0


# ---- activations have the link first
class Manager:
    """Of saved tensors, as far as the overlap looks at it."""

    def __init__(self):
        self.bytes_in = dict.fromkeys(State, 0)
        self.stats = StepStats()
        self.recorder = None
        self.evicting = SimpleNamespace(off=nullcontext)


def with_manager(sim):
    """Overlapped from the first step on."""
    training = Training(sim, True)
    training.overlap._manager = manager = Manager()
    for _ in range(3):
        training.step()
    assert training.pipeline.early_bytes > 0 and training.pipeline.late_bytes > 0
    return training, manager


@pytest.mark.parametrize("state", [State.HOST, State.RETURNING], ids=lambda state: state.name)
def test_nothing_comes_in_while_activations_are_to_come_back(sim, slow_link, state):
    training, manager = with_manager(sim)
    manager.bytes_in[state] = 1
    training.step()
    assert training.pipeline.early_bytes == 0


def test_nothing_leaves_late_in_a_step_that_copies_activations_out(sim, slow_link):
    training, manager = with_manager(sim)
    manager.stats.offloaded_bytes = 1
    training.step()
    assert training.pipeline.late_bytes == training.pipeline.held_bytes == 0


def test_nothing_overlaps_in_a_step_that_is_recorded(sim, slow_link):
    training, manager = with_manager(sim)
    manager.recorder = object()
    training.step()
    assert training.pipeline.early_bytes == training.pipeline.late_bytes == training.pipeline.held_bytes == 0
