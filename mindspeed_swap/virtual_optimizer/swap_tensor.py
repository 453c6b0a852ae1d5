"""Tensors of the device whose memory is on the host: how to tell them, and how to read them.

On CUDA and on the simulated device they can be copied and printed like any other. An NPU's driver refuses direct copies
of them; there ``swap_tensor_copy_wrapper`` and ``swap_tensor_func_wrapper`` go through the device's kernels. Nothing
of torch is patched here: who wants ``torch.Tensor.copy_`` wrapped assigns it.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_swap.core.accelerator import Accelerator, get_accelerator
from mindspeed_swap.core.accelerator.base import INTEGERS

__all__ = ["is_swap_tensor", "mark_swap_tensor", "swap_tensor_copy_wrapper", "swap_tensor_func_wrapper", "to_host"]

# torch keeps one Python object per storage as long as the storage lives, so the mark is seen from every view of it.
_MARK, _BEFORE_USE = "_mindspeed_swap_host_backed", "_mindspeed_swap_before_use"
_FUNCTIONS = ("detach", "cpu", "npu", "cuda", "clone")


def mark_swap_tensor(
    tensor: torch.Tensor, accelerator: Accelerator, before_use: Callable[[], None] | None = None
) -> None:
    """Tell it, and all its views, from other tensors of ``accelerator``. ``before_use``: a bound method that is called
    before its bytes are read or written here; its object is not kept alive."""
    storage = tensor.untyped_storage()
    setattr(storage, _MARK, accelerator)
    if before_use is not None:
        setattr(storage, _BEFORE_USE, weakref.WeakMethod(before_use))


def _come_to_rest(tensor: torch.Tensor) -> None:
    """A step may still be writing to it."""
    before_use = getattr(tensor.untyped_storage(), _BEFORE_USE, None) if tensor.layout is torch.strided else None
    if before_use is not None and (call := before_use()) is not None:
        call()


def _mark_of(tensor: torch.Tensor) -> Accelerator | None:
    return getattr(tensor.untyped_storage(), _MARK, None) if tensor.layout is torch.strided else None


def is_swap_tensor(tensor: Any) -> bool:
    """True for a tensor of the virtual optimizer and its views, and for one marked ``swap_tensor`` by the user."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return getattr(tensor, "swap_tensor", False) or _mark_of(tensor) is not None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A plain host tensor of the same values, with memory of its own. Waits until they are there."""
    source = tensor.detach()
    accelerator = _mark_of(source) or get_accelerator()
    return accelerator.host_copy(_through_kernels(source) if is_swap_tensor(tensor) else source)


def is_out_of_reach(tensor: Any) -> bool:
    """True for a tensor of the virtual optimizer that the driver refuses to copy: read it by ``to_host``, write it by
    ``write_swapped``."""
    mark = _mark_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return mark is not None and mark.has_swapped_memory


def write_swapped(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``dst.copy_(src)`` for a tensor of the virtual optimizer, on every device."""
    _come_to_rest(dst)
    (_mark_of(dst) or get_accelerator()).write_mapped(dst, src)


def _through_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """The values in ordinary device memory, by a kernel: what every driver allows. Their bits, as integers: a kernel
    for floats may change a NaN and flush what is denormal."""
    _come_to_rest(tensor)
    bits = tensor.view(integer) if (integer := INTEGERS.get(tensor.itemsize)) else tensor
    return torch.ones_like(bits, memory_format=torch.contiguous_format).mul_(bits).view(tensor.dtype)


def swap_tensor_copy_wrapper(func: Callable) -> Callable:
    """``copy_`` that also takes swapped tensors, as destination, source or both. Returns the destination."""

    @functools.wraps(func)
    def copy_(dst: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_swap_tensor(dst):
            _come_to_rest(dst)
            dst.fill_(1).mul_(src if src.device == dst.device else src.to(dst.device))
        elif is_swap_tensor(src):
            func(dst, _through_kernels(src), *args, **kwargs)
        else:
            func(dst, src, *args, **kwargs)
        return dst

    return copy_


def swap_tensor_func_wrapper(org_func: Callable, func_type: str) -> Callable:
    """``detach``, ``cpu``, ``npu``, ``cuda`` or ``clone`` that also takes swapped tensors. ValueError for others."""
    if func_type not in _FUNCTIONS:
        raise ValueError(f"func_type {func_type!r} not supported: one of {', '.join(_FUNCTIONS)}")

    @functools.wraps(org_func)
    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_swap_tensor(tensor):
            return org_func(tensor, *args, **kwargs)
        if func_type == "detach":
            detached = org_func(tensor, *args, **kwargs)
            detached.swap_tensor = True
            return detached
        plain = _through_kernels(tensor)
        return plain.cpu() if func_type == "cpu" else plain

    return wrapped
