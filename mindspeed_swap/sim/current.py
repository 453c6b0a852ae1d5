"""Which of the node's simulated devices this process uses. Each process has one device, whatever its index says."""

from __future__ import annotations

import os
from typing import Any

import torch

_index = int(os.environ.get("LOCAL_RANK", "0"))
_device = torch.device("cuda", _index)


def device_count() -> int:
    """One device per rank on this node."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _index + 1)


def device_index() -> int:
    return _index


def device() -> torch.device:
    return _device


def set_device(device: Any) -> None:
    """torch.cuda.set_device: an index, a string or a torch.device; one without an index changes nothing."""
    global _index, _device
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _index, _device = index, torch.device("cuda", index)
