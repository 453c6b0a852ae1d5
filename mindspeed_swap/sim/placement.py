"""Which memory a request means. The rules that all redirected calls share.

To torch every tensor of the simulated machine is a CPU tensor. Whether it is *device* or *host* memory goes by the
address of its storage and was decided at its allocation: host inside ``device.host_memory()``, else device. So each
redirected call has one question to answer, "where does the result belong?", and runs torch's own function there.

Known limits: the result of an arbitrary operation on host tensors (``host + 1``, ``torch.FloatTensor(3)``) is allocated
by torch outside of any redirected call and counts as device memory. A tensor without bytes counts as on the device.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from mindspeed_swap.sim.device import is_device

CPU = torch.device("cpu")


class Place(Enum):
    """Where a tensor lives or shall live."""

    DEVICE = "device"
    HOST = "host"
    OTHER = "other"  # meta and the like: torch's own business, passed through untouched


DEVICE, HOST, OTHER = Place.DEVICE, Place.HOST, Place.OTHER
_BY_TYPE = {"cuda": DEVICE, "cpu": HOST}

_getter = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]  # below any redirected one


def real_device(tensor: torch.Tensor) -> torch.device:
    try:
        return _getter(tensor)
    except RuntimeError:  # ShardedTensor, imported earlier, has answers for torch's own attributes only
        with torch._C.DisableTorchFunctionSubclass():
            return _getter(tensor)


def place_named(device: Any) -> Place:
    """The place a ``device=`` argument (int, str or torch.device; not None) names."""
    kind = type(device)
    if kind is torch.device:
        return _BY_TYPE.get(device.type, OTHER)
    if kind is int:
        return DEVICE
    if isinstance(device, str):
        return _BY_TYPE.get(device.partition(":")[0], OTHER)
    return OTHER


def place_by_default() -> Place:
    """Where a factory without ``device=`` puts its result: host, or what set_default_device / ``with device`` says."""
    if _len_torch_function_stack() == 0:  # a device context is a mode on this thread's stack
        return HOST
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return place_named(contexts[-1].device) if contexts else HOST


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor lives."""
    if real_device(tensor).type != "cpu":
        return OTHER
    return DEVICE if is_device(tensor) else HOST
