"""Every setting of SmartSwap's policy by name: what it takes, its unit, what it does here. Pure; imports no torch.

The names are those of the policy file that users of MindSpeed know, so that theirs can be given as it is. Where their
constant assumes a device of 64 GB the value shipped here is AUTO: derived from what was measured, by the rule told.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mindspeed_swap.units import MOST_BYTES


class _Auto:
    """The one value AUTO."""

    def __repr__(self) -> str:
        return "AUTO"


AUTO: Any = _Auto()


class SwapPolicyPref(Enum):
    BETTER_PERFORMANCE = 1  # moves activations
    BETTER_MEMORY_SAVING = 2  # moves activations and the optimizer's state


@dataclass(frozen=True, slots=True)
class Knob:
    """``kind``: "bytes", "count", "share", "rate" (MiB/s), "flag", "text", "pref"; "any" is not looked at.
    ``effect`` empty: nothing here corresponds to it."""

    kind: str
    default: Any
    effect: str = ""
    least: int = 0

    @property
    def takes(self) -> str:
        """What a value must be, for messages."""
        text = _TAKES[self.kind] + (f", at least {self.least}" if self.least else "")
        return text + (", or AUTO" if self.default is AUTO else "")


_TAKES = {
    "bytes": "a whole number of bytes",
    "count": "a whole number",
    "share": "a number",
    "rate": "a number of MiB per second above 0",
    "flag": "True or False",
    "text": "a text in quotes",
    "pref": "one of " + ", ".join(f"SwapPolicyPref.{name}" for name in SwapPolicyPref.__members__),
    "any": "anything",
}

KNOBS: dict[str, Knob] = {
    # ---- phases
    "warmup_step": Knob("count", 2, "steps that are only recorded before the first plan", 1),
    "stable_step": Knob("count", AUTO, "step at which Stable begins, warmup_step included", 2),
    "op_diff_thresh": Knob("share", 0.05, "share by which the saves of a step may differ from the recorded step"),
    # ---- how much
    "redundant_memory": Knob("bytes", AUTO, "room left below the device or its cap"),
    "adjust_memory": Knob("bytes", AUTO, "more room after each try that still ran out of memory"),
    "target_mode": Knob("flag", False, "True: down to target_memory. False: down by reduction_memory"),
    "target_memory": Knob("bytes", AUTO, "peak of a step, with target_mode; 0 moves all"),
    "reduction_memory": Knob("bytes", AUTO, "how far below the step without swap, without target_mode"),
    # ---- of what
    "policy_v2": Knob("flag", True, "SwapStages with buckets; False: any tensor"),
    "policy_pref": Knob("pref", SwapPolicyPref.BETTER_PERFORMANCE, "what v2 moves"),
    "swap_bucket_size": Knob("bytes", -1, "most bytes moved per SwapStage; below 0: no cap, 0: none", -(1 << 62)),
    "num_attn_layers_per_stage": Knob("count", 1, "transformer layers per SwapStage", 1),
    "tensor_size_filter": Knob("bytes", AUTO, "smaller tensors are not planned for"),
    # ---- at which speed
    "D2H_bandwidth": Knob("rate", AUTO, "to the host"),
    "H2D_bandwidth": Knob("rate", AUTO, "to the device"),
    # ---- what is told
    "print_level": Knob("count", 1, "2: our lines are not printed"),
    "print_rank": Knob("count", 0, "-1: every rank prints", -1),
    "save_policy": Knob("flag", False, "write the plan into output_root_path"),
    "save_profiler_data": Knob("flag", False, "write figures and trace into output_root_path"),
    "output_root_path": Knob("text", "./swap_output", "folder of these two"),
    # ---- accepted, without effect: nothing here corresponds to them
    **{
        name: Knob("any", default)
        for name, default in {
            "rank": 0, "tensor_size_thresh": AUTO, "enable_custom_record_stream": True, "free_stage_delay": 4,
            "swap_in_free_stage_delay": 2, "size_coverage_weight": 2, "adjust_step_duration": 1,
            "adjust_size_coverage_weight": 0, "tensor_freq_thresh": 8, "bandwidth_arg": 1, "logical_layer_num": 0,
            "duration_time": 0,
        }.items()
    },
}  # fmt: skip


def fault(name: str, value: Any) -> str:
    """What is wrong with a value, or "". The name is one of KNOBS."""
    knob = KNOBS[name]
    if knob.kind == "any" or (value is AUTO and knob.default is AUTO):
        return ""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_BYTES  # nor NaN
    right = {
        "bytes": number and value == int(value),  # 2.5 * 1024**3 is a float, and a whole number
        "count": number and isinstance(value, int),
        "share": number and value >= 0,
        "rate": number and value > 0,
        "flag": isinstance(value, bool),
        "text": isinstance(value, str),
        "pref": isinstance(value, SwapPolicyPref),
    }[knob.kind]
    if right and knob.kind in ("bytes", "count"):
        right = value >= knob.least
    return "" if right else f"{name} = {value!r:.60}: expected {knob.takes}"
