"""By hand: 100 bytes per ms each way, a forward of 10 ms (1000 bytes fit) and a backward of 20 ms (2000)."""
from dataclasses import replace

import pytest
from lower_bound import Inputs, lower_bound_ms, optimizer_bound_ms, recompute_options

STEP = Inputs(35.0, 10.0, 20.0, 1, 5000, 100.0, 100.0)


@pytest.mark.parametrize(
    "budget, recompute, expected",
    [
        (5000, (), 35.0),  # everything fits
        (9000, (), 35.0),
        (4000, (), 35.0),  # what must leave fits the forward
        (3500, (), 40.0),  # 500 bytes too many: 5 ms
        (2500, (), 35.0 + 15.0 + 5.0),  # 2500 bytes: 15 ms too long for the forward, 5 ms for the backward
        (3500, ((500, 2.0),), 37.0),  # recompute them instead
        (3500, ((1000, 4.0),), 37.0),  # half of it
        (3500, ((500, 6.0),), 40.0),  # slower than swapping them
        (3500, ((200, 0.2), (1000, 4.0)), 35.0 + 0.2 + 1.2),  # cheapest per byte first
        (4000, ((500, 0.0),), 35.0),
    ],
)
def test_by_hand(budget, recompute, expected):
    assert lower_bound_ms(replace(STEP, recompute=recompute), budget) == pytest.approx(expected)


def test_microbatches_pay_each():
    assert lower_bound_ms(replace(STEP, microbatches=4), 3500) == pytest.approx(35.0 + 4 * 5.0)


def test_never_falls_with_the_budget():
    inputs = replace(STEP, recompute=((300, 1.0), (700, 9.0), (50, 0.0)))
    bounds = [lower_bound_ms(inputs, budget) for budget in range(5000, 1000, -37)]
    assert bounds == sorted(bounds)


def test_optimizer_state():
    assert optimizer_bound_ms(STEP, 1000) == 0.0
    assert optimizer_bound_ms(STEP, 3000) == pytest.approx(20.0 + 10.0)


def test_modules_within_one_another():
    def key(number):
        return [0, 0, 1, number]

    def module(name, ms, *numbers, microbatch=0):
        return {"key": [microbatch, 0, 1, name], "forward_ms": ms, "frees": [key(number) for number in numbers]}

    trace = {
        "saved": [{"key": key(number), "nbytes": 100 * (number + 1)} for number in range(4)],
        "modules": [
            module("norm", 0.5, 0),
            module("mlp.fc1", 3.0, 1),
            module("mlp.fc2", 3.0),  # frees nothing: what is around it need not run it
            module("mlp", 4.0, 1, 2),
            module("layer", 10.0, 0, 1, 2, 3),
            module("layer", 99.0, 0, 1, 2, 3, microbatch=1),
        ],
    }
    # norm; fc1; mlp without fc1; the layer without norm and mlp
    assert sorted(recompute_options(trace)) == [(100, 0.5), (200, 3.0), (300, 1.0), (400, 5.5)]
    assert sum(nbytes for nbytes, _ in recompute_options(trace)) == 1000
