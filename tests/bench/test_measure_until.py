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

sys.path.remove(str(Path(measure.__file__).parent))  # other tests ask how files in it are named without that

class Device:
    """Without one."""

    def __getattr__(self, name):
        return lambda *_, **__: SimpleNamespace(synchronize=lambda: None) if name == "current_stream" else 0


def until_end(monkeypatch, until, undisturbed, phases) -> measure.Measurement:
    monkeypatch.setattr(measure, "torch", SimpleNamespace(cuda=Device()))
    running = SimpleNamespace(smart_swap=SimpleNamespace(phase=Phase.WARM_UP), pool=SimpleNamespace(pinned_bytes=0))
    monkeypatch.setattr(measure.runtime, "started", lambda: True)
    monkeypatch.setattr(measure.runtime, "get", lambda: running)
    measurement = measure.Measurement("file", until=until)
    begun = []

    def loop_ms() -> float:
        assert not measurement._steps or len(begun) == len(measurement._steps), "measured before the step, too"
        return 1.0 if undisturbed[len(measurement._steps)] else 2.0

    measurement._pace = SimpleNamespace(begin=lambda: begun.append(1), end=loop_ms, fast_ms=1.0)
    train_step = measurement.step(lambda: [None])
    for phase in phases:
        running.smart_swap.phase = phase
        try:
            train_step()
        except SystemExit as end:
            assert end.code == 0
            break
    measurement._judge()
    return measurement


SEARCH, STABLE = Phase.SEARCH, Phase.STABLE


@pytest.mark.parametrize("until, steps", [((0, 2), 6), ((5, 2), 7), ((0, 9), 9), ((), 9)])
def test_steps_of_a_search_the_first_ones_and_those_of_a_slower_host_do_not(monkeypatch, until, steps):
    undisturbed = [True, True, True, False, True, True, True, True, True]
    phases = [SEARCH, SEARCH, SEARCH, STABLE, STABLE, STABLE, STABLE, STABLE, STABLE]
    found = until_end(monkeypatch, until, undisturbed, phases)._steps
    assert len(found) == steps and [step["undisturbed"] for step in found] == undisturbed[:steps]


def test_those_before_another_search_do_not_count(monkeypatch):
    phases = [STABLE] * 4 + [SEARCH] + [STABLE] * 20
    measurement = until_end(monkeypatch, (0, 5), [True] * 25, phases)
    assert len(measurement._steps) == 10 and len(measurement._settled()) == 5


@pytest.mark.parametrize("settled, counted", [(30, 30), (10, 10), (9, 0), (0, 0)])
def test_those_that_count_are_the_last_ones_without_a_search(settled, counted):
    ranks = [{"settled_steps": settled}]
    assert counted_steps(workload("F", "gpu"), ranks) == counted
    assert counted_steps(workload("A", "gpu"), ranks) == workload("A", "gpu").counted_steps


def test_of_several_ranks_none_may_end_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="one rank only"):
        measure.start("file", until=(0, 5))
