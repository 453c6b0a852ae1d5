"""Timing: how long a step takes, from as many steps as their noise asks for. Pure.

Note: [Steps before the one that is recorded]
The first step of a plan finds an allocator that has not met it, and a device that has rested while it was made and so
runs at a higher clock than it can keep up. And recording costs the host time, which now and then shows: one plan was
recorded with 230 and with 240 ms, and ran in 233. So on a real device every recorded step but the very first follows
steps of the same plan that are not recorded, and these are timed: retime.py tells the recorded one by them.

How many, the workload says. Of dense layers two that follow one another differ by half a percent. Between the small
kernels of experts the host is what takes time, and steps differ by a tenth, for no reason of theirs (H200: 130 to 190
ms of one plan): there the median of more is worth something, and a plan that is 3 % faster is not to be told otherwise.
Those in which the host was slower than it can be (host_pace.py) then do not count, if there are others. And there the
first steps take twice what the thirtieth does, as kernels are chosen for shapes that experts have not met: nothing is
planned before steps no longer get shorter.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from mindspeed_swap.core.host_pace import MOST_SLOWNESS

# The steps that count at least, and that are timed at most; enough are those whose median is known to this share.
LEAST, MOST = 2, 12
# In a pipeline: the last of so many, of the first ones of a run.
FIRST_PIPELINED = 4
ERROR_SHARE = 0.01
# Steps no longer get shorter when the median of so many (of more, where they differ) is within this share of that of as
# many before them. So long this is waited for.
WINDOW, NOISY_WINDOW, WARMING_SHARE, MOST_WARMING = 3, 8, 0.03, 32


class Timed(NamedTuple):
    """A step: how long it took, the most bytes that it needed (0: not known), what went wrong (outcomes.py), and how
    much slower than it can be the host was (1: not at all)."""

    ms: float
    peak_bytes: int
    trouble: int
    slowness: float

    @property
    def undisturbed(self) -> bool:
        return self.slowness <= MOST_SLOWNESS


@dataclass(slots=True)
class Timing:
    """Of steps of one plan that follow one another. ``add`` each; they are over when no rank ``wants_more``."""

    unready: int = 0  # so many are not timed
    least: int = LEAST
    most: int = MOST
    warms_up: bool = False  # steps may get shorter, for as long as MOST_WARMING
    steps: int = 0  # so far
    over: bool = False
    _found: list[Timed] = field(default_factory=list)

    @classmethod
    def none(cls) -> Timing:
        """Nothing is timed."""
        return cls(over=True)

    @classmethod
    def before_recorded(cls, first: bool, afresh: bool, pipelined: bool) -> Timing:
        """``first``: of a run. ``afresh``: of no new plan. ``pipelined``: as many in all stages, or one would wait in
        a step that it times while another one plans."""
        if pipelined:
            return cls(FIRST_PIPELINED - 1 if first else int(not afresh), 1, 1)
        return cls(int(not afresh), warms_up=first)

    @property
    def times(self) -> bool:
        """The next step is to be timed."""
        return not self.over and self.steps >= self.unready

    @property
    def often(self) -> bool:
        """More than one step was timed."""
        return len(self._found) > 1

    def add(
        self, trouble: int = 0, step_ms: float | None = None, peak_bytes: int = 0, slowness: float = 1.0
    ) -> None:
        """A step, as of Timed. ``step_ms``: if it ``times``."""
        self.steps += 1
        if step_ms is None:
            return
        found = self._found
        found.append(Timed(step_ms, peak_bytes, trouble, slowness))
        if self.warms_up:
            length = WINDOW if _error_share(found[-WINDOW:]) <= ERROR_SHARE else NOISY_WINDOW
            before, now = found[-2 * length : -length], found[-length:]
            settled = len(before) == length and _median(now) >= (1 - WARMING_SHARE) * _median(before)
            if settled or len(found) >= MOST_WARMING:
                self.warms_up = False
                del found[:-length]

    @property
    def wants_more(self) -> bool:
        if self.steps < self.unready or self.warms_up or len(self._found) < self.least:
            return True
        return len(self._found) < self.most and (self._torn or self.error_share > ERROR_SHARE)

    @property
    def slowness(self) -> float:
        """Of the last step, as far as it is known."""
        return self._found[-1].slowness if self._found else 1.0

    def agree(self, over: bool, slowness: float) -> None:
        """All ranks: whether no rank wants more, and of the slowest host in the last step, which others waited for."""
        self.over = over
        if self._found:
            self._found[-1] = self._found[-1]._replace(slowness=slowness)

    @property
    def _torn(self) -> bool:
        """Undisturbed steps, still too few, took another time than most."""
        undisturbed, middle = self._undisturbed, _median(self._found)
        few = 0 < len(undisturbed) < self.least
        return few and abs(_median(undisturbed) - middle) > ERROR_SHARE * middle

    @property
    def _undisturbed(self) -> list[Timed]:
        return [each for each in self._found if each.undisturbed]

    @property
    def _counted(self) -> list[Timed]:
        undisturbed = self._undisturbed
        return undisturbed if len(undisturbed) >= self.least else self._found

    @property
    def ms(self) -> float | None:
        """What a step takes. None: none was timed."""
        return _median(self._counted) if self._found else None

    @property
    def peak_bytes(self) -> int:
        """The most that one of them needed. 0: not known."""
        return max((each.peak_bytes for each in self._found), default=0)

    def beyond(self, peak_bytes: int) -> int:
        """What one of them needed above that."""
        return max(0, self.peak_bytes - peak_bytes)

    @property
    def trouble(self) -> int:
        """Of most of them at least."""
        return median_low(each.trouble for each in self._found) if self._found else 0

    @property
    def error_share(self) -> float:
        """To what part of it ``ms`` is known. 0 where one step cannot tell."""
        return _error_share(self._counted)


# Of the median of what differs from a median by chance, to make it a standard deviation.
_DEVIATIONS = 1.4826


def _median(found: Sequence[Timed]) -> float:
    return median(each.ms for each in found)


def _error_share(found: Sequence[Timed]) -> float:
    """By the median of differences: one step that took twice as long says nothing of the others."""
    middle = _median(found) if found else 0.0
    if not middle or len(found) < 2:
        return 0.0
    return _DEVIATIONS * median(abs(each.ms - middle) for each in found) / len(found) ** 0.5 / middle
