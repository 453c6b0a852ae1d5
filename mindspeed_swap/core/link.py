"""How fast bytes travel between device and host: measured once at start, never assumed.

A link is shared: both directions at once are slower each than one alone, so both figures are kept. Everything is in
bytes per millisecond (1 GB/s = 10^6 bytes per millisecond).
"""
from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Event, Stream
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.log import say
from mindspeed_swap.units import MIB

COPY_BYTES = 32 * MIB  # copies from 16 MiB up run at the link's full rate
TRIAL_BYTES = MIB // 4  # tells a slow link from a fast one
MIN_COPY_BYTES = 4 << 10
COPIES = 4  # timed together, so that the time of starting one is hidden behind the one before
ROUNDS = 3  # the median of these: the first one may meet a sleeping link
ROUND_LIMIT_MS = 5.0  # a slower link gets smaller copies: 3 kinds x 3 rounds stay below 0.1 s
SHORTEST_MS = 1e-4  # below the resolution of any event: no division by zero
COPY_OVERHEAD_MS = 0.005  # of one copy: 256 KiB run at 29 GB/s where large copies run at 55
WARN_BELOW = 0.6  # of what the link can do; a healthy PCIe link gives 0.85
GBPS = 1e6  # bytes per ms


@dataclass(frozen=True, slots=True)
class Link:
    """Measured rates in bytes per millisecond."""

    d2h_bytes_per_ms: float  # device to host, nothing else on the link
    h2d_bytes_per_ms: float
    d2h_both_bytes_per_ms: float  # while the other direction is busy too
    h2d_both_bytes_per_ms: float

    def __str__(self) -> str:
        return (
            f"{self.d2h_bytes_per_ms / GBPS:.1f} GB/s to the host, {self.h2d_bytes_per_ms / GBPS:.1f} GB/s back, "
            f"{self.d2h_both_bytes_per_ms / GBPS:.1f} and {self.h2d_both_bytes_per_ms / GBPS:.1f} GB/s at once"
        )


def probe_link(accelerator: Accelerator, pool: HostPool) -> Link | None:
    """Measures the link with copies of up to 32 MiB; takes two such buffers on each side, given back at the end.

    Blocks the host for less than 0.2 s. None, with one line said, if there is no memory for the smallest probe.
    """
    streams = accelerator.new_stream(), accelerator.new_stream()
    nbytes = TRIAL_BYTES
    try:
        with ExitStack() as stack:
            trial = _Probe(accelerator, pool, nbytes, streams, stack)
            trial.to_host(1)  # the first copy of a stream pays for setting it up
            nbytes = min(COPY_BYTES, max(MIN_COPY_BYTES, int(trial.to_host(1) * ROUND_LIMIT_MS / COPIES)))
    except (torch.OutOfMemoryError, MemoryError):
        nbytes = MIN_COPY_BYTES
    while nbytes >= MIN_COPY_BYTES:
        try:
            with ExitStack() as stack:
                return _Probe(accelerator, pool, nbytes, streams, stack).measure()
        except (torch.OutOfMemoryError, MemoryError):
            nbytes //= 4
    say("the link to host memory was not measured: no memory for a probe", every_rank=True)
    return None


def warn_if_slow(link: Link, limit_bytes_per_ms: float | None) -> None:
    """One line if a direction is below 60 % of what the link could do. ``None``: unknown, nothing is said."""
    slower = min(link.d2h_bytes_per_ms, link.h2d_bytes_per_ms)
    if limit_bytes_per_ms and slower < WARN_BELOW * limit_bytes_per_ms:
        say(
            f"slow link: {slower / GBPS:.1f} GB/s of the {limit_bytes_per_ms / GBPS:.1f} GB/s that its PCIe slot has. "
            "Usual causes: host memory on another NUMA node (numactl --membind), a shared PCIe switch, IOMMU or ACS on",
            every_rank=True,
        )


class _Probe:
    """One pair of buffers and one stream per direction, so that both can run at once."""

    def __init__(
        self,
        accelerator: Accelerator,
        pool: HostPool,
        nbytes: int,
        streams: tuple[Stream, Stream],
        stack: ExitStack,
    ) -> None:
        """Raises torch.OutOfMemoryError or MemoryError. ``stack`` gives the host memory back."""
        self._accelerator = accelerator
        self._nbytes = nbytes
        self._streams = streams
        self._host: list[torch.Tensor] = []
        for _ in streams:
            block = pool.alloc(nbytes)
            if block is None:
                raise MemoryError
            stack.callback(pool.free, block)
            for event in block.pending:
                accelerator.synchronize(event)
            self._host.append(block.tensor)
        self._device = [accelerator.empty(nbytes) for _ in streams]
        # Whatever is queued may still be at work on recycled device memory, and none of it shall be timed.
        accelerator.synchronize()

    def _queue(self, direction: int, count: int) -> tuple[Event, Event]:
        stream = self._streams[direction]
        host, device = self._host[direction], self._device[direction]
        dst, src = (host, device) if direction == 0 else (device, host)
        start = self._accelerator.record(stream)
        for _ in range(count):
            self._accelerator.copy(dst, src, stream)
        return start, self._accelerator.record(stream)

    def _rate(self, span: tuple[Event, Event], count: int) -> float:
        self._accelerator.synchronize(span[1])
        return self._nbytes * count / max(self._accelerator.elapsed_ms(*span), SHORTEST_MS)

    def to_host(self, count: int) -> float:
        return self._rate(self._queue(0, count), count)

    def measure(self) -> Link:
        rounds = []
        for _ in range(ROUNDS):
            alone = self.to_host(COPIES), self._rate(self._queue(1, COPIES), COPIES)
            both = [self._queue(direction, COPIES) for direction in (0, 1)]
            rounds.append((*alone, *(self._rate(span, COPIES) for span in both)))
        return Link(*(statistics.median(column) for column in zip(*rounds, strict=True)))
