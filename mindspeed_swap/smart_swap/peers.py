"""Peers: the ranks that work on the same layers (tensor, data and context parallel) and therefore follow one plan.

Waits of one rank are waits of all of them, so plans that differ would add up. Per step each rank gives its figures into
one reduction; where all are in the same state the leader plans for all. Pure: group_peers.py has those of a real run.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Facts(NamedTuple):
    """Of a step, on the rank that fared worst. ``together``: all peers are in the same state, so they decide alike."""

    unready: float  # 1: no plan may be made from this step
    trouble: float
    over: float  # peak of the step without swap (WarmUp), measured peak (SearchPolicy) above the target
    peak: float
    step_ms: float  # while steps are timed: how slow the host was, see timing.py
    host_missing: float  # minus what swap may take of the host
    together: bool = True
    apart: bool = False  # by some steps of the same phase: one of another shape lies between, on some ranks only

    @classmethod
    def of(cls, own: Sequence[float], worst: Sequence[float]) -> Facts:
        """``own``: what this rank gave: two figures of its state, the same two below 0, then those of its step. They
        count where peers are in another state."""
        together = list(worst[:2]) == [-each for each in worst[2:4]]
        apart = worst[0] == -worst[2] and not together and worst[1] // _PHASE == -worst[3] // _PHASE
        return cls(*(worst if together else own)[4:], together=together, apart=apart)


_PHASE = 1000.0


def state_of(phase: int, tries: int, afresh: bool, timed: int, over: bool) -> float:
    """A number that peers can compare. ``over``: all steps of a plan are timed and this one is recorded. What ranks do
    together then is not what they do after the last timed one."""
    return _PHASE * (10_000 * phase + 2 * tries + afresh) + 2 * timed + over


Told = Callable[[Facts], bool]


class Peers:
    """A rank without peers."""

    leader = True
    count = 1
    entangled = False  # in what a module computes, ranks wait for one another
    _known: tuple[Told, Facts] | None = None  # to be told

    def worst(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, for each. Every rank calls this or ``worst_later``, once per step, with as many."""
        return list(values)

    def worst_later(self, values: Sequence[float], told: Told) -> None:
        """The same without waiting for the device: ``tell`` calls ``told``, as late as after the next step."""
        self._known = told, Facts.of(values, values)

    def tell(self) -> bool:
        """After every step. All ranks are told of the same one. Returns what they say who are told."""
        known, self._known = self._known, None
        return known is not None and known[0](known[1])

    def forget(self, told: Told) -> None:
        """It wants to hear no more of what it gave."""

    def share(self, value: T) -> T:
        """The leader's value. All ranks call it, or none."""
        return value
