"""Streams and events of the simulated device: compute runs on the calling thread, so every queue is always empty."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from mindspeed_swap.sim import current
from mindspeed_swap.sim.patching import constant, replace

_ids = itertools.count()


class Event:
    """A mark that has passed as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between two recorded events. Raises RuntimeError for one never recorded."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1e3


class Stream:
    """A queue without anything in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = next(_ids)
        self.device = current.device()
        self.device_index = current.device_index()
        self.priority = kwargs.get("priority", 0)
        self._entered: list[Stream] = []

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def __enter__(self) -> Stream:
        self._entered.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        set_stream(self._entered.pop())


class StreamContext:
    """``with torch.cuda.stream(stream)``; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__()


_default = Stream()
_of_thread = threading.local()


def default_stream(device: Any = None) -> Stream:
    return _default


def current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", _default)


def set_stream(stream: Stream) -> None:
    if stream is not None:
        _of_thread.stream = stream


def external_stream(*args: Any, **kwargs: Any) -> Stream:
    return Stream()


def redirect() -> None:
    """Patch torch.cuda's streams and events and the device-neutral torch.Stream and torch.Event."""
    capturing = constant(False)
    replace(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        ExternalStream=external_stream,
        get_stream_from_external=external_stream,
        StreamContext=StreamContext,
        stream=StreamContext,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=set_stream,
        is_current_stream_capturing=capturing,
    )
    replace(torch.cuda.graphs, is_current_stream_capturing=capturing)
    for holder in (torch.cuda.streams, torch):
        replace(holder, Stream=Stream, Event=Event)
