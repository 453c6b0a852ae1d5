"""What torch's own devices have in common: ``torch.cuda`` and ``torch.npu`` are one interface, a caching allocator
under a process memory fraction, and streams and events that are handled alike."""
from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, Bytes, DeviceMemory, Interval, flat
from mindspeed_swap.core.accelerator.watch import Handler, watch_allocator
from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import format_bytes, parse_bytes

CAPACITY = "MINDSPEED_SWAP_DEVICE_CAPACITY"


def cap_memory(module: Any, index: int) -> int:
    """Cap device ``index`` for this process as MINDSPEED_SWAP_DEVICE_CAPACITY says. Returns the device's own bytes.

    ``module``: torch.cuda or torch.npu. Creates a context. Raises SettingError if the device has less.
    """
    # The figure that the allocator multiplies its fraction with; the device's properties say a little less.
    total_bytes: int = module.mem_get_info(index)[1]
    text = os.environ.get(CAPACITY)
    if text:
        wanted = parse_bytes(text, CAPACITY)
        if wanted > total_bytes:
            raise SettingError(
                f"{CAPACITY}={text!r} is more than the {format_bytes(total_bytes)} ({total_bytes} bytes) "
                f"of {module.get_device_name(index)}: give less, or unset it to use all of the device"
            )
        module.set_per_process_memory_fraction(wanted / total_bytes, index)
    return total_bytes


class TorchAccelerator(Accelerator):
    """The current device of ``module`` (torch.cuda or torch.npu), already initialised."""

    def __init__(
        self,
        module: Any,
        build_guard: Callable[[], Any],
        live_stream: Callable[[int], tuple[int, int, int]],
        set_stream: Callable[..., None],
    ) -> None:
        """``build_guard`` loads ``csrc/oom_guard.cpp`` for this device; the other two are what the module's own
        functions for the current stream call. Raises SettingError for a capacity that the device does not have."""
        self._module = module
        self._live_stream, self._set_stream = live_stream, set_stream
        self._index: int = module.current_device()
        self._device = torch.device(self.name, self._index)
        self._total_bytes = cap_memory(module, self._index)
        self._usable_bytes = self._total_bytes  # less what others have
        self._own_fraction: float | None = None  # what leave_room has set
        self._streams: dict[tuple[int, int, int], Any] = {}
        self._watch, self._hooked = watch_allocator(module, str(self._device), self._index, build_guard)
        atexit.register(self.close)  # no handler may be called, nor keep tensors alive, while Python goes away

    # ---- whose memory
    def owns(self, tensor: torch.Tensor) -> bool:
        # By the device only: under torch_npu's transfer_to_npu, flags for CUDA are true on an NPU.
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        # Memory that came from elsewhere (from_blob: DLPack, __cuda_array_interface__, IPC, symmetric memory) has no
        # allocator and so cannot be resized: freeing it gives us nothing.
        return tensor.untyped_storage().resizable()

    def memory(self) -> DeviceMemory:
        allocated, reserved = self._watch.memory(self._index)
        # Asked every time: training scripts set a fraction of their own, some of them late.
        fraction = self._module.get_per_process_memory_fraction(self._index)
        return DeviceMemory(allocated, reserved, min(self._usable_bytes, round(fraction * self._total_bytes)))

    def leave_room(self, nbytes: int) -> None:
        ours, fraction = self._own_fraction, self._module.get_per_process_memory_fraction(self._index)
        self._own_fraction, self._usable_bytes = None, self._total_bytes
        if fraction < 1 and fraction != ours:
            return
        free_bytes, total_bytes = self._module.mem_get_info(self._index)
        self._usable_bytes = free_bytes + self._watch.memory(self._index)[1]
        least_bytes = max(0, self._usable_bytes - nbytes)
        if nbytes and self._hooked:
            self._module.set_per_process_memory_fraction(least_bytes / total_bytes, self._index)
            # As it is told again: rounded.
            self._own_fraction = self._module.get_per_process_memory_fraction(self._index)
            return
        self._usable_bytes = least_bytes  # only counted: without the hook nothing would make room for what is refused
        if ours is not None:
            self._module.set_per_process_memory_fraction(1.0, self._index)

    def take_room(self) -> bool:
        ours, self._own_fraction = self._own_fraction, None
        if ours is None or ours != self._module.get_per_process_memory_fraction(self._index):
            return False
        self._module.set_per_process_memory_fraction(1.0, self._index)
        return True

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def take_interval(self) -> Interval:
        return Interval(*self._watch.take_interval())

    def empty(self, nbytes: int) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with torch.inference_mode(False):  # an inference tensor would be refused by a later backward
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def empty_strided(
        self, nbytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        # In one call, where that gives all of the bytes.
        if offset == 0 and not torch.is_inference_mode_enabled():
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
            if tensor.untyped_storage().nbytes() == nbytes:
                return tensor
            del tensor
        return super().empty_strided(nbytes, dtype, shape, stride, offset)

    def on_pressure(self, handler: Handler | None) -> bool:
        if self._hooked:
            self._watch.set_handler(handler)
        return self._hooked

    # ---- order
    def compute_stream(self) -> Any:
        # The live one; only the Python object for it is remembered, which is most of what current_stream() costs.
        live = self._live_stream(self._index)
        stream = self._streams.get(live)
        if stream is None:
            stream = self._streams[live] = self._module.current_stream(self._index)
        return stream

    def new_stream(self) -> Any:
        """A stream of torch's pool: it is never destroyed, so ask once and keep it."""
        return self._module.Stream(self._index)

    def record(self, stream: Any) -> Any:
        # Not pooled: creating an event costs less than finding out in Python whether an old one is still referred to.
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any = None) -> None:
        if event is None:
            self._module.synchronize(self._index)
        else:
            event.synchronize()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    # ---- bytes
    def copy(self, dst: Bytes, src: Bytes, stream: Any) -> None:
        # One asynchronous memcpy, no kernel. `copy_` keeps neither tensor alive until the copy is over; whoever queued
        # it holds both until an event behind it has passed.
        # This is `with module.stream(stream)` without its checks, which cost ten times as much as the copy itself.
        live = self._live_stream(self._index)
        self._set_stream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            self._move(flat(dst), flat(src))
        finally:
            self._set_stream(*live)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """On the live stream."""
        dst.copy_(src, non_blocking=True)

    def close(self) -> None:
        """Removes the allocator hook. Streams and the capacity stay: both are torch's, for the process."""
        atexit.unregister(self.close)
        self.take_room()
        self._watch.uninstall()
        self._hooked = False
