"""What recording took the host, taken out of the times of a recorded step. Pure; imports no torch.

Where compute waits for the host (small kernels, experts, whatever reads a value from the device in every layer), it
also waits for recording, and intervals come out longer than they are in any other step: by half, for experts. A mark
that the device passes as soon as it is queued tells that the queue was empty there; what recording did just before it,
and just after, is then idle time of the device. So is what moves of a plan took: the times of a trace are those of a
step in which nothing moves.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A mark in an empty queue is passed within this, and so are those behind less work than that. (An event takes 10 us,
# and as long it takes the host to learn of one.)
EMPTY_MS = 0.08


@dataclass(slots=True)
class Mark:
    """Milliseconds, of a clock of each: when the device passed it, when the host queued it, and what recording took the
    host between the rest and it, on either side."""

    host_ms: float
    before_ms: float
    after_ms: float = 0.0
    device_ms: float = 0.0
    stalled_ms: float = 0.0  # of that, waits for copies so far
    empty: bool = False  # so was the queue


def idle_ms(marks: Sequence[Mark], ahead_ms: float) -> list[float]:
    """For each mark: how much of the device's time up to there that has cost. Says of each whether it was ``empty``.
    ``ahead_ms``: by how much the host's clock is ahead of the device's."""
    found: list[float] = []
    last: Mark | None = None
    total = 0.0
    for mark in marks:
        mark.empty = mark.device_ms + ahead_ms - mark.host_ms <= EMPTY_MS
        if last is not None:
            spent = last.after_ms * last.empty + mark.before_ms * mark.empty
            passed = mark.device_ms - mark.stalled_ms - (last.device_ms - last.stalled_ms)
            total += max(0.0, min(spent, passed))
        found.append(total)
        last = mark
    return found
