"""Reads what ``--swap-report-dir`` wrote, and says what is wrong with it. Pure; imports no torch."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.errors import SettingError

TRACE_FILE = "step_trace.json"
# Of summary.json, with the types that the page relies on. Documented in report/summary.py.
SUMMARY_VERSION = 3
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "run_id": str, "rank": int, "world_size": int, "versions": dict, "device": str, "layout": dict, "phase": str,
    "steps": int, "capacity_bytes": int, "target_bytes": int, "peak_bytes": int, "plan": dict, "tries": list,
    "stable": dict, "host": dict, "step": (dict, type(None)),
}  # fmt: skip
# Numbers, by path; the first two are there before any step was recorded.
_NUMBERS = (
    "host.budget_bytes", "host.peak_used_bytes",
    "step.step_ms.measured", "step.step_ms.without_plan", "step.stall_ms.measured",
    "step.recompute_ms.measured",
    "step.bytes_out", "step.bytes_in", "step.counters.*",
    "step.phases.*.peak_allocated_bytes.measured", "step.phases.*.peak_allocated_bytes.without_plan",
    "step.phases.*.peak_reserved_bytes.measured",
    "step.layers.*.swapped_bytes", "step.layers.*.kept_bytes", "step.layers.*.immovable_bytes",
    "step.tensors.*.swapped_bytes", "step.tensors.*.kept_bytes", "step.tensors.*.immovable_bytes",
)  # fmt: skip


@dataclass
class RankFiles:
    rank: int
    summary: dict[str, Any]
    trace: dict[str, Any] | None  # None: see ``problems`` of the report

    @property
    def step(self) -> dict[str, Any] | None:
        return self.summary["step"]

    @property
    def step_ms(self) -> float:
        return self.trace["otherData"]["step_ms"] if self.trace else 0.0

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.trace["traceEvents"] if event["ph"] == kind] if self.trace else []


@dataclass
class RunFiles:
    """One run's ranks, in order."""

    directory: Path
    run_id: str
    ranks: list[RankFiles]
    problems: list[str] = field(default_factory=list)  # what is missing; the rest can be shown


def read(directory: str, run: str | None = None) -> RunFiles:
    """Raises SettingError for a directory that is not ours or damaged, or holds several runs and none is chosen."""
    root = Path(directory)
    if not root.is_dir():
        raise SettingError(f"{directory}: is no directory; give the one that --swap-report-dir named")
    folders = sorted((p for p in root.glob("rank*") if p.name[4:].isdigit()), key=lambda p: int(p.name[4:]))
    summaries = {int(folder.name[4:]): folder for folder in folders if (folder / "summary.json").exists()}
    if not summaries:
        raise SettingError(
            f"{directory}: no rank<N>/summary.json in it; give the directory that --swap-report-dir named (a run "
            "writes there once it has a plan, and at its end)"
        )
    found = {rank: _load(folder / "summary.json", _check_summary) for rank, folder in summaries.items()}
    by_run: dict[str, list[int]] = {}
    for rank, summary in found.items():
        if summary["rank"] != rank:
            raise SettingError(f"{summaries[rank] / 'summary.json'}: is of rank {summary['rank']}: copied by hand?")
        by_run.setdefault(summary["run_id"], []).append(rank)
    if run is None and len(by_run) > 1:
        listed = "; ".join(f"{name}: ranks {', '.join(map(str, ranks))}" for name, ranks in by_run.items())
        raise SettingError(f"{directory} holds files of {len(by_run)} runs ({listed}): choose one with --run ID")
    run = next(iter(by_run)) if run is None else run
    if run not in by_run:
        raise SettingError(f"--run {run}: {directory} holds {', '.join(by_run)}")
    files = RunFiles(root, run, [])
    for rank in by_run[run]:
        recorded = found[rank]["step"] is not None
        trace = _trace(files, summaries[rank] / "trace.json") if recorded else None
        files.ranks.append(RankFiles(rank, found[rank], trace))
    world = found[by_run[run][0]]["world_size"]
    missing = sorted(set(range(world)) - set(by_run[run]))
    if missing:
        ranks = ", ".join(map(str, missing))
        files.problems.append(f"no summary.json of rank {ranks}: {world - len(missing)} of {world} ranks are shown")
    return files


def trace_files(path: str) -> list[Path]:
    """Recorded steps: one for a file; of a ``--swap-report-dir`` one per rank."""
    root = Path(path)
    if not root.is_dir():
        return [root]
    return sorted(root.glob(f"rank*/{TRACE_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name))


def read_trace(file: Path) -> StepTrace:
    """Raises SettingError."""
    try:
        return StepTrace.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{file}: cannot be read: {error.strerror}; give what --swap-report-dir named") from None
    except ValueError as error:
        raise SettingError(f"{file}: {error}") from None


def _trace(files: RunFiles, path: Path) -> dict[str, Any] | None:
    """Without a trace the figures can still be shown, so whatever is wrong with it is only said."""
    try:
        trace = _load(path, _check_trace)
        if trace["otherData"].get("run_id") == files.run_id:
            return trace
        problem = f"{path}: of another run"
    except SettingError as error:
        problem = str(error)
    files.problems.append(f"{problem}; no pictures over time for this rank")
    return None


def _load(path: Path, check: Callable[[Any], None]) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check(data)
    except OSError as error:
        raise SettingError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise SettingError(f"{path}: damaged or not ours: {what}") from None
    return data


def _check_summary(data: Any) -> None:
    version = data.get("version") if isinstance(data, dict) else None
    if version != SUMMARY_VERSION:
        raise ValueError(f"version {version}, this release reads version {SUMMARY_VERSION}")
    for name, kind in _FIELDS.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} is {data[name]!r:.40}")
    for path in _NUMBERS if data["step"] else _NUMBERS[:2]:
        _check_numbers(data, path)


def _check_trace(data: Any) -> None:
    for path in ("otherData.step_ms", "traceEvents.*.pid"):
        _check_numbers(data, path)
    for event in data["traceEvents"]:
        for name in {"X": ("ts", "dur", "tid"), "C": ("ts", "args.bytes")}.get(event["ph"], ()):
            _check_numbers(event, name)
        if event["ph"] == "X" and not {"name", "cat", "args"} <= set(event):
            raise ValueError(f"a span without name, category or arguments: {event!r:.80}")


def _check_numbers(data: Any, path: str) -> None:
    """Whatever the path leads to is a number. ``*``: every value of a list or an object."""
    values = [data]
    for name in path.split("."):
        if name == "*":
            values = [inner for value in values for inner in (value.values() if isinstance(value, dict) else value)]
        else:
            values = [value[name] for value in values]
    for value in values:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"{path} is {value!r:.40}")
