"""Which of the counted steps a point's times are of."""
from __future__ import annotations

import pytest
from training import figures
from workloads import COUNTED_STEPS


def rank(*steps: tuple[float, bool]) -> dict:
    phase = {"allocated_bytes": 1, "reserved_bytes": 1}
    return {
        "host": {}, "steps": [
            {"seconds": ms / 1000, "undisturbed": undisturbed, "forward_ms": ms / 4, "backward_ms": ms / 2, "loss": 1.0,
             "phases": dict.fromkeys(("forward_backward", "optimizer", "rest"), phase), "held_bytes": 1,
             "static_bytes": 1, "pace_ms": 0.1 if undisturbed else 0.2}
            for ms, undisturbed in steps
        ],
    }  # fmt: skip


FAST, SLOW = (100.0, True), (150.0, False)


def test_steps_of_a_slower_host_do_not_count_if_others_are_enough():
    found = figures([rank(*[(999.0, True)] * 3, *[SLOW] * 30, *[FAST] * COUNTED_STEPS)], 30 + COUNTED_STEPS)
    assert (found["step_ms"], found["spread_ms"]) == (pytest.approx(100.0), pytest.approx([100.0, 100.0]))
    assert (found["forward_ms"], found["backward_ms"]) == pytest.approx((25.0, 50.0))
    assert len(found["steps_ms"]) == len(found["undisturbed"]) == 30 + COUNTED_STEPS and found["steps_ms"][0] == 150.0
    assert sum(found["undisturbed"]) == COUNTED_STEPS and found["uncounted_ms"] == [999.0] * 3
    assert found["pace_ms"] == [0.1] * 3 + [0.2] * 30 + [0.1] * COUNTED_STEPS


def test_all_do_if_they_are_not():
    found = figures([rank(*[SLOW] * 30, *[FAST] * (COUNTED_STEPS - 1))], 29 + COUNTED_STEPS)
    assert found["step_ms"] == pytest.approx(150.0)


def test_a_rank_whose_host_was_slower_disturbs_all():
    ranks = [rank(*[FAST] * 20), rank(*[FAST] * 9, *[SLOW] * 11)]
    assert figures(ranks, 20)["step_ms"] == pytest.approx(150.0) and sum(figures(ranks, 20)["undisturbed"]) == 9
