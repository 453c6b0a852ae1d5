"""The simulated device as an Accelerator: compute on the host thread, copies on worker threads behind a slow link.

Compute is synchronous, so the compute stream is always idle: an event recorded on it has passed at once, and waiting on
it blocks the host. Copies that are not waited for show as NaN, see ``sim_copy_engine.h``.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Bytes, DeviceMemory, Event, Interval, Stream, flat
from mindspeed_swap.sim import device

# torch.empty itself may have been redirected, see mindspeed_swap.sim; this is what it was.
_raw_empty = torch._C._VariableFunctions.empty

COMPUTE = -1  # copy streams count from 0


class SimAccelerator(Accelerator):
    """Installs the simulated device if that has not been done. There is one per process: instances share it."""

    name = "sim"
    kernels_use_host_memory_best = False  # they use it as fast as memory here, which no device does

    def __init__(self) -> None:
        device.install()
        self._ext = device.extension()

    # ---- whose memory
    def owns(self, tensor: torch.Tensor) -> bool:
        return self._ext.owns(tensor)

    def memory(self) -> DeviceMemory:
        allocated = self._ext.allocated()
        return DeviceMemory(allocated, allocated, self._ext.capacity())

    def take_interval(self) -> Interval:
        return Interval(*self._ext.take_interval())

    def empty(self, nbytes: int) -> torch.Tensor:
        with device.device_memory():
            return _raw_empty((nbytes,), dtype=torch.uint8, device="cpu")

    def on_pressure(self, handler: Callable[[int, int], bool] | None) -> bool:
        self._ext.set_pressure_handler(handler)
        return True

    # ---- order
    def compute_stream(self) -> Stream:
        return COMPUTE

    def new_stream(self) -> Stream:
        return self._ext.new_stream()

    def record(self, stream: Stream) -> Event:
        return self._ext.Event.now() if stream == COMPUTE else self._ext.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        if stream == COMPUTE:
            event.synchronize()
        else:
            self._ext.wait(stream, event)

    def done(self, event: Event) -> bool:
        return event.done()

    def synchronize(self, event: Event | None = None) -> None:
        if event is None:
            self._ext.synchronize()
        else:
            event.synchronize()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return start.elapsed_ms(end)

    # ---- bytes
    def copy(self, dst: Bytes, src: Bytes, stream: Stream) -> None:
        """As in the contract, and strict about it: ValueError for what a real device would do slowly or not at all."""
        dst, src = flat(dst), flat(src)
        nbytes = dst.numel()
        for tensor in (dst, src):
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.numel() != nbytes:
                raise ValueError("copy: expected contiguous uint8 tensors of equal length")
        if nbytes == 0:
            return
        to_host = self._ext.owns(src)
        if to_host == self._ext.owns(dst):
            raise ValueError("copy: one tensor must be on the device and the other in host memory")
        host = dst if to_host else src
        if not self._ext.is_registered(host.data_ptr(), nbytes):
            raise ValueError("copy: the host memory is not registered (register_host)")
        link = self._ext.LINK_D2H if to_host else self._ext.LINK_H2D
        if stream == COMPUTE:
            dst.copy_(src)
        else:
            self._ext.copy(stream, dst.data_ptr(), src.data_ptr(), nbytes, link)

    def register_host(self, address: int, nbytes: int) -> None:
        """Counted in ``mindspeed_swap.sim.device.stats()["registered_bytes"]``. ValueError if it overlaps another."""
        self._ext.register_host(address, nbytes)

    def unregister_host(self, address: int) -> None:
        """Waits for copies that still use the memory, whose data it spoils: they should have been waited for."""
        self._ext.unregister_host(address)

    def map_host(self, host: torch.Tensor) -> torch.Tensor:
        # Through ctypes for a storage of its own: a view would have the whole slab's.
        memory = (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
        memory.owner = host  # type: ignore[attr-defined]  # the tensor keeps ``memory``, which keeps the block mapped
        with torch.inference_mode(False):
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
        device.mark_mapped(tensor)
        return tensor

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with device.host_memory():
            return tensor.clone()

    def close(self) -> None:
        """Copies still queued are dropped (synchronize first) and all host memory is unregistered."""
        self._ext.set_pressure_handler(None)
        self._ext.shutdown()
