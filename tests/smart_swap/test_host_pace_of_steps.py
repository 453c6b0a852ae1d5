"""Each timed step is judged by the loops around it, whatever its shape."""
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
