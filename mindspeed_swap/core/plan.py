"""Plan: what to do with which saved tensor, at which position. Pure data, JSON in and out; imports no torch.

A plan is advice. The manager looks a tensor's Key up when it is saved; a plan made for another shape or order costs
time, never correctness.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_swap.core.checked import build, list_of, load_object, tuple_of
from mindspeed_swap.core.trace import MODULE_BORDER, Key, ModuleKey, Position
from mindspeed_swap.units import format_bytes

PLAN_VERSION = 2


@dataclass(frozen=True, slots=True)
class Swap:
    """One saved storage leaves after its last forward use and is back before its first backward use."""

    key: Key
    nbytes: int
    release: Position  # at this position the device memory is dropped (compute waits for the copy first)
    prefetch: Position  # at this position the copy back is started


@dataclass(frozen=True, slots=True)
class Recompute:
    """One module call that keeps its inputs only and runs forward again when backward first needs what it saved."""

    key: ModuleKey
    nbytes: int  # that it frees
    forward_ms: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Written down before the step that executes the plan; compared with what is measured."""

    peak_bytes: dict[str, int]  # by phase
    step_ms: float
    stall_ms: float  # waits for copies
    recompute_ms: float = 0.0
    host_bytes: int = 0  # most bytes on the host at once
    host_ms: float = 0.0  # that moves take the host while the device waits for it
    # Step time of recomputing everything, told where that fits the budget and is faster than this plan.
    faster_recompute_ms: float | None = None

    @property
    def peak(self) -> int:
        """Of all phases."""
        return max(self.peak_bytes.values(), default=0)


@dataclass(frozen=True, slots=True)
class Plan:
    model: str  # fingerprint; see StepTrace.model
    budget_bytes: int
    swaps: tuple[Swap, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    prediction: Prediction | None = None
    version: int = field(default=PLAN_VERSION)

    @property
    def swap_bytes(self) -> int:
        return sum(swap.nbytes for swap in self.swaps)

    @property
    def recompute_bytes(self) -> int:
        """That recompute frees."""
        return sum(recompute.nbytes for recompute in self.recomputes)

    @property
    def decisions(self) -> tuple[Any, ...]:
        """All that is executed of it: plans of equal decisions do the same."""
        return self.swaps, tuple(recompute.key for recompute in self.recomputes)

    @property
    def text(self) -> str:
        """What it does, or "" for nothing."""
        parts = []
        if self.swaps:
            parts.append(f"swap {format_bytes(self.swap_bytes)} in {len(self.swaps)} tensors")
        if self.recomputes:
            parts.append(f"recompute {format_bytes(self.recompute_bytes)} of {len(self.recomputes)} module calls")
        return " and ".join(parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError naming the first thing that is wrong."""
        data = load_object(text, "plan", PLAN_VERSION)
        point = tuple_of(Position)
        swaps = list_of(
            lambda value, where: build(Swap, value, where, key=tuple_of(Key), release=point, prefetch=point)
        )
        recomputes = list_of(lambda value, where: build(Recompute, value, where, key=tuple_of(ModuleKey)))
        plan: Plan = build(
            cls,
            data,
            "plan",
            swaps=lambda value, where: tuple(swaps(value, where)),
            recomputes=lambda value, where: tuple(recomputes(value, where)),
            prediction=lambda value, where: (
                None if value is None else build(Prediction, value, where, peak_bytes=_peaks)
            ),
        )
        swapped, again = [swap.key for swap in plan.swaps], [recompute.key for recompute in plan.recomputes]
        named: Any
        for name, named in (("swaps", swapped), ("recomputes", again)):
            seen: set[Any] = set()
            for i, key in enumerate(named):
                if key in seen:
                    raise ValueError(f"damaged plan: {name}[{i}]: {tuple(key)} is there twice")
                seen.add(key)
        return plan


def _peaks(value: Any, where: str) -> dict[str, int]:
    if not isinstance(value, dict) or not all(isinstance(v, int) for v in value.values()):
        raise ValueError(f"damaged {where}: {value!r:.60}, expected bytes by phase")
    return value


class Agenda:
    """A plan's swaps as a step asks for them: by what is saved, and by where something is released or prefetched. Made
    once, and begun with every step: a device that has done the last one waits for that."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        swaps = plan.swaps if plan else ()
        self.swaps = {swap.key: swap for swap in swaps}
        points = [point for swap in swaps for point in (swap.release, swap.prefetch)]
        # Anything is to be done where a module begins or ends.
        self.at_modules = any(point.ordinal < MODULE_BORDER for point in points)
        # Saves at which something is to be done.
        self.anchors = {Key(*point[1:]) for point in points if point.ordinal >= 0}
        self.saves = self.anchors | self.swaps.keys()  # and those that are to move
        self._releases: dict[Position, list[Key]] = {}
        self._prefetches: dict[Position, list[Key]] = {}
        for swap in self.swaps.values():
            self._releases.setdefault(swap.release, []).append(swap.key)
            self._prefetches.setdefault(swap.prefetch, []).append(swap.key)
        # What is not done yet of a step that has begun. Whoever does something takes it out.
        self.releases: dict[Position, list[Key]] = {}
        self.prefetches: dict[Position, list[Key]] = {}

    def begun(self, plan: Plan | None) -> Agenda:
        """That of this plan, which is mostly the same, with nothing done yet."""
        agenda = self if plan is self.plan else Agenda(plan)
        agenda.releases, agenda.prefetches = agenda._releases.copy(), agenda._prefetches.copy()
        return agenda
