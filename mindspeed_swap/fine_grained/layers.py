"""Which layers a setting is for. They count from 0 over the whole model. Pure; imports no torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layers:
    """``chosen``: numbers of layers. ``first``: so many of the first of every pipeline stage, by model chunk and stage
    or, in one row, by stage. Both None: all layers."""

    chosen: frozenset[int] | None = None
    first: tuple[tuple[int, ...], ...] | None = None

    def __bool__(self) -> bool:
        return self.chosen is None or bool(self.chosen)

    def __contains__(self, layer: int) -> bool:
        return self.chosen is None or layer in self.chosen

    def among(self, chunks: Sequence[Sequence[int]], stage: int) -> set[int]:
        """Those of a rank in pipeline stage ``stage``; ``chunks``: the layers of each of its model chunks."""
        if self.first is None:
            return {n for chunk in chunks for n in chunk if self.chosen is None or n in self.chosen}
        if len(self.first) > 1:
            return {n for chunk, row in zip(chunks, self.first, strict=True) for n in chunk[: row[stage]]}
        # In turn from each chunk, as where the counts come from.
        turns = sorted((i, c, n) for c, chunk in enumerate(chunks) for i, n in enumerate(chunk))
        return {n for _, _, n in turns[: self.first[0][stage]]}


NONE = Layers(frozenset())
ALL = Layers()
