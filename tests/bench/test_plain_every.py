"""The plain run again between points, and at the end."""
from __future__ import annotations

import pytest
import run
from planted import plain, record
from points import Point
from workloads import workload

NAMES = ("plain", "full", "a", "b", "c")


def order(monkeypatch, tmp_path, *more: str, ahead: bool) -> list[str]:
    """In which they run; ``ahead``: the next one is asked for while one runs."""
    monkeypatch.setattr(run, "all_points", lambda _: [Point(name, name) for name in NAMES])
    monkeypatch.setattr(run, "describe", lambda _: {"id": "m", "device": "gpu"})
    args = run.parse(["--workload", "A", "--out", str(tmp_path), "--points", "a,b,c", *more])
    call = run.Call(args, workload("A", "gpu"))
    job = call.next_job()
    while job is not None:
        name = job.point.name
        call.tried.add(name)
        following = call.next_job(running=job) if ahead else None
        when = {"when": f"2026-01-01T00:00:{len(call.added):02d}"}
        call.added.append(plain("A", **when) if name == "plain" else record("A", name, 100.0, group=name, **when))
        job = call.next_job()
        assert not ahead or following == job
        assert len(call.added) < 20
    return [each["point"] for each in call.added]


@pytest.mark.parametrize("ahead", [False, True])
def test_in_what_order(monkeypatch, tmp_path, ahead):
    assert order(monkeypatch, tmp_path, ahead=ahead) == ["plain", "full", "a", "b", "c"]
    every_two = order(monkeypatch, tmp_path, "--plain-every", "2", ahead=ahead)
    assert every_two == ["plain", "full", "a", "plain", "b", "c", "plain"]
    every_three = order(monkeypatch, tmp_path, "--plain-every", "3", ahead=ahead)
    assert every_three == ["plain", "full", "a", "b", "plain", "c", "plain"]
