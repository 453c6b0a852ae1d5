"""StepClock: when steps begin and end, by events on the compute stream."""
from __future__ import annotations

from mindspeed_swap.core.accelerator.base import Accelerator, Event
from mindspeed_swap.core.recorder import Recorder

# Of a step. What takes longer between two is no part of them: an evaluation, a checkpoint.
MOST_BETWEEN_SHARE = 0.1


class StepClock:
    """A step takes as long as it is from the end of the one before to its own: what the trainer does in between counts.
    Where that one was recorded, the time between was another, as plans are made there. It is then taken to be the least
    that has been seen."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._before: Event = None  # end of the step before this one; None if it was recorded
        self._began: Event = None
        self._ended: Event = None  # likewise of the last step
        self._between_ms: float | None = None

    def begin(self) -> None:
        self._before, self._ended = self._ended, None
        self._began = self._now()

    def end(self, recorder: Recorder | None) -> None:
        """``recorder``: of a step that was recorded. Its trace is finished."""
        if recorder is None:
            self._ended = self._now()
            return
        recorder.trace.step_ms = self._with_between(recorder.trace.step_ms)

    def step_ms(self) -> float:
        """Of the last step, which was not recorded. Waits for it."""
        self._accelerator.synchronize(self._ended)
        return self._with_between(self._accelerator.elapsed_ms(self._began, self._ended))

    def _with_between(self, step_ms: float) -> float:
        found = [] if self._between_ms is None else [self._between_ms]
        if self._before is not None:
            found.append(self._accelerator.elapsed_ms(self._before, self._began))
        found = [each for each in found if each <= MOST_BETWEEN_SHARE * step_ms]
        if not found:
            return step_ms
        self._between_ms = min(found)
        return step_ms + self._between_ms

    def _now(self) -> Event:
        return self._accelerator.record(self._accelerator.compute_stream())
