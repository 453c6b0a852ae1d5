"""Chooses the device of this process: ``MINDSPEED_SWAP_DEVICE=auto|cuda|npu|sim``."""
from __future__ import annotations

import os
import sys
from functools import cache

import torch

from mindspeed_swap.core.accelerator.base import Accelerator, DeviceMemory, Event, Interval, Stream
from mindspeed_swap.core.accelerator.watch import may_hook
from mindspeed_swap.errors import SettingError

DEVICE_VARIABLE = "MINDSPEED_SWAP_DEVICE"
CAPACITY_VARIABLE = "MINDSPEED_SWAP_DEVICE_CAPACITY"
DEVICES = ("auto", "cuda", "npu", "sim")

__all__ = [  # fmt: skip
    "CAPACITY_VARIABLE", "DEVICES", "DEVICE_VARIABLE", "Accelerator", "DeviceMemory", "Event", "Interval", "Stream",
    "cap_device", "device_choice", "get_accelerator", "prepare_device"]


def device_choice() -> str:
    """What the environment asks for, one of DEVICES; SettingError if it is none of them. Touches no device."""
    choice = os.environ.get(DEVICE_VARIABLE, "auto")
    if choice not in DEVICES:
        raise SettingError(f"{DEVICE_VARIABLE}={choice!r}: expected one of {', '.join(DEVICES)}")
    return choice


def prepare_device(asked_by: str) -> None:
    """Check and set what must be right before the device is first used. Creates no context; the device may be chosen
    later. ``asked_by`` names the flags, for messages. Raises SettingError."""
    choice = device_choice()
    may_hook()
    if choice == "auto":
        choice = _present_device()
    # Megatron's own check would come first otherwise, and it only says that Megatron requires CUDA.
    if choice == "npu":
        from mindspeed_swap.core.accelerator.npu import check_npu

        check_npu(asked_by)
    if choice == "cuda":
        if torch.cuda.device_count() == 0:
            raise SettingError(
                f"{DEVICE_VARIABLE}=cuda: no CUDA device is available to this process: check `nvidia-smi` and "
                f"CUDA_VISIBLE_DEVICES, or set {DEVICE_VARIABLE}=sim to simulate a device on the CPU"
            )
        from mindspeed_swap.core.accelerator.cuda import prepare_allocator

        prepare_allocator(asked_by)


def cap_device(index: int) -> None:
    """MINDSPEED_SWAP_DEVICE_CAPACITY caps device ``index`` whether a feature is on or not. (The simulated device and a
    device that a feature uses cap themselves.) Without the variable it touches nothing."""
    choice = device_choice()
    if CAPACITY_VARIABLE not in os.environ or choice == "sim":
        return
    from mindspeed_swap.core.accelerator.torch_device import cap_memory

    if choice == "npu" or (choice == "auto" and _npu_present()):
        from mindspeed_swap.core.accelerator.npu import check_npu

        cap_memory(check_npu(CAPACITY_VARIABLE).npu, index)
    elif torch.cuda.device_count() > index:
        cap_memory(torch.cuda, index)


@cache
def get_accelerator() -> Accelerator:
    """The one accelerator of this process. ``auto`` takes what is there and never simulates.

    Raises SettingError if there is none. Each device's module is imported only when it is chosen.
    """
    choice = device_choice()
    if choice == "auto":
        choice = _present_device()
    if choice == "sim":
        from mindspeed_swap.core.accelerator.sim import SimAccelerator

        return SimAccelerator()
    if choice == "npu":
        from mindspeed_swap.core.accelerator.npu import NpuAccelerator

        return NpuAccelerator()
    from mindspeed_swap.core.accelerator.cuda import CudaAccelerator

    return CudaAccelerator()


def _present_device() -> str:
    # NPU first: under torch_npu's transfer_to_npu, torch.cuda answers for the NPU. torch_npu loads with torch itself
    # where it is installed, so it need not be imported here.
    if _npu_present():
        return "npu"
    # device_count asks NVML: unlike is_available it does not initialise CUDA, which would break later forks.
    if torch.cuda.device_count() > 0:
        return "cuda"
    raise SettingError(
        f"no accelerator found (CUDA, NPU). To simulate one on the CPU set {DEVICE_VARIABLE}=sim, "
        "and MINDSPEED_SWAP_DEVICE_CAPACITY=600MiB for its size"
    )


def _npu_present() -> bool:
    torch_npu = sys.modules.get("torch_npu")
    return torch_npu is not None and bool(torch_npu.npu.is_available())
