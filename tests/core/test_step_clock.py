"""How long steps take, with what the trainer does between them."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_swap.core.step_clock import StepClock


class Clock:
    """An accelerator whose events are times."""

    def __init__(self):
        self.now = 0.0

    def compute_stream(self):
        return 0

    def record(self, stream):
        return self.now

    def elapsed_ms(self, start, end):
        return end - start

    def synchronize(self, event):
        pass


@pytest.mark.parametrize("order", ["tttr", "rttttr", "rtrtr"])
def test_every_step_is_told_with_the_time_between(order):
    """But the first: nothing lies before it; nor one after a recorded one, as long as no other was seen."""
    device = Clock()
    clock, told = StepClock(device), []
    for kind in order:
        device.now += 5.0 if told and kind != "plan" else 0.0
        clock.begin()
        device.now += 100.0
        recorder = SimpleNamespace(trace=SimpleNamespace(step_ms=100.0)) if kind == "r" else None
        clock.end(recorder)
        told.append(recorder.trace.step_ms if recorder else clock.step_ms())
    seen = next((i for i in range(1, len(order)) if order[i - 1] == "t"), len(order))
    assert told == [100.0] * seen + [105.0] * (len(order) - seen)


def test_what_takes_longer_is_no_part_of_a_step():
    device = Clock()
    clock = StepClock(device)
    for between in (0.0, 50.0):
        device.now += between
        clock.begin()
        device.now += 100.0
        clock.end(None)
        assert clock.step_ms() == 100.0
