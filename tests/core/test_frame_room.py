"""No call meets the end of a chunk of frames, however deep it is."""
from __future__ import annotations

import resource
import sys
import threading
from types import FunctionType

import pytest

from mindspeed_swap.core.frame_room import with_room

CALLS, DEEPEST, SIZES = 100, 300, 16


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def nothing() -> None:
    pass


def faults_at(depth: int) -> int:
    """Page faults of so many calls from that depth."""
    if depth:
        return faults_at(depth - 1)
    before = faults()
    for _ in range(CALLS):
        nothing()
    return faults() - before


def begun(depth: int) -> int:
    return faults_at(depth)


def worst() -> int:
    """Of all depths, after frames that are larger by 0 to 15 slots: of one the last ends where the chunk does."""
    found = 0
    for size in range(SIZES):
        code = begun.__code__
        begin = FunctionType(code.replace(co_stacksize=code.co_stacksize + size), globals())
        found = max(found, *(begin(depth) for depth in range(DEEPEST)))
    return found


@pytest.mark.parametrize("thread", [False, True])
def test_calls_of_any_depth_fault_no_page(thread):
    """In a thread of autograd's too, which begins with a chunk of its own."""
    found = []

    def look() -> None:
        found.append(with_room(worst))

    if thread:
        other = threading.Thread(target=look)
        other.start()
        other.join()
    else:
        look()
    assert found[0] < CALLS // 2


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 14), reason="Python keeps frames elsewhere")
def test_without_room_there_is_a_depth_at_which_each_call_does():
    """Else the test above would show nothing."""
    assert worst() >= CALLS


def test_what_it_calls_is_called_as_it_is():
    def function(*args, **kwargs):
        return args, kwargs

    assert with_room(function, 1, 2, function=3, a=4) == ((1, 2), {"function": 3, "a": 4})
    assert with_room(function) == ((), {})
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)
