"""A host that is slower than it was is told by a loop."""
from __future__ import annotations

import pytest

from mindspeed_swap.core.host_pace import HostPace


class Clock:
    """Of which each loop takes what it is told, in ms."""

    def __init__(self, *took_ms: float) -> None:
        self.took_ms, self.now, self.asked = iter(took_ms), 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        if self.asked % 2 == 0:
            self.now += next(self.took_ms) / 1000
        return self.now


def slowness(*took_ms: float) -> list[float]:
    """Of each two loops."""
    pace, found = HostPace(Clock(*took_ms)), []
    for _ in range(len(took_ms) // 2):
        pace.begin()
        found.append(pace.slowness())
    return found


def test_before_the_step_or_after_it():
    assert slowness(1.0, 1.0, 1.0, 1.0, 1.5, 1.0, 1.0, 2.0, 1.2, 1.1) == pytest.approx([1.0, 1.0, 1.5, 2.0, 1.2])


def test_one_loop_that_is_faster_than_all_others_does_not_make_them_slow():
    assert slowness(0.5, 1.0, *[1.0] * 6)[1:] == pytest.approx([1.0, 1.0, 1.0])


def test_how_fast_it_can_be_is_known_better_with_every_step():
    pace = HostPace(Clock(*[2.0] * 4, *[1.0] * 4))
    for _ in range(2):
        pace.begin()
        slow = pace.end()
    assert slow / pace.fast_ms == pytest.approx(1.0)
    for _ in range(2):
        pace.begin()
        pace.end()
    assert slow / pace.fast_ms == pytest.approx(2.0)


def test_a_host_that_gets_slower_for_good_is_as_fast_as_it_can_be():
    assert slowness(*[1.0] * 10, *[2.0] * 300)[-1] == pytest.approx(1.0)
