"""torch.cuda and torch.accelerator as functions of the simulated device. Memory figures are its allocator's own."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_swap.sim import current, streams
from mindspeed_swap.sim import device as sim_device
from mindspeed_swap.sim.device import host_memory

NAME = "Simulated device"
CAPABILITY = (8, 0)  # the oldest that has bfloat16: no newer fast path of a library switches itself on

# torch.cuda functions that have nothing to do here.
_NOTHING_TO_DO = (
    "init",
    "_lazy_init",
    "empty_cache",
    "ipc_collect",
    "check_error",
    "reset_accumulated_memory_stats",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
    "_sleep",
)
_ALWAYS_ZERO = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "get_sync_debug_mode")
_TENSOR_TYPES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")

_STATISTICS = ("allocation", "segment", "active", "inactive_split")
_STATISTICS_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_STAT_KEYS = _EVENTS + tuple(
    f"{statistic}.{pool}.{metric}"
    for statistic in _STATISTICS + _STATISTICS_BYTES
    for pool in ("all", "large_pool", "small_pool")
    for metric in ("current", "peak", "allocated", "freed")
)


def redirect() -> None:
    """Patch torch.cuda, its submodules, the pieces of torch._C they call, torch.accelerator and autocast."""
    _redirect_identity()
    _redirect_memory()
    _redirect_random()
    _redirect_tools()
    _redirect_accelerator()
    _redirect_autocast()


def _constant(value: Any) -> Callable:
    """A new function each time: tables of torch are keyed by function."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    return function


def _set(holder: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(holder, name, function)


# ---------------------------------------------------------------- which device
class _DeviceContext:
    """``with torch.cuda.device(index)``."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else device if isinstance(device, int) else torch.device(device).index
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current.device_index()
        current.set_device(-1 if self.idx is None else self.idx)

    def __exit__(self, *exception: Any) -> None:
        current.set_device(self.prev_idx)


class _DeviceOf(_DeviceContext):
    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.get_device() if isinstance(tensor, torch.Tensor) else None)


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=sim_device.capacity(),
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        regs_per_multiprocessor=1 << 16,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=128 << 10,
        shared_memory_per_multiprocessor=164 << 10,
        L2_cache_size=1 << 20,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="0",
    )


def _lazy_call(function: Callable, **kwargs: Any) -> None:
    function()


def _redirect_identity() -> None:
    _set(
        torch.cuda,
        is_available=_constant(True),
        is_initialized=_constant(True),
        is_bf16_supported=_constant(True),
        is_tf32_supported=_constant(False),
        device_count=current.device_count,
        current_device=current.device_index,
        set_device=current.set_device,
        device=_DeviceContext,
        device_of=_DeviceOf,
        get_device_name=_constant(NAME),
        get_device_capability=_constant(CAPABILITY),
        get_device_properties=_properties,
        get_arch_list=lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
        can_device_access_peer=_constant(False),
        synchronize=lambda device=None: sim_device.synchronize(),
        _lazy_call=_lazy_call,
    )


# ---------------------------------------------------------------- memory
def _allocated(device: Any = None) -> int:
    return sim_device.memory_allocated()


def _max_allocated(device: Any = None) -> int:
    return sim_device.max_memory_allocated()


def _reset_peak(device: Any = None) -> None:
    sim_device.reset_peak()


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    total = sim_device.capacity()
    return max(0, total - _allocated()), total


def _memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The keys of a CUDA build. No block is cached or rounded, so reserved, active and requested equal allocated."""
    now, peak = _allocated(), _max_allocated()
    stats = dict.fromkeys(_STAT_KEYS, 0)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        for pool in ("all", "large_pool"):
            stats[f"{kind}.{pool}.current"], stats[f"{kind}.{pool}.peak"] = now, peak
    stats["num_ooms"] = sim_device.stats()["ooms"]
    return OrderedDict(sorted(stats.items()))


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"{NAME}: {_allocated()} bytes allocated, at most {_max_allocated()}, of {sim_device.capacity()}"


def _redirect_memory() -> None:
    functions = {
        "memory_allocated": _allocated,
        "max_memory_allocated": _max_allocated,
        "memory_reserved": _allocated,
        "max_memory_reserved": _max_allocated,
        "memory_cached": _allocated,
        "max_memory_cached": _max_allocated,
        "device_memory_used": _allocated,
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "reset_max_memory_cached": _reset_peak,
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
        "memory_summary": _memory_summary,
        "memory_snapshot": lambda *args, **kwargs: [],
        "get_per_process_memory_fraction": _constant(1.0),
        "get_allocator_backend": _constant("native"),
        "host_memory_stats": lambda: OrderedDict(),
    }
    for name, function in functions.items():
        for holder in (torch.cuda, torch.cuda.memory):
            setattr(holder, name, function)
    for name in _NOTHING_TO_DO:
        function = _constant(None)
        for holder in (torch.cuda, torch.cuda.memory):
            if hasattr(holder, name):
                setattr(holder, name, function)
    for name in _ALWAYS_ZERO:
        setattr(torch.cuda, name, _constant(0))
    _set(
        torch.cuda.memory,
        _record_memory_history=_constant(None),
        _snapshot=lambda *args, **kwargs: {"segments": [], "device_traces": []},
        _dump_snapshot=_constant(None),
    )


# ---------------------------------------------------------------- random numbers
def _redirect_random() -> None:
    """The device draws from the CPU's generator: operations on its tensors are CPU operations."""
    generator = torch.default_generator
    real_get, real_set = torch.get_rng_state, torch.set_rng_state

    @functools.wraps(real_get)
    def get_rng_state(device: Any = None) -> torch.Tensor:
        with host_memory():  # a state is a host tensor, on a real device too
            return real_get()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        real_set(new_state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def seed() -> None:
        generator.seed()

    functions = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()] * current.device_count(),
        "set_rng_state_all": lambda states: set_rng_state(states[current.device_index()]),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": generator.initial_seed,
    }
    for name, function in functions.items():
        for holder in (torch.cuda, torch.cuda.random):
            setattr(holder, name, function)
    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    torch.cuda.default_generators = (generator,) * current.device_count()


# ---------------------------------------------------------------- profilers and old names
def _redirect_tools() -> None:
    cuda = torch.cuda
    _set(cuda.nvtx, range_push=_constant(0), range_pop=_constant(0), mark=_constant(None))
    _set(cuda.nvtx, range_start=_constant(0), range_end=_constant(None))
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment]
    _set(cuda.profiler, start=_constant(None), stop=_constant(None), profile=contextlib.nullcontext)
    runtime = types.SimpleNamespace(cudaProfilerStart=_constant(0), cudaProfilerStop=_constant(0))
    _set(runtime, cudaHostRegister=_constant(0), cudaHostUnregister=_constant(0), cudaMemGetInfo=_mem_get_info)
    cuda.cudart = _constant(runtime)
    for kind in _TENSOR_TYPES:
        # As types these answer isinstance() by dtype; as constructors they allocate device memory.
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    torch._C._cuda_attach_out_of_memory_observer = _constant(None)  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = _constant(0)  # type: ignore[attr-defined]


def _redirect_accelerator() -> None:
    """The device-neutral names, which DataLoader's pinning and torch's own utilities use."""
    accelerator = torch.accelerator
    _set(
        accelerator,
        is_available=_constant(True),
        device_count=current.device_count,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        current_device_index=current.device_index,
        current_device_idx=current.device_index,
        set_device_index=current.set_device,
        set_device_idx=current.set_device,
        current_stream=streams.current_stream,
        set_stream=streams.set_stream,
        synchronize=lambda device=None: sim_device.synchronize(),
    )
    memory = {
        "empty_cache": _constant(None),
        "memory_stats": _memory_stats,
        "memory_allocated": _allocated,
        "max_memory_allocated": _max_allocated,
        "memory_reserved": _allocated,
        "max_memory_reserved": _max_allocated,
        "reset_accumulated_memory_stats": _constant(None),
        "reset_peak_memory_stats": _reset_peak,
        "get_memory_info": _mem_get_info,
    }
    for name, function in memory.items():
        for holder in (accelerator, getattr(accelerator, "memory", accelerator)):
            setattr(holder, name, function)


def _redirect_autocast() -> None:
    real_init = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(real_init)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype  # float16; a CPU's is bfloat16
            device_type = "cpu"
        real_init(self, device_type, dtype, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = init  # type: ignore[method-assign]
