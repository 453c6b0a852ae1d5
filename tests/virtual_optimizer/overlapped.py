"""A model of a few layers whose steps the virtual optimizer overlaps with, as Megatron's patches have it."""
from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from adams import MAKES
from simulated import new_pool

from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer.arena import Arena, arena_bytes, choose
from mindspeed_swap.virtual_optimizer.overlap import Overlap
from mindspeed_swap.virtual_optimizer.streamed import Streamed

LAYERS, WIDTH, ROWS = 6, 128, 512  # 256 KiB of activations per layer, 128 KiB of state
MICROBATCHES = 2


class Training:
    """``overlaps`` None: the plain optimizer. ``layer_seconds``: what a layer takes longer, each way."""

    def __init__(
        self,
        accelerator: Any,
        overlaps: bool | None,
        make: str = "adamw-fused",
        skip: Any = frozenset(),
        layer_seconds: float = 0.0,
        device: str = "cpu",
        layers: int = LAYERS,
        width: int = WIDTH,
        rows: int = ROWS,
        slice_bytes: int | None = 64 << 10,
        master: bool = False,
    ) -> None:
        random = torch.Generator().manual_seed(1)
        self.weights = [
            torch.nn.Parameter((torch.randn(width, width, generator=random) / width**0.5).to(device, copy=True))
            for _ in range(layers)
        ]
        self.input = torch.randn(rows, width, generator=random).to(device, copy=True)
        self.optimizer = MAKES[make]([{"params": self.weights, "lr": 1e-2}])
        self.optimizers = [self.optimizer]
        self.active = bool(overlaps)
        self.overlap: Overlap | None = None
        self._seconds = layer_seconds
        if overlaps is not None:
            units = choose(self.optimizer, accelerator, None, self.weights if master else ())
            arena = Arena(self.optimizer, units, accelerator, new_pool(accelerator, 16 * MIB + 2 * arena_bytes(units)))
            streams = (accelerator.new_stream(), accelerator.new_stream())
            self.streamed = Streamed(arena, accelerator, streams, slice_bytes=slice_bytes, skip_waits=skip)
            self.pipeline = self.streamed.pipeline
            self.overlap = Overlap(accelerator, [self.pipeline])
            self.streamed.may_keep = partial(self.overlap.may_keep, self.pipeline)
            self.streamed.later_bytes = partial(self.overlap.later_bytes, self.pipeline)
            self.streamed.came_to_rest = self.overlap.came_to_rest

    def step(self, update: bool = True) -> None:
        """``update`` False: the optimizer's step is left out."""
        with self.overlap.step(self.active) if self.overlap else nullcontext():
            for weight in self.weights:
                weight.grad = None
            for _ in range(MICROBATCHES):
                with self.overlap.forward() if self.overlap else nullcontext():
                    value = self.forward()
                value.backward()
            if self.overlap:
                self.overlap.optimizer()
            for optimizer in self.optimizers if update else ():
                optimizer.step()

    def forward(self) -> torch.Tensor:
        value = self.input.detach().requires_grad_()
        for weight in self.weights:
            if self.overlap:
                self.overlap.layer(value)
            if self._seconds:
                time.sleep(self._seconds)
                value.register_hook(lambda gradient: time.sleep(self._seconds))
            value = torch.tanh(value @ weight)
        return value.square().sum()
