"""Collections while a step runs."""
from __future__ import annotations

import gc
import os

import pytest

from mindspeed_swap.garbage import collected_young, uncollected


@pytest.fixture
def seen():
    """Generations that were collected."""
    found = []
    gc.collect()

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def allocate(count: int = 200_000) -> list:
    return [[] for _ in range(count)]


def test_the_whole_heap_is_not_looked_at_within_a_step(seen):
    kept = allocate()
    assert {1, 2} & set(seen), "else the next lines would show nothing"
    del kept
    gc.collect()
    seen.clear()
    before = gc.get_threshold()
    with collected_young():
        kept = allocate()
        assert set(seen) == {0}
    assert gc.get_threshold() == before and len(kept) == 200_000


class Node:
    """A cycle."""

    alive = 0

    def __init__(self):
        self.me = self
        Node.alive += 1

    def __del__(self):
        Node.alive -= 1


def test_young_garbage_goes_within_a_step():
    """Cycles that hold memory of the device, for one."""
    gc.collect()
    with collected_young():
        for _ in range(20_000):
            Node()
        assert Node.alive < 5_000


def test_older_garbage_goes_between_steps():
    """Of a step that leaves few objects behind, so that Python would not collect by itself: cycles that have survived
    a collection within the step, and what they hold of the device."""
    gc.collect()
    for _ in range(100):
        with collected_young():
            node, kept = Node(), allocate(5000)
            del node, kept
    assert Node.alive < 30


@pytest.mark.parametrize("pause", [collected_young, uncollected])
def test_a_worker_that_is_forked_within_a_step_is_in_none(pause):
    before = gc.get_threshold()
    with pause():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() and gc.get_threshold() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled() and gc.get_threshold() == before


def test_without_the_collector_nothing_is_collected(seen):
    gc.disable()
    try:
        with collected_young():
            allocate()
        assert not seen
    finally:
        gc.enable()


def test_what_somebody_sets_meanwhile_stays():
    before = gc.get_threshold()
    try:
        with collected_young():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold()[0] == 123
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_the_host_is_measured(on, seen):
    if not on:
        gc.disable()
    try:
        with uncollected():
            allocate()
            assert not seen
        assert gc.isenabled() is on
    finally:
        gc.enable()
