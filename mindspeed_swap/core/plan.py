"""Plan: what to do with which saved tensor, at which position. Pure data, JSON in and out; imports no torch.

A plan is advice. The manager looks a tensor's Key up when it is saved; a plan made for another shape or order costs
time, never correctness.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_swap.core.trace import Key, Position

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Swap:
    """One saved storage leaves after its last forward use and is back before its first backward use."""

    key: Key
    nbytes: int
    release: Position  # at this position the device memory is dropped (compute waits for the copy first)
    prefetch: Position  # at this position the copy back is started


@dataclass(frozen=True, slots=True)
class Prediction:
    """Written down before the step that executes the plan; compared with what is measured."""

    peak_bytes: dict[str, int]  # by phase
    step_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    model: str  # fingerprint; see StepTrace.model
    budget_bytes: int
    swaps: tuple[Swap, ...] = ()
    prediction: Prediction | None = None
    version: int = field(default=PLAN_VERSION)

    @property
    def swap_bytes(self) -> int:
        return sum(swap.nbytes for swap in self.swaps)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError naming the first thing that is wrong."""
        try:
            data: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"damaged plan: {error}") from None
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            found = data.get("version") if isinstance(data, dict) else None
            raise ValueError(f"plan version {found}: this release reads version {PLAN_VERSION}")
        try:
            data["swaps"] = tuple(
                Swap(Key(*s["key"]), int(s["nbytes"]), Position(*s["release"]), Position(*s["prefetch"]))
                for s in data["swaps"]
            )
            if data["prediction"] is not None:
                data["prediction"] = Prediction(**data["prediction"])
            return cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"damaged plan: {error}") from None
