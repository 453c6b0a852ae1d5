"""NVIDIA GPUs: torch's native caching allocator, CUDA streams and events.

Importing this module touches no device; ``CudaAccelerator()`` does.
"""
from __future__ import annotations

import atexit
import ctypes
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, DeviceMemory, Interval
from mindspeed_swap.core.extension import load_extension
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.units import format_bytes, parse_bytes

CAPACITY = "MINDSPEED_SWAP_DEVICE_CAPACITY"
OOM_HOOK = "MINDSPEED_SWAP_OOM_HOOK"
# The allocator refuses one exbibyte before it looks at its cache or calls the driver: a refusal without side effects.
# (Less would first empty the cache and, with expandable segments, map all memory that the device has.)
REFUSED_BYTES = 1 << 60

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
Handler = Callable[[int, int], bool]


def check_allocator(asked_by: str = "mindspeed_swap") -> None:
    """Raises SettingError if torch does not use its native caching allocator. Creates no CUDA context.

    ``asked_by`` names the setting that needs the allocator, for the message.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend == "cudaMallocAsync":
        raise SettingError(
            f"{asked_by} cannot be used with PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync: it needs torch's native "
            "caching allocator. Remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF)"
        )
    if backend != "native":
        raise SettingError(
            f"{asked_by} cannot be used with a pluggable allocator (torch.cuda.memory.change_current_allocator made it "
            f"{backend!r}; MindSpeed's memory-fragmentation option does that): it needs torch's native caching "
            "allocator. Remove one of the two"
        )
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise SettingError(
            f"{asked_by} cannot be used with PYTORCH_NO_CUDA_MEMORY_CACHING, which switches torch's caching allocator "
            "off: unset it"
        )


def prepare_allocator(asked_by: str) -> None:
    """Check the allocator, and let it use expandable segments unless the user has set it up.

    Swapping frees and allocates large blocks in an order that plain segments answer with fragments: memory that is
    reserved, free, and in no piece large enough. Raises SettingError. Creates no CUDA context.
    """
    check_allocator(asked_by)
    if not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        # The newer name is the one without a deprecation warning.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
        say(f"expandable segments switched on for {asked_by}; set PYTORCH_CUDA_ALLOC_CONF to decide for yourself")


def apply_capacity(index: int) -> int:
    """Cap device ``index`` for this process as MINDSPEED_SWAP_DEVICE_CAPACITY says. Returns the device's own bytes.

    Creates a CUDA context. Raises SettingError if the device has less.
    """
    # The figure that the allocator multiplies its fraction with; the device's properties say a little less.
    total_bytes = torch.cuda.mem_get_info(index)[1]
    text = os.environ.get(CAPACITY)
    if text:
        wanted = parse_bytes(text, CAPACITY)
        if wanted > total_bytes:
            raise SettingError(
                f"{CAPACITY}={text!r} is more than the {format_bytes(total_bytes)} ({total_bytes} bytes) "
                f"of {torch.cuda.get_device_name(index)}: give less, or unset it to use all of the device"
            )
        torch.cuda.set_per_process_memory_fraction(wanted / total_bytes, index)
    return total_bytes


class CudaAccelerator(Accelerator):
    """The current CUDA device of this process. One per process."""

    name = "cuda"

    def __init__(self) -> None:
        """Raises SettingError for no device, a foreign allocator, or a capacity that the device does not have."""
        check_allocator()
        if not torch.cuda.is_available():
            raise SettingError(
                "no CUDA device is available to this process: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or train on "
                "the simulated device"
            )
        torch.cuda.init()
        self._index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        self._total_bytes = apply_capacity(self._index)
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._watch, self._hooked = _watch_allocator(self._index)
        atexit.register(self.close)  # no handler may be called, nor keep tensors alive, while Python goes away

    # ---- whose memory
    def owns(self, tensor: torch.Tensor) -> bool:
        # Dispatch on the device's type only: under torch_npu's transfer_to_npu, `is_cuda` is true on an NPU.
        device = tensor.device
        if device.type != "cuda" or device.index != self._index or tensor.layout is not torch.strided:
            return False
        # Memory that came from elsewhere (from_blob: DLPack, __cuda_array_interface__, IPC, symmetric memory) has no
        # allocator and so cannot be resized: freeing it gives us nothing.
        return tensor.untyped_storage().resizable()

    def memory(self) -> DeviceMemory:
        allocated, reserved = self._watch.memory(self._index)
        # Asked every time: training scripts set a fraction of their own, some of them late.
        fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        return DeviceMemory(allocated, reserved, min(self._total_bytes, round(fraction * self._total_bytes)))

    def take_interval(self) -> Interval:
        return Interval(*self._watch.take_interval())

    def empty(self, nbytes: int) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with torch.inference_mode(False):  # an inference tensor would be refused by a later backward
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def on_pressure(self, handler: Handler | None) -> bool:
        if self._hooked:
            self._watch.set_handler(handler)
        return self._hooked

    # ---- order
    def compute_stream(self) -> torch.cuda.Stream:
        # The live one; only the Python object for it is remembered, which is most of what current_stream() costs.
        live = torch._C._cuda_getCurrentStream(self._index)
        stream = self._streams.get(live)
        if stream is None:
            stream = self._streams[live] = torch.cuda.current_stream(self._index)
        return stream

    def new_stream(self) -> torch.cuda.Stream:
        """A stream of torch's pool: it is never destroyed, so ask once and keep it."""
        return torch.cuda.Stream(self._index)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Not pooled: creating an event costs less than finding out in Python whether an old one is still referred to.
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event | None = None) -> None:
        if event is None:
            torch.cuda.synchronize(self._index)
        else:
            event.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    # ---- bytes
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.cuda.Stream) -> None:
        # Both flat uint8: one cudaMemcpyAsync, no kernel. `copy_` keeps neither tensor alive until the copy is over;
        # whoever queued it holds both until an event behind it has passed.
        # This is `with torch.cuda.stream(stream)` without its checks, which cost ten times as much as the copy itself.
        live = torch._C._cuda_getCurrentStream(self._index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            dst.copy_(src, non_blocking=True)
        finally:
            torch._C._cuda_setStream(*live)

    def register_host(self, address: int, nbytes: int) -> None:
        """Raises RuntimeError if the driver refuses, for example beyond the limit on locked memory."""
        code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        _check(code, f"cudaHostRegister of {format_bytes(nbytes)} of host memory at {address:#x}")

    def unregister_host(self, address: int) -> None:
        """Raises RuntimeError if the memory was not registered."""
        code = torch.cuda.cudart().cudaHostUnregister(address)
        _check(code, f"cudaHostUnregister of host memory at {address:#x}")

    def map_host(self, host: torch.Tensor) -> torch.Tensor:
        # Registered memory has the same address on the device (unified addressing), so kernels need no other pointer.
        tensor = torch.as_tensor(_MappedHost(host), device=self._device)
        if tensor.data_ptr() != host.data_ptr():  # torch has made a copy elsewhere, which nobody would ever see
            raise RuntimeError(f"{self._device} cannot use host memory at {host.data_ptr():#x} in place")
        return tensor

    def device_uuid(self) -> str:
        """As NVML names the device, whatever CUDA_VISIBLE_DEVICES renumbers."""
        return f"GPU-{torch.cuda.get_device_properties(self._index).uuid}"

    def close(self) -> None:
        """Removes the allocator hook. Streams and the capacity stay: both are torch's, for the process."""
        atexit.unregister(self.close)
        self._watch.uninstall()
        self._hooked = False


class _MappedHost:
    """What torch asks of foreign device memory. It keeps this object, and so the memory, as long as the tensor."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._host.numel(),), "typestr": "|u1", "data": (self._host.data_ptr(), False), "version": 2}


def _check(code: Any, what: str) -> None:
    runtime = torch.cuda.cudart()
    if code == runtime.cudaError.success:
        return
    # The runtime remembers the error for this thread, and torch would report it at its next kernel launch.
    forget = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
    if forget is not None:
        forget()
    raise RuntimeError(f"{what} failed: {runtime.cudaGetErrorString(code)} (CUDA error {int(code)})")


# ---- who watches the allocator


class _Watch(Protocol):
    """What ``csrc/oom_guard.cpp`` and its replacement have in common."""

    def memory(self, device: int, /) -> tuple[int, int]: ...
    def take_interval(self) -> tuple[int, int]: ...
    def set_handler(self, handler: Handler | None, /) -> None: ...
    def uninstall(self) -> Any: ...


def _watch_allocator(index: int) -> tuple[_Watch, bool]:
    """The best there is, and whether it retries allocations. Says in one line what was chosen and why."""
    setting = os.environ.get(OOM_HOOK, "1")
    if setting not in ("0", "1"):
        raise SettingError(f"{OOM_HOOK}={setting!r}: expected 1 (use the allocator hook if it works) or 0 (do not)")
    try:
        guard = load_extension(
            "mindspeed_swap_oom_guard_cuda",
            ["oom_guard.cpp"],
            ldflags=[f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10_cuda"],
            include_dirs=_cuda_include_dirs(),
        )
    except (SettingError, RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()[-1]
        consequence = "no allocator hook, evicting ahead; interval peaks are lower bounds"
        say(f"cuda:{index}: {consequence} ({reason})", every_rank=True)
        return _StatisticsOnly(index), False
    reason = f"{OOM_HOOK}=0"
    if setting == "1":
        try:
            guard.install(index)
            guard.self_test(REFUSED_BYTES)
        except RuntimeError as error:
            guard.uninstall()
            reason = str(error).splitlines()[0]
        else:
            say(f"cuda:{index}: out-of-memory is caught in the allocator (hook installed, self-test passed)")
            return guard, True
    guard.track(index)
    consequence = "no allocator hook, evicting ahead; interval peaks from the allocator's trace"
    say(f"cuda:{index}: {consequence} ({reason})", every_rank=setting == "1")
    return guard, False


def _cuda_include_dirs() -> list[str]:
    """Where cuda_runtime.h may be: a toolkit if there is one, else the wheels that come with torch.

    The runtime's wheel leaves out the folder ``crt``; triton, which torch brings too, has it.
    """
    packages = Path(sysconfig.get_paths()["purelib"])
    major = (torch.version.cuda or "").split(".")[0]
    candidates = [
        *(Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)),
        packages / "nvidia" / f"cu{major}" / "include",  # CUDA 13 and later
        packages / "nvidia" / "cuda_runtime" / "include",  # CUDA 12
        Path("/usr/local/cuda/include"),
        packages / "triton" / "backends" / "nvidia" / "include",
    ]
    return [str(folder) for folder in candidates if (folder / "cuda_runtime.h").is_file()]


class _StatisticsOnly:
    """Where the extension cannot be built: what ``torch.cuda.memory_stats`` tells without resetting the user's peaks.

    The peak of an interval is exact if it is the highest so far and else a lower bound, what was allocated at its end.
    The largest request is not visible; the rise within the interval stands for it.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._start_bytes, self._start_peak = self._read()

    def _read(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._index)
        return stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)

    def memory(self, device: int) -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def take_interval(self) -> tuple[int, int]:
        now, torch_peak = self._read()
        peak = max(now, self._start_bytes, torch_peak if torch_peak > self._start_peak else 0)
        rise = peak - min(now, self._start_bytes)
        self._start_bytes, self._start_peak = now, torch_peak
        return peak, rise

    def set_handler(self, handler: Handler | None) -> None:
        raise NotImplementedError("allocations are not retried without the extension")

    def uninstall(self) -> bool:
        return True
