"""A host that is slower than it was is told by a loop."""
from __future__ import annotations

from mindspeed_swap.core.host_pace import MOST_SLOWNESS, HostPace


class Clock:
    """Of which each loop takes what it is told."""

    def __init__(self, *took: float) -> None:
        self.took, self.now, self.asked = iter(took), 0.0, 0

    def __call__(self) -> float:
        self.asked += 1
        if self.asked % 2 == 0:
            self.now += next(self.took)
        return self.now


def undisturbed(*took: float) -> list[bool]:
    pace, found = HostPace(Clock(*took)), []
    for _ in range(len(took) // 2):
        pace.begin()
        found.append(pace.end())
    return found


def test_before_the_step_and_after_it():
    slow = 1.01 * MOST_SLOWNESS
    assert undisturbed(1.0, 1.0, slow, 1.0, 1.0, slow, 1.2, 1.2, slow, slow) == [True, False, False, True, False]


def test_the_fastest_so_far_is_what_it_is_measured_by():
    assert undisturbed(2.0, 2.0, 2.0, 1.0, 2.0, 2.0, 1.0, 1.0) == [True, False, False, True]


def test_the_loop_is_short():
    pace = HostPace()
    pace.begin()
    pace.end()
    assert pace._least < 0.01
