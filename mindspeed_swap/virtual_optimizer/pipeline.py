"""Pipeline: slices of the arena pass through device buffers, one on its way in, one in work, one on its way out."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event, Stream
from mindspeed_swap.virtual_optimizer.slices import Slice
from mindspeed_swap.virtual_optimizer.waits import Wait

BUFFERS = 3

Streams = tuple[Stream, Stream]  # for copies in, for copies out


class Pipeline:
    """``host``: the arena, flat uint8, registered."""

    def __init__(
        self, host: torch.Tensor, accelerator: Accelerator, streams: Streams, skip_waits: frozenset[Wait] = frozenset()
    ) -> None:
        self._host = host
        self._accelerator = accelerator
        self._h2d, self._d2h = streams
        self._skip_waits = skip_waits
        self._slices: list[Slice] = []
        self._buffers: list[torch.Tensor] = []
        self._loaded: list[Event] = []  # of each slice so far
        self._stored: list[Event | None] = []  # of each buffer: its last copy out
        self._done = 0  # slices

    @contextmanager
    def running(self, slices: list[Slice]) -> Iterator[None]:
        """Allocates the buffers and begins to load. At the end all is in host memory, in the order of the compute
        stream. Raises torch.OutOfMemoryError."""
        self._slices, self._loaded, self._done = slices, [], 0
        count = min(BUFFERS, len(slices))
        nbytes = max((each.nbytes for each in slices), default=0)
        self._stored = [None] * count
        try:
            self._buffers = [self._accelerator.empty(nbytes) for _ in range(count)]
            if slices:
                compute = self._accelerator.compute_stream()
                self._wait(Wait.LOAD_AFTER_COMPUTE, self._h2d, self._accelerator.record(compute))
            self._load_ahead()
            yield
        finally:
            compute = self._accelerator.compute_stream()
            for event in (*self._loaded[-count:], *self._stored):
                if event is not None:
                    self._wait(Wait.END_AFTER_STORE, compute, event)
            self._buffers = []

    @contextmanager
    def on_device(self, each: Slice) -> Iterator[torch.Tensor]:
        """The buffer that holds the next slice, in the order of the compute stream. It is stored if nothing is raised.

        Slices come in the order given to ``running``.
        """
        assert self._slices[self._done] is each
        accelerator, compute = self._accelerator, self._accelerator.compute_stream()
        at = self._done % len(self._buffers)
        self._wait(Wait.STEP_AFTER_LOAD, compute, self._loaded[self._done])
        yield self._buffers[at]
        self._wait(Wait.STORE_AFTER_STEP, self._d2h, accelerator.record(compute))
        for start, offset, nbytes in each.ranges:
            accelerator.copy(self._host[start : start + nbytes], self._buffers[at][offset : offset + nbytes], self._d2h)
        self._stored[at] = accelerator.record(self._d2h)
        self._done += 1
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Queue copies in as far as there are buffers."""
        while len(self._loaded) < min(self._done + len(self._buffers), len(self._slices)):
            each, at = self._slices[len(self._loaded)], len(self._loaded) % len(self._buffers)
            stored = self._stored[at]
            if stored is not None:
                self._wait(Wait.REFILL_AFTER_STORE, self._h2d, stored)
            for start, offset, nbytes in each.ranges:
                source = self._host[start : start + nbytes]
                self._accelerator.copy(self._buffers[at][offset : offset + nbytes], source, self._h2d)
            self._loaded.append(self._accelerator.record(self._h2d))

    def _wait(self, wait: Wait, stream: Stream, event: Event) -> None:
        if wait not in self._skip_waits:
            self._accelerator.wait(stream, event)
