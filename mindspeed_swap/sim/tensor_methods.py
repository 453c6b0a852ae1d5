"""Tensor and Module methods that ask where a tensor is, or move it. Between host and device they really copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_swap.sim import current
from mindspeed_swap.sim.device import host_memory, is_device
from mindspeed_swap.sim.patching import replace
from mindspeed_swap.sim.placement import CPU, DEVICE, HOST, OTHER, place_named, place_of, real_device

# Their results stay where the tensor is. Others of this kind do not copy (views), or are left to torch (see placement).
_FLOATS = ("float", "double", "half", "bfloat16", "cfloat", "cdouble")
_INTEGERS = ("int", "long", "short", "char", "byte", "bool")
_FOLLOW = ("clone", "contiguous", "new", "__deepcopy__", *_FLOATS, *_INTEGERS)

_real_to = torch.Tensor.to
_real_type = torch.Tensor.type
_real_module_to = torch.nn.Module.to


def redirect() -> None:
    """Patch Tensor's methods and properties, Parameter.__deepcopy__, torch.clone and Module.to / to_empty."""
    for name in _FOLLOW:
        replace(torch.Tensor, **{name: _following(getattr(torch.Tensor, name))})
    replace(torch.nn.Parameter, __deepcopy__=_following(torch.nn.Parameter.__deepcopy__))
    replace(torch, clone=_following(torch.clone))
    replace(
        torch.Tensor,
        to=_to,
        cuda=_cuda,
        cpu=_cpu,
        pin_memory=_pin_memory,
        is_pinned=_is_pinned,
        type=_type,
        type_as=_type_as,
        get_device=_get_device,
        record_stream=_record_stream,
        device=property(_device),
        is_cuda=property(_is_cuda),
        is_cpu=property(_is_cpu),
    )
    replace(torch.nn.Module, to=_module_to)


def _following(function: Callable) -> Callable:
    @functools.wraps(function)
    def follow(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_device(self):
            return function(self, *args, **kwargs)
        with host_memory():
            return function(self, *args, **kwargs)

    return follow


_to_same_place = _following(_real_to)


@functools.wraps(_real_to)
def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """to(dtype), to(device, dtype), to(other), each with non_blocking and copy."""
    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if target is None or type(target) is torch.dtype:
        return _to_same_place(self, *args, **kwargs)
    if isinstance(target, torch.Tensor):
        kwargs = {name: value for name, value in kwargs.items() if name != "other"} | {"dtype": target.dtype}
        kwargs |= dict(zip(("non_blocking", "copy"), args[1:], strict=False))
        args = (target.device,)
        target = target.device
    place = place_named(target)
    if place is OTHER:
        return _real_to(self, *args, **kwargs)
    if args:
        args = (CPU, *args[1:])
    else:
        kwargs["device"] = CPU
    if place is not place_of(self):
        args, kwargs = args[:3], kwargs | {"copy": True}
    if place is DEVICE:
        return _real_to(self, *args, **kwargs)
    with host_memory():
        return _real_to(self, *args, **kwargs)


def _cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Itself if on the device, else a copy there."""
    if is_device(self):
        return self
    return _real_to(self, CPU, copy=True, memory_format=memory_format)


def _cpu(self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """Itself if on the host, else a copy there."""
    place = place_of(self)
    if place is HOST:
        return self
    with host_memory():
        return _real_to(self, CPU, copy=place is DEVICE, memory_format=memory_format)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Host memory of the simulation counts as pinned, so this is ``cpu()``."""
    return self.cpu()


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return place_of(self) is HOST


def _type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """type() names "torch.cuda.FloatTensor" for device tensors: Megatron compares these strings."""
    if dtype is None:
        name = _real_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if is_device(self) else name
    if isinstance(dtype, str) and dtype.startswith("torch."):
        moved = self.cuda() if dtype.startswith("torch.cuda.") else self.cpu()
        return _following(_real_type)(moved, dtype.replace("torch.cuda.", "torch."), non_blocking, **kwargs)
    return _following(_real_type)(self, dtype, non_blocking, **kwargs)


def _type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.to(other)


def _get_device(self: torch.Tensor) -> int:
    return current.device_index() if is_device(self) else -1


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Compute is done when its call returns: nothing can be recycled too early."""


def _device(self: torch.Tensor) -> torch.device:
    real = real_device(self)
    return current.device() if real.type == "cpu" and is_device(self) else real


def _is_cuda(self: torch.Tensor) -> bool:
    return place_of(self) is DEVICE


def _is_cpu(self: torch.Tensor) -> bool:
    return place_of(self) is HOST


@functools.wraps(_real_module_to)
def _module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Module.to moves with Tensor.to; only a bare index needs help: torch knows of no accelerator it could mean."""
    if args and type(args[0]) is int:
        args = (torch.device("cuda", args[0]), *args[1:])
    elif type(kwargs.get("device")) is int:
        kwargs["device"] = torch.device("cuda", kwargs["device"])
    return _real_module_to(self, *args, **kwargs)
