"""What names a save within a step, and what a step did to saved tensors."""
from __future__ import annotations

from dataclasses import dataclass

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.trace import AGAIN, FORWARD, MODULE_BORDER, OUTSIDE, Key, ModuleKey, Position, StepTrace, new

NAMELESS = -1  # ordinals of nameless keys are below


@dataclass(slots=True)
class StepStats:
    """What happened to saved tensors since ``begin_step``."""

    saves: int = 0  # by autograd, whatever of
    saved: int = 0  # tensors that could be moved and are in the books (those that are loose are not)
    most_saved_bytes: int = 0  # alive at once, wherever their bytes were
    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    late_loads: int = 0  # prefetched, but compute had to wait; those of a step's end may count in the next
    on_demand_loads: int = 0  # not prefetched at all
    skipped_prefetches: int = 0  # no room on the device when the plan wanted it back
    evictions: int = 0
    evicted_bytes: int = 0
    ineffective_bytes: int = 0  # released by the plan while somebody else held the storage
    recomputed_calls: int = 0
    host_full: int = 0  # kept on the device because the host budget was used up


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A step that was recorded: what was planned and what happened."""

    plan: Plan
    stats: StepStats
    trace: StepTrace


class Scope:
    """Where in the step forward is: a microbatch of a model chunk, and the layer that runs."""

    __slots__ = ("_borders", "_calls", "_nameless", "_ordinals", "chunk", "layer", "microbatch", "stays")

    def __init__(self, microbatch: int, chunk: int) -> None:
        self.microbatch, self.chunk, self.layer = microbatch, chunk, OUTSIDE
        self.stays = False  # a layer that has returned still counts as the one that runs
        self._ordinals: dict[int, int] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._borders: dict[int, int] = {}
        self._nameless = 0

    def next_ordinal(self) -> int:
        """Of a save, in the layer that runs."""
        layer = self.layer
        ordinal = self._ordinals.get(layer, 0)
        self._ordinals[layer] = ordinal + 1
        return ordinal

    def nameless_key(self) -> Key:
        """For what nobody has saved yet: an argument of a call that will run again."""
        self._nameless += 1
        return Key(self.microbatch, self.chunk, self.layer, NAMELESS - self._nameless)

    def next_call(self, name: str) -> ModuleKey:
        """The second call of a name within a layer is ``name#2``."""
        count = self._calls[self.layer, name] = self._calls.get((self.layer, name), 0) + 1
        name = name if count == 1 else f"{name}{AGAIN}{count}"
        return new(ModuleKey, (self.microbatch, self.chunk, self.layer, name))

    def module_border(self) -> Position:
        """A module begins or ends here."""
        count = self._borders[self.layer] = self._borders.get(self.layer, 0) + 1
        return self.border(MODULE_BORDER - count)

    def border(self, ordinal: int) -> Position:
        return new(Position, (FORWARD, self.microbatch, self.chunk, self.layer, ordinal))
