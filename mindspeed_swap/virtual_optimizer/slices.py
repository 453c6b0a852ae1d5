"""Slices: what of an optimizer's parameters is stepped at once while their state is on the device.

A slice belongs to one parameter group and has at most ``limit`` bytes of units, which are few ranges of the arena and
as many copies. Small parameters share a slice. One with more is cut into pieces: Adam works element by element, so the
pieces' results are those of the whole.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from mindspeed_swap.virtual_optimizer.arena import Arena, Unit, aligned

# Cuts fall where kernels that take several elements at once, and copies in lines of 512 bytes, would cut too.
CUT_ELEMENTS = 1024


@dataclass(slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter; ``at``: where each of its units begins in the slice's buffer."""

    parameter: torch.Tensor
    start: int
    stop: int
    at: dict[str, int] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.parameter.numel()

    @property
    def last(self) -> bool:
        return self.stop == self.parameter.numel()


@dataclass(slots=True)
class Slice:
    """``ranges``: (first byte in the arena, first byte in the buffer, bytes) of its copies."""

    pieces: list[Piece] = field(default_factory=list)
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, piece: Piece, units: list[Unit]) -> None:
        self.pieces.append(piece)
        for unit in units:
            size = unit.dtype.itemsize
            source, nbytes = unit.start + piece.start * size, aligned((piece.stop - piece.start) * size)
            piece.at[unit.key] = self.nbytes
            if self.ranges and self.ranges[-1][0] + self.ranges[-1][2] == source:  # neighbours: one copy
                first, at, length = self.ranges[-1]
                self.ranges[-1] = (first, at, length + nbytes)
            else:
                self.ranges.append((source, self.nbytes, nbytes))
            self.nbytes += nbytes


def cut(arena: Arena, limit: int) -> list[list[Slice]]:
    """The slices of each parameter group; ``limit`` in bytes."""
    return [list(_cut_group(arena, group["params"], limit)) for group in arena.optimizer.param_groups]


def _cut_group(arena: Arena, parameters: list[torch.Tensor], limit: int) -> Iterator[Slice]:
    current = Slice()
    for parameter in parameters:
        units = list(arena.units_of(parameter).values())
        if not units:
            continue
        for start, stop in _pieces(parameter, units, limit):
            nbytes = sum(aligned((stop - start) * unit.dtype.itemsize) for unit in units)
            if current.pieces and current.nbytes + nbytes > limit:
                yield current
                current = Slice()
            current.add(Piece(parameter, start, stop), units)
    if current.pieces:
        yield current


def _pieces(parameter: torch.Tensor, units: list[Unit], limit: int) -> Iterator[tuple[int, int]]:
    numel = parameter.numel()
    per_element = sum(unit.dtype.itemsize for unit in units)
    length = numel
    if numel * per_element > limit and parameter.is_contiguous():  # others have no flat view, and are small
        length = max(CUT_ELEMENTS, limit // per_element // CUT_ELEMENTS * CUT_ELEMENTS)
    for start in range(0, numel, length):
        yield start, min(numel, start + length)
