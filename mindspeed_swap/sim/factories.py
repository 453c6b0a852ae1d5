"""torch.empty and its relatives: a result is device memory only where the real call would have made it so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins as jit_builtins
from torch.utils import _device as torch_device_module

from mindspeed_swap.sim.device import host_memory, is_device
from mindspeed_swap.sim.patching import replace
from mindspeed_swap.sim.placement import CPU, DEVICE, HOST, OTHER, Place, place_by_default, place_named, place_of

# Besides the ones that torch.device contexts know (torch.utils._device lists them).
_MORE_FACTORIES = ("normal",)
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")


def redirect() -> None:
    """Patch torch's factories and Tensor.new_*."""
    known = set(torch_device_module._device_constructors())  # cached by this call: it must see the unpatched functions
    for holder in (torch, torch.fft):
        for name, function in list(vars(holder).items()):
            if callable(function) and function in known and name not in _FROM_DATA:
                _replace(holder, name, _factory)
    for name in _MORE_FACTORIES:
        _replace(torch, name, _factory)
    for name in _FROM_DATA:
        _replace(torch, name, _from_data)
    for name in _LIKE:
        _replace(torch, name, _like)
    for name in _NEW:
        setattr(torch.Tensor, name, _like(getattr(torch.Tensor, name)))
    _redirect_generator()


def _replace(holder: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    original = getattr(holder, name)
    wrapper = wrap(original)
    operator = jit_builtins._find_builtin(original)
    if operator is not None:  # torch.jit.script knows builtins by identity
        jit_builtins._register_builtin(wrapper, operator)
    setattr(holder, name, wrapper)


def _make(function: Callable, place: Place, args: tuple, kwargs: dict) -> Any:
    """Run the factory with its memory at the place. ``kwargs`` is ours to change."""
    if kwargs.get("pin_memory"):
        place = HOST
        kwargs["pin_memory"] = False  # page-locking needs a driver; all host memory of the simulation counts as pinned
    if place is DEVICE:
        return function(*args, **kwargs)
    with host_memory():
        return function(*args, **kwargs)


def _factory(function: Callable) -> Callable:
    """torch.empty(size, device=...)."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        place = place_by_default() if device is None else place_named(device)
        if place is OTHER:
            return function(*args, **kwargs)
        if device is not None or place is DEVICE:  # named outright, or a device context would name "cuda" itself
            kwargs["device"] = CPU
        return _make(function, place, args, kwargs)

    return factory


def _like(function: Callable) -> Callable:
    """torch.empty_like(tensor, device=...) and tensor.new_empty(size, device=...): without a device, the tensor's."""

    @functools.wraps(function)
    def factory_like(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            return _make(function, DEVICE if is_device(tensor) else HOST, (tensor, *args), kwargs)
        place = place_named(device)
        if place is OTHER:
            return function(tensor, *args, **kwargs)
        kwargs["device"] = CPU
        result = _make(function, place, (tensor, *args), kwargs)
        # From a meta tensor torch allocates by another registry than the one the simulated device is in.
        return result if place is HOST or not tensor.is_meta else result.cuda()

    return factory_like


def _from_data(function: Callable) -> Callable:
    """torch.tensor(data) copies, as_tensor and asarray share where they can; a tensor as data decides the device."""

    @functools.wraps(function)
    def from_data(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        place = place_by_default() if device is None else place_named(device)
        if place is HOST and device is None and isinstance(data, torch.Tensor):
            place = place_of(data)
        if place is OTHER:
            return function(data, *args, **kwargs)
        if device is not None or place is DEVICE:
            kwargs["device"] = CPU
        result = _make(function, place, (data, *args), kwargs)
        if is_device(result) != (place is DEVICE):  # shared with data on the other side
            result = result.to("cuda" if place is DEVICE else "cpu")
        return result

    return from_data


class _GeneratorType(type):
    """torch's own generators stay instances of the redirected torch.Generator."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _REAL_GENERATOR)


_REAL_GENERATOR = torch.Generator


class Generator(metaclass=_GeneratorType):
    """torch.Generator(device): generators of the simulated device draw on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _REAL_GENERATOR(device=device if place_named(device) is OTHER else CPU)


def _redirect_generator() -> None:
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    replace(torch, Generator=Generator)
