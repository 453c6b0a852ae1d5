"""What names a save within a step, and what a step did to saved tensors."""
from __future__ import annotations

from dataclasses import dataclass

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.trace import FORWARD, OUTSIDE, Key, Position, StepTrace


@dataclass(slots=True)
class StepStats:
    """What happened to saved tensors since ``begin_step``."""

    saved: int = 0
    most_saved_bytes: int = 0  # alive at once, wherever their bytes were
    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    late_loads: int = 0  # prefetched, but compute had to wait; those of a step's end may count in the next
    on_demand_loads: int = 0  # not prefetched at all
    skipped_prefetches: int = 0  # no room on the device when the plan wanted it back
    evictions: int = 0
    evicted_bytes: int = 0
    ineffective_bytes: int = 0  # released by the plan while somebody else held the storage
    host_full: int = 0  # kept on the device because the host budget was used up


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step that was recorded: what was planned and what happened."""

    plan: Plan
    stats: StepStats
    trace: StepTrace


class Scope:
    """Where in the step forward is: a microbatch of a model chunk, and the layer that runs."""

    __slots__ = ("_ordinals", "chunk", "layer", "microbatch", "stays")

    def __init__(self, microbatch: int, chunk: int) -> None:
        self.microbatch, self.chunk, self.layer = microbatch, chunk, OUTSIDE
        self.stays = False  # a layer that has returned still counts as the one that runs
        self._ordinals: dict[int, int] = {}

    def next_key(self) -> Key:
        ordinal = self._ordinals.get(self.layer, 0)
        self._ordinals[self.layer] = ordinal + 1
        return Key(self.microbatch, self.chunk, self.layer, ordinal)

    def border(self, ordinal: int) -> Position:
        return Position(FORWARD, self.microbatch, self.chunk, self.layer, ordinal)
