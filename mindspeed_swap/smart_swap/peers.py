"""Peers: the ranks that work on the same layers (tensor, data and context parallel) and therefore follow one plan.

Waits of one rank are waits of all of them, so plans that differ would add up. Per step each rank gives its figures into
one reduction; where all are in the same state the leader plans for all. Pure: group_peers.py has those of a real run.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Facts(NamedTuple):
    """Of a step, on the rank that fared worst. ``together``: all peers are in the same state, so they decide alike."""

    unready: float  # 1: no plan may be made from this step
    trouble: float
    over: float  # peak of the step without swap (WarmUp), measured peak (SearchPolicy) above the target
    peak: float
    step_ms: float
    host_missing: float  # minus what swap may take of the host
    together: bool = True


class Peers:
    """A rank without peers."""

    leader = True
    count = 1
    entangled = False  # in what a module computes, ranks wait for one another

    def worst(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, for each. Every rank calls this or ``worst_later``, once per step, with as many."""
        return list(values)

    def worst_later(self, values: Sequence[float]) -> list[float] | None:
        """The same, of the step before (None: there was none), without waiting for the device."""
        return list(values)

    def share(self, value: T) -> T:
        """The leader's value. All ranks call it, or none."""
        return value
