"""Records one step into a StepTrace while the manager runs it. Costs a few microseconds per event, so it is off once
a plan is stable."""
from __future__ import annotations

from bisect import bisect_right
from time import perf_counter
from typing import NamedTuple

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event, Interval
from mindspeed_swap.core.host_lag import Mark, idle
from mindspeed_swap.core.module_recorder import ModuleRecorder, Tracked
from mindspeed_swap.core.module_state import ModuleState
from mindspeed_swap.core.saved_tensor import SavedTensor, State
from mindspeed_swap.core.trace import (
    BACKWARD,
    EXIT,
    FORWARD,
    OUTSIDE,
    RECOMPUTED,
    CopyRecord,
    Key,
    ModuleKey,
    OperatorRecord,
    Point,
    Position,
    SavedRecord,
    StepTrace,
    WaitRecord,
    waited_ms,
)
from mindspeed_swap.core.waits import Wait

CLOCK_SAMPLES = 5  # of which the earliest counts


def _use_count(address: int) -> int:
    return torch._C._storage_Use_Count(address)


def sole_holder_count() -> int:
    """What the use count of a storage is when one alias is all that holds it. The figure differs per torch version."""
    tensor = torch.empty(1)
    alias = tensor.detach()
    address = alias.untyped_storage()._cdata
    del tensor
    return _use_count(address)


def is_sole_holder(saved: SavedTensor, sole_count: int) -> bool:
    """True if dropping our alias frees the memory (or has freed it)."""
    if saved.state in (State.DEVICE, State.LEAVING):
        return _use_count(saved.identity[0]) <= sole_count
    return not saved.held_elsewhere()


class Here(NamedTuple):
    """A place in the stream, and how many waits for copies and second runs had been by then."""

    event: Event
    waits: int
    again: int


class Recorder:
    """Builds the trace of one step. The manager reports; nothing here changes what it does.

    At each event the manager first reports the dead, then the ``point``, then what happens at that point. So residence
    only begins at points, and whatever left inside an interval (evicted, dead) is gone from it when it is closed: what
    is resident when a point closes was resident through the whole interval.

    Note: [A head start]
    Recording takes the host longer than the step itself would. Where compute then waits for the host, intervals are
    measured that no other step has. So compute is kept busy as the step begins (of a pipeline, in all stages at once),
    for as long as recording took the host in the last recorded step: the host is as far ahead as it would be without.
    That is in no time of the trace; what it hides is, the host's way to the first point. Where the host catches up
    all the same, host_lag.py takes out what recording took.
    """

    def __init__(self, accelerator: Accelerator, trace: StepTrace, head_start_ms: float = 0.0) -> None:
        self._accelerator = accelerator
        self._sole_count = sole_holder_count()
        self._events: list[Event] = []  # of each point, and of the end
        self._marks: list[Mark] = []  # likewise
        self._records: dict[int, SavedRecord] = {}  # by serial
        self._not_sole: dict[int, SavedTensor] = {}
        self._resident: dict[int, int] = {}  # serial -> bytes on the device now
        self._resident_bytes = 0
        self._gone: dict[Key, int] = {}  # dropped ones: the point at which they were found gone
        self._copies: list[tuple[Key, int, bool, Event, Event]] = []  # ..., to the host, before, after
        self._waits: list[tuple[Key, int, str, Event, Event]] = []  # ..., next point, cause, before, after
        self._again: list[tuple[ModuleKey, Here, Here]] = []  # modules that ran again, inner ones first: begin, end
        self._operators: list[tuple[str, int, Event, Event]] = []  # name, next point, before, after
        self._again_peak = 0  # of running modules again, since the last point
        self._before_again: Interval | None = None  # what had been measured of that interval before
        self.modules = ModuleRecorder()
        self.trace = trace
        self.host_ms = 0.0  # that recording has taken
        accelerator.take_interval()
        self._head_start: Event = None
        if head_start_ms:
            self._head_start = accelerator.record(accelerator.compute_stream())
            accelerator.occupy(head_start_ms)
        self._start = accelerator.record(accelerator.compute_stream())
        self._begun = perf_counter()
        self._lag_ms = 0.0  # of the host at the first point

    @property
    def _next(self) -> int:
        return len(self.trace.points)

    def take_interval(self) -> Interval:
        """The accelerator's."""
        start = perf_counter()
        interval = self._accelerator.take_interval()
        self.took_since(start)
        return interval

    def point(self, position: Position, interval: Interval) -> None:
        """Close the interval that ends here. Call it before the position's own releases and prefetches."""
        start = perf_counter()
        self._mark()
        memory = self._accelerator.memory()
        allocated = memory.allocated_bytes
        index = self._next
        ours: list[SavedTensor] = []  # nobody has saved it, and now only a call that will run again holds it
        for serial, saved in list(self._not_sole.items()):
            if is_sole_holder(saved, self._sole_count):
                del self._not_sole[serial]
                if serial in self._records:
                    self._records[serial].sole = index
                    if saved.state is State.DROPPED:
                        self.left(saved)
                        self._gone[saved.key] = index
                elif saved.state is State.DEVICE:
                    ours.append(saved)
        peak, request = interval.peak_bytes, interval.largest_request_bytes
        if self._before_again is not None:
            peak = max(peak, self._before_again.peak_bytes)
            request = max(request, self._before_again.largest_request_bytes)
        again = max(0, self._again_peak - peak)
        self._again_peak, self._before_again = 0, None
        if not index:
            self._lag_ms = 1000 * (start - self._begun)
        kept = sum(saved.nbytes for saved in ours)  # without the plan it would be gone
        self.trace.points.append(
            Point(
                position, 0.0, allocated - kept, peak + again, request, self._resident_bytes, memory.reserved_bytes,
                again,
            )
        )  # fmt: skip
        self._resident |= {saved.serial: saved.nbytes for saved in ours}
        self._resident_bytes += kept
        if position.phase == FORWARD and position.layer == OUTSIDE and position.ordinal == EXIT:
            self.trace.held_bytes = max(self.trace.held_bytes, allocated - self.trace.static_bytes)
        self.took_since(start)

    def _mark(self) -> Event:
        start = perf_counter()
        event = self._accelerator.record(self._accelerator.compute_stream())
        self._events.append(event)
        self._marks.append(Mark(1000 * start, queueing_ms=1000 * (perf_counter() - start)))
        return event

    def took_since(self, start: float, *, moving: bool = False) -> None:
        """Recording took the host from then, by ``perf_counter``, until now. ``moving``: a move did, of a plan."""
        took = 1000 * (perf_counter() - start)
        mark = self._marks[-1] if self._marks else Mark(0.0)
        if moving:
            mark.moving_ms += took
        else:
            mark.recording_ms += took
            self.host_ms += took

    def saved(self, saved: SavedTensor) -> None:
        """First save, at the point just closed. (What nobody has saved yet is resident once nobody else holds it, and
        no save.)"""
        index = self._next - 1
        start = perf_counter()
        if saved.key.ordinal < 0:
            self._not_sole[saved.serial] = saved
            return
        record = SavedRecord(saved.key, saved.nbytes, index, index, None, None, None, True)
        self._records[saved.serial] = record
        self.trace.saved.append(record)
        self._not_sole[saved.serial] = saved
        self.modules.saved(saved, record)
        self.arrived(saved)
        self.took_since(start)

    def used(self, saved: SavedTensor) -> None:
        """Saved again, at the point just closed."""
        record = self._records.get(saved.serial)
        if record is not None:
            record.last_use = self._next - 1

    def read(self, saved: SavedTensor) -> None:
        """Read in backward, at the point just closed."""
        record = self._records.get(saved.serial)
        if record is not None and record.first_read is None:
            record.first_read = self._next - 1
            start = perf_counter()
            self.modules.read(record)
            self.took_since(start)

    def left(self, saved: SavedTensor) -> None:
        """Device memory given up: released at a point, or evicted inside an interval."""
        self._resident_bytes -= self._resident.pop(saved.serial, 0)

    def arrived(self, saved: SavedTensor) -> None:
        """Device memory taken at the point just closed."""
        if saved.serial in self._records and saved.serial not in self._resident:
            self._resident[saved.serial] = saved.nbytes
            self._resident_bytes += saved.nbytes

    def copied(self, saved: SavedTensor, to_host: bool, before: Event, after: Event) -> None:
        """Its copy is queued between the two events."""
        self._copies.append((saved.key, saved.nbytes, to_host, before, after))

    def waited(self, saved: SavedTensor, wait: Wait, before: Event, after: Event) -> None:
        """Compute waited for its copy between the two events."""
        self._waits.append((saved.key, self._next, wait.name, before, after))

    def operator(self, name: str, before: Event, after: Event) -> None:
        """A custom operator ran between the two events."""
        self._operators.append((name, self._next, before, after))

    def enter(
        self, key: ModuleKey, inputs: list[tuple[torch.Tensor, SavedTensor | None]], state: ModuleState, once: bool
    ) -> Tracked:
        """A module begins, at the point just closed."""
        return self.modules.enter(key, self._next - 1, self._known(inputs), state, once=once)

    def exit(
        self, tracked: Tracked, outputs: list[tuple[torch.Tensor, SavedTensor | None]], *, unchanged: bool,
        gave: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """It ends, at the point just closed."""
        self.modules.exit(tracked, self._next - 1, self._known(outputs), unchanged=unchanged, gave=gave)

    def _known(
        self, found: list[tuple[torch.Tensor, SavedTensor | None]]
    ) -> list[tuple[torch.Tensor, SavedRecord | None]]:
        return [(tensor, self._records.get(saved.serial) if saved else None) for tensor, saved in found]

    def here(self, event: Event) -> Here:
        """Where a module begins to run again, or ends; perhaps within another one."""
        return Here(event, len(self._waits), len(self._again))

    def ran_again(self, call: ModuleKey, begin: Here, end: Here) -> None:
        self._again.append((call, begin, end))

    def recomputed(self, call: ModuleKey, earlier: Interval, interval: Interval) -> None:
        """That one did, within no other one. Its peak is kept apart from what the interval needs anyway."""
        _, begin, end = self._again[-1]
        self._waits.append((Key(*call[:3], 0), self._next, RECOMPUTED, begin.event, end.event))
        self._again_peak = max(self._again_peak, interval.peak_bytes)
        known = self._before_again or earlier
        self._before_again = Interval(
            max(known.peak_bytes, earlier.peak_bytes), max(known.largest_request_bytes, earlier.largest_request_bytes)
        )

    def died(self, saved: SavedTensor) -> None:
        """Found dead before the next point is closed."""
        self.left(saved)
        self._not_sole.pop(saved.serial, None)
        record = self._records.pop(saved.serial, None)
        if record is not None:
            record.died = self._next

    def _ahead_ms(self) -> float:
        """By how much the host's clock is ahead of the device's, which has nothing to do now."""
        found = []
        for _ in range(CLOCK_SAMPLES):  # whoever holds the interpreter's lock makes one of them late
            event = self._accelerator.record(self._accelerator.compute_stream())
            self._accelerator.synchronize(event)
            found.append(1000 * perf_counter() - self._accelerator.elapsed_ms(self._start, event))
        return min(found)

    def finish(self, evicted_bytes: int) -> StepTrace:
        """Waits for the device, fills in the times (as if compute had never waited for a copy: a plan brings waits of
        its own) and says of every record whether it can be moved at all."""
        trace = self.trace
        trace.evicted_bytes = evicted_bytes
        end = self._mark()
        # All of it: the last copies may outlast the step, as may what other streams of the user wait for.
        self._accelerator.synchronize()
        ahead_ms = self._ahead_ms()
        hidden_ms = head_ms = 0.0
        if self._head_start is not None:
            head_ms = self._accelerator.elapsed_ms(self._head_start, self._start)
            hidden_ms = min(self._lag_ms, head_ms)

        def elapsed(event: Event) -> float:
            return self._accelerator.elapsed_ms(self._start, event)

        waits = ((index, elapsed(after) - elapsed(before)) for _, index, _, before, after in self._waits)
        waited = waited_ms(waits, len(self._marks))
        for mark, event, ms in zip(self._marks, self._events, waited, strict=True):
            mark.device_ms, mark.stalled_ms = elapsed(event), ms
        trace.stall_ms = waited[-1]
        recording, moving, empty = idle(self._marks, ahead_ms, head_ms - hidden_ms)
        passed = [mark.device_ms for mark in self._marks]

        def span(before: Event, after: Event) -> tuple[float, float]:
            start, end = elapsed(before), elapsed(after)
            index = bisect_right(passed, start)
            begin = hidden_ms + start - (recording[index - 1] if index else 0.0)
            return begin, begin + end - start

        for key, nbytes, to_host, before, after in self._copies:
            trace.copies.append(CopyRecord(key, nbytes, to_host, *span(before, after)))
        for key, index, cause, before, after in self._waits:
            trace.waits.append(WaitRecord(key, index, cause, *span(before, after)))
        for name, index, before, after in self._operators:
            trace.operators.append(OperatorRecord(name, index, *span(before, after)))
        for i, (point, mark) in enumerate(zip(trace.points, self._marks, strict=False)):
            point.time_ms = hidden_ms + mark.device_ms - mark.stalled_ms - recording[i] - moving[i]
            point.waits_for_host, point.moving_ms = empty[i], moving[i]
        trace.forward_waits, trace.backward_waits = trace.waiting_share(FORWARD), trace.waiting_share(BACKWARD)
        trace.step_ms = hidden_ms + elapsed(end) - recording[-1]
        for record in trace.saved:
            if record.sole is None:
                record.movable, record.reason = False, "held by others"
            elif record.first_read is None:
                record.movable, record.reason = False, "not read in backward"
            elif record.died is None:
                record.movable, record.reason = False, "outlives the step"
        trace.modules = self.modules.finish(trace, self._gone)
        again_ms = self._again_ms()
        for module in trace.modules:
            module.again_ms = again_ms.get(module.key)
        return trace

    def _again_ms(self) -> dict[ModuleKey, float]:
        """What each took by itself: without waits for copies, and without those that ran within it."""
        found: list[float] = []
        for _, begin, end in self._again:
            waited = sum(self._accelerator.elapsed_ms(*wait[3:]) for wait in self._waits[begin.waits : end.waits])
            took = self._accelerator.elapsed_ms(begin.event, end.event)
            found.append(max(0.0, took - waited - sum(found[begin.again : end.again])))
        return dict(zip((call for call, _, _ in self._again), found, strict=True))
