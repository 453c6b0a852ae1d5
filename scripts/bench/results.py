"""Result files: reading them, and the figures that everything else is made from.

A file is of one call of run.py: the machine, versions, the command, and one record per point. Times of different
machines are never compared: a point's ratio is to the plain run of its own machine.
"""
from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lower_bound import Inputs
from points import FULL, OURS, PLAIN

VERSION = 1
Record = Mapping[str, Any]


def read(folders: Iterable[Path], device: str) -> Results:
    """Raises ValueError naming the file that is not a result file of this version."""
    records, machines, overheads = [], {}, []
    for path in sorted({path for folder in folders for path in folder.glob("*.json")}):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("version") != VERSION or "points" not in data:
            raise ValueError(f"{path}: not a result file of version {VERSION}")
        if data["machine"]["device"] == device:
            about = {"file": path.name, "code": data["versions"].get("mindspeed-swap", "")}
            records += [record | about for record in data["points"]]
            machines[data["machine"]["id"]] = data["machine"] | {"versions": data["versions"]}
            if "host_overhead" in data:
                overheads.append(data["host_overhead"])
    return Results(sorted(records, key=lambda record: record["when"]), machines, overheads)


class Results:
    def __init__(
        self, records: list[Record], machines: Mapping[str, Any], host_overheads: Sequence[Record] = ()
    ) -> None:
        self.records, self.machines, self.host_overheads = records, machines, host_overheads

    def of(self, machine: str) -> Results:
        return Results([record for record in self.records if record["machine"] == machine], self.machines)

    def runs(self, workload: str, point: str) -> list[Record]:
        """All that ended well; of ours, those of the newest code."""
        found = [r for r in self.records if (r["workload"], r["point"]) == (workload, point) and r["ok"]]
        if found and found[-1]["group"] == OURS:
            found = [r for r in found if r.get("code") == found[-1].get("code")]
        return found

    def names(self, workload: str) -> list[str]:
        """Points that ran, whatever came of it, in the order in which they first did."""
        return list(dict.fromkeys(r["point"] for r in self.records if r["workload"] == workload))

    def latest(self, workload: str, point: str) -> Record | None:
        """The last that ended well, or the last."""
        found = [r for r in self.records if (r["workload"], r["point"]) == (workload, point)]
        return next(iter(self.runs(workload, point)[::-1]), found[-1] if found else None)

    def known(self, workload: str) -> dict[str, Record]:
        return {name: record for name in self.names(workload) if (record := self.latest(workload, name))}

    def ratio(self, workload: str, point: str, to: str = PLAIN) -> float | None:
        """Median of (its step time / the other's on the same machine, of the runs next before and after it: what else a
        machine has to do changes from minute to minute)."""
        ratios = []
        for run in self.runs(workload, point):
            others = [other for other in self.runs(workload, to) if other["machine"] == run["machine"]]
            before = [other["step_ms"] for other in others if other["when"] <= run["when"]]
            after = [other["step_ms"] for other in others if other["when"] > run["when"]]
            if others:
                ratios.append(run["step_ms"] / statistics.mean(before[-1:] + after[:1]))
        return statistics.median(ratios) if ratios else None

    def step_ms(self, workload: str, point: str) -> float | None:
        runs = self.runs(workload, point)
        return statistics.median(run["step_ms"] for run in runs) if runs else None

    def peak(self, workload: str, point: str) -> int | None:
        """Forward/backward peak of the rank that needs most, allocated."""
        runs = self.runs(workload, point)
        return max(run["peak_bytes"]["forward_backward"] for run in runs) if runs else None

    def bound_inputs(self, workload: str) -> Inputs | None:
        """Of the plain run, and of the adaptive run with nothing to do for link and modules, same machine."""
        for source in self.runs(workload, "adaptive@nothing")[::-1]:
            plains = [run for run in self.runs(workload, PLAIN) if run["machine"] == source["machine"]]
            if plains and source.get("link"):
                plain, count = plains[-1], source["microbatches"]
                return Inputs(
                    statistics.median(run["step_ms"] for run in plains),
                    plain["forward_ms"] / count,
                    plain["backward_ms"] / count,
                    count,
                    plain["peak_bytes"]["forward_backward"],
                    source["link"]["out_bytes_per_ms"],
                    source["link"]["in_bytes_per_ms"],
                    tuple((int(b), float(ms)) for b, ms in source["recompute_options"]),
                )
        return None

    def best_competitor(self, workload: str, peak: int) -> tuple[str, float] | None:
        """(point, ratio to plain) of the fastest that is not ours and needs no more forward/backward memory."""
        found = []
        for name in self.names(workload):
            runs = self.runs(workload, name)
            ratio = self.ratio(workload, name)
            if runs and runs[0]["group"] != OURS and ratio and (self.peak(workload, name) or peak + 1) <= peak:
                found.append((ratio, name))
        return (min(found)[1], min(found)[0]) if found else None


def settled(run: Record) -> bool:
    """True if no counted step was one of a search."""
    swap, counted = run.get("swap"), len(run["steps_ms"])
    return not swap or swap["phase"] == "off" or (swap["phase"] == "Stable" and swap["stable_steps"] >= counted)


def gain_over_full(results: Results, workload: str, point: str) -> float | None:
    """Throughput, as a ratio to full recompute's."""
    ours, full = results.ratio(workload, point), results.ratio(workload, FULL)
    return full / ours if ours and full else None
