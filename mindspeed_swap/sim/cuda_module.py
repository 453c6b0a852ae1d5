"""torch.cuda and torch.accelerator as functions of the simulated device; its memory figures are in cuda_memory."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_swap.sim import cuda_memory, current, streams
from mindspeed_swap.sim import device as sim_device
from mindspeed_swap.sim.device import host_memory
from mindspeed_swap.sim.patching import constant, replace

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


def redirect() -> None:
    """Patch torch.cuda, its submodules, the pieces of torch._C they call, torch.accelerator and autocast."""
    _redirect_identity()
    _redirect_random()
    _redirect_tools()
    _redirect_accelerator()
    _redirect_autocast()


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
    for name in _NOTHING_TO_DO:
        function = constant(None)
        for holder in (torch.cuda, torch.cuda.memory):
            if hasattr(holder, name):
                setattr(holder, name, function)
    for name in _ALWAYS_ZERO:
        setattr(torch.cuda, name, constant(0))
    replace(
        torch.cuda,
        is_available=constant(True),
        is_initialized=constant(True),
        is_bf16_supported=constant(True),
        is_tf32_supported=constant(False),
        device_count=current.device_count,
        current_device=current.device_index,
        set_device=current.set_device,
        device=_DeviceContext,
        device_of=_DeviceOf,
        get_device_name=constant(NAME),
        get_device_capability=constant(CAPABILITY),
        get_device_properties=_properties,
        get_arch_list=lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
        can_device_access_peer=constant(False),
        synchronize=lambda device=None: sim_device.synchronize(),
        _lazy_call=_lazy_call,
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
    replace(torch.cuda, default_generators=(generator,) * current.device_count())


# ---------------------------------------------------------------- profilers and old names
def _redirect_tools() -> None:
    cuda = torch.cuda
    replace(cuda.nvtx, range_push=constant(0), range_pop=constant(0), mark=constant(None))
    replace(cuda.nvtx, range_start=constant(0), range_end=constant(None))
    replace(cuda.nvtx, range=lambda *args, **kwargs: contextlib.nullcontext())
    replace(cuda.profiler, start=constant(None), stop=constant(None), profile=contextlib.nullcontext)
    runtime = types.SimpleNamespace(cudaProfilerStart=constant(0), cudaProfilerStop=constant(0))
    replace(
        runtime, cudaHostRegister=constant(0), cudaHostUnregister=constant(0), cudaMemGetInfo=cuda_memory.mem_get_info
    )
    replace(cuda, cudart=constant(runtime))
    for kind in _TENSOR_TYPES:
        # As types these answer isinstance() by dtype; as constructors they allocate device memory.
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    replace(torch._C, _cuda_attach_out_of_memory_observer=constant(None), _cuda_getCurrentRawStream=constant(0))


def _redirect_accelerator() -> None:
    """The device-neutral names, which DataLoader's pinning and torch's own utilities use."""
    accelerator = torch.accelerator
    replace(
        accelerator,
        is_available=constant(True),
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


def _redirect_autocast() -> None:
    real_init = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(real_init)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype  # float16; a CPU's is bfloat16
            device_type = "cpu"
        real_init(self, device_type, dtype, *args, **kwargs)

    replace(torch.amp.autocast_mode.autocast, __init__=init)
