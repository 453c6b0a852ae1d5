"""A point: one way of training a workload. And what a competitor's file gives: its points."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads import Workload

PLAIN, FULL = "plain", "full"
OURS = "ours"


@dataclass(frozen=True)
class Point:
    name: str
    group: str  # whose it is: OURS, or the competitor
    flags: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""  # competitors/<plugin>.py is installed in the training process, with ``plugin_setting``
    plugin_setting: str = ""
    budget_bytes: int | None = None
    searches: bool = False  # for a plan, before its steps count
    missing: str = ""  # what must be installed first: until then it is skipped, and has no result


@dataclass(frozen=True)
class Context:
    """What a competitor may make its points from. ``known``: results by point, see results.py."""

    workload: Workload
    device: str
    known: Mapping[str, Mapping[str, Any]]

    def peak(self, point: str) -> int | None:
        """Forward/backward peak of a point, if it has run well."""
        found = self.known.get(point)
        return found["peak_bytes"]["forward_backward"] if found and found["ok"] else None
