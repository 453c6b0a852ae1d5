"""The simulated device, and what runs on it, for tests of the report."""
from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated import fresh_sim, sim  # noqa: F401
from traces import Shape, megatron_trace

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.solve import floor
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.report.writer import ReportWriter
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.search import SmartSwap


class _NoHost:
    """A pool for a run that is only told about."""

    budget_bytes, pinned_bytes, peak_used_bytes = 8 << 30, 1 << 30, 1 << 29


@functools.cache
def searched() -> SmartSwap:
    """A SmartSwap that has found its plan on recorded Megatron-like steps."""
    trace = megatron_trace(Shape(layers=4))
    search = SmartSwap((floor(trace).reachable_bytes + trace.capacity_bytes) // 2)
    while search.phase is not Phase.STABLE:
        search.after_step(StepStats(), megatron_trace(Shape(layers=4)))
    return search


@pytest.fixture
def write_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a run's files, as training does. ``change(name, data)`` may alter what a file says."""

    def write(
        folder: str = "run", *, ranks: int = 1, only: tuple[int, ...] | None = None, run_id: str = "run-1",
        layout: dict | None = None, change: Callable[[str, dict], None] | None = None,
    ) -> Path:  # fmt: skip
        directory = tmp_path / folder
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr("mindspeed_swap.report.writer.agreed_run_id", lambda: run_id)
        search = searched()
        pool: HostPool = _NoHost()  # type: ignore[assignment]
        for rank in range(ranks) if only is None else only:
            writer = ReportWriter(str(directory), rank, layout or {"num_layers": 4})
            writer.write_summary(search, pool, "sim")
            writer.write_trace(search.shown)
            for name in ("summary.json", "trace.json"):
                file = directory / f"rank{rank}" / name
                if change is not None:
                    data = json.loads(file.read_text())
                    change(name, data)
                    file.write_text(json.dumps(data))
        return directory

    return write
