"""The ranks of a process group as peers. The only place of SmartSwap that calls torch.distributed."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.smart_swap.peers import Peers

T = TypeVar("T")


class GroupPeers(Peers):
    """The ranks of a process group of the device's backend. Figures are exact up to 2^53."""

    def __init__(self, group: Any, accelerator: Accelerator, entangled: bool) -> None:
        self._group, self._accelerator, self.entangled = group, accelerator, entangled
        self.count = torch.distributed.get_world_size(group)
        self._source = torch.distributed.get_global_rank(group, 0)
        self.leader = torch.distributed.get_rank() == self._source
        self._pending: tuple[Any, torch.Tensor] | None = None

    def _reduce(self, values: Sequence[float]) -> torch.Tensor:
        device = self._accelerator.empty(8 * len(values)).view(torch.float64)
        device.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(device, torch.distributed.ReduceOp.MAX, self._group)
        return device

    def worst(self, values: Sequence[float]) -> list[float]:
        self._pending = None
        return self._reduce(values).tolist()

    def worst_later(self, values: Sequence[float]) -> list[float] | None:
        before, device = self._pending, self._reduce(values)
        result = device.to("cpu", non_blocking=True)
        self._pending = self._accelerator.record(self._accelerator.compute_stream()), result
        if before is None:
            return None
        self._accelerator.synchronize(before[0])  # long past: a step lies between
        return before[1].tolist()

    def share(self, value: T) -> T:
        box = [value]
        torch.distributed.broadcast_object_list(box, self._source, self._group)
        return box[0]
