"""The ranks of a process group as peers. The only place of SmartSwap that calls torch.distributed."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.smart_swap.peers import Facts, Peers, Told

T = TypeVar("T")


class GroupPeers(Peers):
    """The ranks of a process group of the device's backend. Figures are exact up to 2^53."""

    def __init__(self, group: Any, accelerator: Accelerator, entangled: bool) -> None:
        self._group, self._accelerator, self.entangled = group, accelerator, entangled
        self.count = torch.distributed.get_world_size(group)
        self._source = torch.distributed.get_global_rank(group, 0)
        self.leader = torch.distributed.get_rank() == self._source
        # Of the last step: who is told, figures of this rank, when the worst is there, the worst.
        self._pending: tuple[Told, Sequence[float], Any, torch.Tensor] | None = None

    def _reduce(self, values: Sequence[float]) -> torch.Tensor:
        device = self._accelerator.empty(8 * len(values)).view(torch.float64)
        device.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(device, torch.distributed.ReduceOp.MAX, self._group)
        return device

    def worst(self, values: Sequence[float]) -> list[float]:
        worst: list[float] = self._reduce(values).tolist()
        self._learn()
        return worst

    def worst_later(self, values: Sequence[float], told: Told) -> None:
        result = self._reduce(values).to("cpu", non_blocking=True)
        there = self._accelerator.record(self._accelerator.compute_stream())
        self._learn()
        self._pending = told, values, there, result

    def _learn(self) -> None:
        """The worst of the step before this one."""
        if self._pending is not None:
            told, own, there, result = self._pending
            self._accelerator.synchronize(there)  # long past: a step lies between
            self._known, self._pending = (told, Facts.of(own, result.tolist())), None

    def forget(self, told: Told) -> None:
        if self._pending is not None and self._pending[0] == told:
            self._pending = None

    def share(self, value: T) -> T:
        box = [value]
        torch.distributed.broadcast_object_list(box, self._source, self._group)
        return box[0]
