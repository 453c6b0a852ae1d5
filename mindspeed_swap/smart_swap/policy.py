"""Policy: the settings of SmartSwap as the search uses them. Pure; imports no torch. Bytes, bytes per millisecond."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP
from mindspeed_swap.errors import SettingError
from mindspeed_swap.smart_swap.knobs import AUTO, KNOBS, SwapPolicyPref
from mindspeed_swap.units import MIB, format_bytes

# Room that AUTO leaves below the device or the target: what a step needs varies by a little from one to the next.
RESERVE_SHARE = 0.02
# The same after a try whose peak was as predicted: activations are a third of the device or less, so that 2 % of it can
# be a tenth of what may move.
LEAST_RESERVE_SHARE = 0.0025
# Tries that AUTO makes at most before the best one measured is kept.
MAX_TRIES = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """``None`` is AUTO: see swap_policy_config.py for what each means, and for the rule."""

    warmup_step: int = 2
    stable_step: int | None = None
    op_diff_thresh: float = 0.05
    redundant_memory: int | None = None
    adjust_memory: int | None = None
    target_memory: int | None = None  # only with target_mode
    reduction_memory: int | None = None  # only without
    policy_v2: bool = True
    saves_most: bool = False  # BETTER_MEMORY_SAVING
    bucket_bytes: int | None = None  # per SwapStage
    layers_per_stage: int = 1
    tensor_size_filter: int = 0
    d2h_bytes_per_ms: float | None = None
    h2d_bytes_per_ms: float | None = None
    recomputes: bool = False  # adaptive memory optimization: recompute is a choice too
    listed: bool = False  # swap configuration: the user's own list is what is done

    @property
    def feature(self) -> str:
        """For messages."""
        return "swap-config" if self.listed else "adaptive memory" if self.recomputes else "smart-swap"

    @property
    def flag(self) -> str:
        if self.listed:
            return "--swap-config"
        return "--adaptive-memory-optimization" if self.recomputes else "--smart-swap"

    @property
    def verbs(self) -> Collection[str]:
        return ALL_VERBS if self.recomputes else KEEP_SWAP

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Policy:
        """From checked values by name; what is missing is as shipped. Raises SettingError for values that do not go
        together."""
        value = {name: settings.get(name, knob.default) for name, knob in KNOBS.items()}
        value = {name: None if each is AUTO else each for name, each in value.items()}
        warmup, stable = value["warmup_step"], value["stable_step"]
        if stable is not None and stable <= warmup:
            raise SettingError(f"stable_step = {stable}: must be above warmup_step = {warmup}, or no plan is tried")
        v2, bucket = value["policy_v2"], value["swap_bucket_size"]
        return cls(
            warmup_step=warmup,
            stable_step=stable,
            op_diff_thresh=value["op_diff_thresh"],
            redundant_memory=_whole(value["redundant_memory"]),
            adjust_memory=_whole(value["adjust_memory"]),
            target_memory=_whole(value["target_memory"]) if value["target_mode"] else None,
            reduction_memory=None if value["target_mode"] else _whole(value["reduction_memory"]),
            policy_v2=v2,
            saves_most=v2 and value["policy_pref"] is SwapPolicyPref.BETTER_MEMORY_SAVING,
            bucket_bytes=int(bucket) if v2 and bucket >= 0 else None,
            layers_per_stage=value["num_attn_layers_per_stage"],
            tensor_size_filter=_whole(value["tensor_size_filter"]) or 0,
            d2h_bytes_per_ms=_per_ms(value["D2H_bandwidth"]),
            h2d_bytes_per_ms=_per_ms(value["H2D_bandwidth"]),
        )

    def with_target(self, nbytes: int) -> Policy:
        return replace(self, target_memory=nbytes, reduction_memory=None)

    @property
    def moves_all(self) -> bool:
        return self.target_memory == 0

    @property
    def tries(self) -> int | None:
        """How many plans are tried. None: as long as they gain."""
        return None if self.stable_step is None else self.stable_step - self.warmup_step

    def targets(self, capacity: int, peak: int) -> tuple[int, int]:
        """(peak to plan for, peak that must not be exceeded); ``peak`` is that of a step without swap."""
        most = capacity - (self.redundant_memory or 0)
        if self.target_memory:
            most = min(most, self.target_memory)
        elif self.reduction_memory:
            most = min(most, peak - self.reduction_memory)
        return (int(most * (1 - RESERVE_SHARE)) if self.redundant_memory is None else most), most

    @property
    def line(self) -> str:
        """For the log: what will be done."""
        goal = "what the device lacks"
        if self.moves_all:
            goal = "all that may move"
        elif self.target_memory is not None:
            goal = f"what a step needs above {format_bytes(self.target_memory)}"
        elif self.reduction_memory:
            goal = f"{format_bytes(self.reduction_memory)}, more if the device lacks more"
        if self.recomputes:
            return f"recomputes, or moves to host memory, {goal}, whichever costs least"
        bucket = "" if self.bucket_bytes is None else f", at most {format_bytes(self.bucket_bytes)} per SwapStage"
        stages = f"v2, SwapStages of {self.layers_per_stage} layers{bucket}" if self.policy_v2 else "v1"
        return f"moves {goal} to host memory ({stages})"


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _per_ms(mib_per_second: float | None) -> float | None:
    return None if mib_per_second is None else mib_per_second * MIB / 1000
