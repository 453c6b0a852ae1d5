"""Each timed step is judged by the loops around it, whatever its shape; what Stable steps take is told of one shape."""
from __future__ import annotations

from functools import partial

import pytest
from test_shapes import train as train

from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.search import SmartSwap


class Pace:
    def __init__(self) -> None:
        self.told = ""

    def begin(self) -> None:
        self.told += "b"

    def end(self) -> float:
        self.told += "e"
        return 3.0

    def slowness(self) -> float:
        return self.end() + 0.5


@pytest.mark.parametrize("sizes", [(4096,), (64, 4096)])
def test_before_it_and_after_it(train, sizes):
    training = train(Policy())
    running = training.runtime
    running.shapes._search = partial(SmartSwap, settles=True)
    running.shapes.current.settles = True
    running._pace = pace = Pace()
    timed = 0
    for step in range(12):
        pace.told = ""
        training.step(sizes[step % len(sizes)])
        timed += "e" in pace.told
        if running.shapes.vary or step > 1:
            assert pace.told in ("", "b", "be")
        if pace.told.endswith("e") and training.search._timing._found:
            assert training.search._timing.slowness == 3.5
    assert timed > 3


@pytest.mark.parametrize("sizes, told", [((4096,), True), ((64, 4096), False)])
def test_what_stable_steps_take_is_told_if_they_follow_one_another(train, sizes, told):
    training = train(Policy())
    running, found = training.runtime, []
    running.shapes._search = partial(SmartSwap, settles=True)
    running.shapes.current.settles = True
    for step in range(24):
        training.step(sizes[step % len(sizes)])
        lasting = training.search.lasting
        lasting.begin(1000.0)
        lasting.add = found.append
    assert bool(found) is told and all(step_ms > 0 for step_ms in found) and len(found) < 24
