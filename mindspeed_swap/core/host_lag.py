"""What recording took the host, taken out of the times of a recorded step. Pure; imports no torch.

Where compute waits for the host (small kernels, experts, whatever reads a value from the device in every layer), it
also waits for recording, and intervals come out longer than they are in any other step: by half, for experts. A point
marks the stream first of all. How long after it was queued the device passed the mark is how much work it still had
while the point was recorded; what recording took beyond that, the device was idle. So it is with the host's part of a
plan's moves: the times of the points are those of a step in which nothing moves, and what moves cost is told apart.

The two clocks are compared at the end only: good to 0.02 ms for steps of seconds, as clocks of different machines go.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

# A mark in an empty queue is passed within this after the least that any takes (10 us, and as long it takes the host to
# learn of one, which is in the comparison of the clocks).
EMPTY_MS = 0.02
LATENCY_MS = 0.03  # at most, of the least: if it took longer, no queue was ever empty
# What takes so much of the rest of a head start at once is no work of the host: it has waited for the device.
WAITED_SHARE = 0.5


@dataclass(slots=True)
class Mark:
    """Milliseconds, of a clock of each: when the host began to queue it, and when the device passed it."""

    host_ms: float
    recording_ms: float = 0.0  # that took the host, from there to the next mark
    moving_ms: float = 0.0  # likewise
    device_ms: float = 0.0
    stalled_ms: float = 0.0  # of that, waits for copies so far
    queueing_ms: float = 0.0  # of recording_ms, what that mark took


class Idle(NamedTuple):
    """Of each mark: how long the device was idle before it, for one and for the other; whether its queue is empty from
    there to the next."""

    recording_ms: list[float]
    moving_ms: list[float]
    waits: list[bool]


def idle(marks: Sequence[Mark], ahead_ms: float, head_ms: float = 0.0) -> Idle:
    """``ahead_ms``: by how much the host's clock is ahead of the device's, at most. ``head_ms``: the head start that
    the host was given for recording (see recorder.py), as far as it was left at the first mark.

    Until recording has used that up, or the host has waited for the device, marks are early where it is the host that
    the step waits for: none is passed before the host would have come to it. There ``recording_ms`` falls.
    """
    if not marks:
        return Idle([], [], [])
    # From before it is queued: a host that is interrupted on the way makes one mark late, and no other.
    lags = [mark.device_ms + ahead_ms - mark.host_ms for mark in marks]
    least = min(lags)
    lags = [lag - least if least <= LATENCY_MS else lag for lag in lags]
    recording, moving = [0.0], [0.0]
    host_ms = marks[0].device_ms - marks[0].stalled_ms - max(0.0, lags[0] - head_ms)
    for lag, (mark, after) in zip(lags, pairwise(marks), strict=False):
        reached = after.device_ms - after.stalled_ms
        passed = max(0.0, reached - (mark.device_ms - mark.stalled_ms))
        moved = min(passed, max(0.0, mark.moving_ms - lag))
        spent = min(passed, max(0.0, mark.moving_ms + mark.recording_ms - lag)) - moved
        moving.append(moving[-1] + moved)
        recording.append(recording[-1] + spent)
        host_ms += after.host_ms - mark.host_ms - mark.recording_ms - mark.moving_ms
        if after.host_ms - mark.host_ms > WAITED_SHARE * head_ms:
            head_ms = 0.0
        head_ms -= mark.recording_ms
        if head_ms > 0.0:
            recording[-1] = min(recording[-1], reached - moving[-1] - host_ms)
    behind = [lag - mark.queueing_ms for lag, mark in zip(lags, marks, strict=True)]
    return Idle(recording, moving, [max(both) <= EMPTY_MS for both in pairwise([*behind, behind[-1]])])
