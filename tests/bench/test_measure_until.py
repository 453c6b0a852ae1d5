"""A run ends when enough of its steps count."""
from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from training import counted_steps
from workloads import workload

from mindspeed_swap.smart_swap.outcomes import Phase

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import measure


class Device:
    """Without one."""

    def __getattr__(self, name):
        return lambda *_, **__: SimpleNamespace(synchronize=lambda: None) if name == "current_stream" else 0


def steps_until_end(monkeypatch, until, undisturbed, phases) -> list[dict]:
    monkeypatch.setattr(measure, "torch", SimpleNamespace(cuda=Device()))
    running = SimpleNamespace(smart_swap=SimpleNamespace(phase=Phase.WARM_UP), pool=SimpleNamespace(pinned_bytes=0))
    monkeypatch.setattr(measure.runtime, "started", lambda: True)
    monkeypatch.setattr(measure.runtime, "get", lambda: running)
    measurement = measure.Measurement("file", until=until)
    measurement._pace = SimpleNamespace(begin=lambda: None, end=lambda: undisturbed[len(measurement._steps)])
    train_step = measurement.step(lambda: [None])
    for phase in phases:
        running.smart_swap.phase = phase
        try:
            train_step()
        except SystemExit as end:
            assert end.code == 0
            break
    return measurement._steps


SEARCH, STABLE = Phase.SEARCH, Phase.STABLE


@pytest.mark.parametrize("until, steps", [((0, 2), 6), ((5, 2), 7), ((0, 9), 9), ((), 9)])
def test_steps_of_a_search_the_first_ones_and_those_of_a_slower_host_do_not(monkeypatch, until, steps):
    undisturbed = [True, True, True, False, True, True, True, True, True]
    phases = [SEARCH, SEARCH, SEARCH, STABLE, STABLE, STABLE, STABLE, STABLE, STABLE]
    found = steps_until_end(monkeypatch, until, undisturbed, phases)
    assert len(found) == steps and [step["undisturbed"] for step in found] == undisturbed[:steps]


def test_those_that_count_are_the_last_ones_without_a_search(monkeypatch):
    phases = [STABLE, STABLE, SEARCH, STABLE, STABLE, STABLE]
    ranks = [{"steps": steps_until_end(monkeypatch, (), [True] * 6, phases)}]
    assert counted_steps(workload("F", "gpu"), ranks) == 3
    assert counted_steps(workload("A", "gpu"), ranks) == workload("A", "gpu").counted_steps
