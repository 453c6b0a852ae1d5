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

    def done(self, event):
        return event <= self.now - self.lag

    lag = 0.0  # of the device behind the host


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


def stepped(clock: StepClock, device: Clock, ms: float, kind: str = "t") -> list[float]:
    clock.begin()
    device.now += ms
    clock.end(SimpleNamespace(trace=SimpleNamespace(step_ms=ms)) if kind == "r" else None)
    return list(clock.passed_ms())


def test_what_steps_took_is_told_once_without_a_wait():
    device = Clock()
    clock = StepClock(device)
    assert [stepped(clock, device, ms) for ms in (100.0, 110.0, 120.0)] == [[], [110.0], [120.0]]
    assert stepped(clock, device, 200.0, "r") == []  # nor is what follows it compared with it
    assert [stepped(clock, device, ms) for ms in (100.0, 90.0)] == [[], [90.0]]
    device.lag = 150.0
    assert [stepped(clock, device, ms) for ms in (100.0, 101.0, 102.0)] == [[], [], [100.0]]
    clock.forget()
    device.lag = 0.0
    assert [stepped(clock, device, ms) for ms in (103.0, 104.0)] == [[103.0], [104.0]]


def test_ends_that_nobody_asks_for_are_few():
    device = Clock()
    clock = StepClock(device)
    for _ in range(100):
        clock.begin()
        device.now += 10.0
        clock.end(None)
    assert len(list(clock.passed_ms())) < 10
