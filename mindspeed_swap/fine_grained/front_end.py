"""``--swap-config``: one recorded step, the plan that the setting means, one step to see how it does. Pure."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_swap.core.simulate import memory_curve
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.fine_grained.advice import advice
from mindspeed_swap.fine_grained.parts import Parts
from mindspeed_swap.fine_grained.planning import Planning
from mindspeed_swap.fine_grained.schema import SwapConfig
from mindspeed_swap.fine_grained.setlines import set_lines, write_log
from mindspeed_swap.log import say
from mindspeed_swap.smart_swap.outcomes import Phase, Try, trouble_of
from mindspeed_swap.smart_swap.peers import Peers
from mindspeed_swap.smart_swap.planning import fit_host
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.search import SmartSwap, tell
from mindspeed_swap.units import format_bytes


class FineGrained:
    """One per rank."""

    def __init__(self, config: SwapConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._told: list[str] = []  # about layers that lack what is named
        self._logged = False
        self.parts: Parts | None = None

    def meet(self, chunks: Sequence[Mapping[int, Sequence[str]]], stage: int) -> None:
        """Before the first step: of each model chunk of this rank, its layers and the names in them. Raises
        SettingError for a name that matches nothing."""
        names = {layer: parts for chunk in chunks for layer, parts in chunk.items()}
        self.parts = Parts(self._config, names, [sorted(chunk) for chunk in chunks], stage)
        self._told = self.parts.must_match()
        if not names:
            say("swap-config: this rank has no transformer layers, so nothing to swap", every_rank=True)

    def new(self, capacity_bytes: int, policy: Policy, peers: Peers | None = None, name: int = 0) -> SmartSwap:
        """What a shape of step is run by. Ranks need not agree: each has the same setting."""
        del peers
        return Listed(capacity_bytes, policy, name=name, owner=self)

    def write(self, reasons: Sequence[str]) -> None:
        if self.parts is None:
            return
        lines = set_lines(self.parts)
        try:
            path = write_log(self._rank, [*self._told, *reasons], lines)
        except OSError as error:
            say(f"swap-config: log not written, training goes on: {error}", every_rank=True)
        else:
            if not self._logged:
                about = f", and {len(reasons)} lines about what had no effect" if reasons else ""
                tell(f"swap-config: what was set{about}: {path}")
        self._logged = True

    def close(self) -> None:
        """A run that ends before its plan is made leaves the setting all the same."""
        if not self._logged:
            self.write([])


@dataclass(slots=True)
class Listed(SmartSwap):
    """In the place of a search: WarmUp records, SearchPolicy is the one step that is measured, Stable goes on."""

    owner: FineGrained | None = None
    advice: list[str] = field(default_factory=list)
    _planning: Planning | None = None

    def summary(self) -> dict[str, Any]:
        """For reports."""
        return {"advice": self.advice, "without_effect": self._planning.reasons if self._planning else []}

    def _plan_afresh(self, trace: StepTrace) -> bool:
        if not trace.has_optimizer_state:
            return False  # the first step's memory is not that of the others
        assert self.owner is not None and self.owner.parts is not None
        self._afresh = False
        self.target_bytes, self.peak_bytes = self.capacity_bytes, max(memory_curve(trace, ()))
        self._planning = Planning(trace, self.owner.parts)
        self.plan, told = fit_host(trace, self._planning.plan, self.host_bytes)
        self.owner.write(self._planning.reasons)
        if told:
            self.tell(f"swap-config: {told}")
        nothing = "NOTHING can be swapped or recomputed" if self._planning.reasons else "nothing to swap or recompute"
        self._enter(Phase.SEARCH, self.plan.text or nothing)
        return True

    def _tried(self, stats: StepStats, trace: StepTrace) -> bool:
        assert self.plan is not None and self.shown is not None and self._planning is not None
        peak = trace.peak_bytes
        self._accepted_trouble = trouble_of(stats, None)
        self.tries.append(Try(self.plan, self._accepted_trouble, 0, peak, trace.step_ms, self.shown))
        self.advice = advice(self._planning, trace)
        for line in self.advice:
            if "late" in line:  # what costs time; the rest is in the report
                self.tell(f"swap-config: {line}")
        self._enter(Phase.STABLE, self._measured(peak))
        return True

    def _measured(self, peak: int) -> str:
        loads = self._accepted_trouble
        text = f"{self.tries[-1].step_ms:.0f} ms, peak {format_bytes(peak)} instead of {format_bytes(self.peak_bytes)}"
        return text + (f", {loads} evictions and loads on demand" if loads else "")

    def _enter(self, phase: Phase, why: str) -> None:
        self.tell(f"swap-config: {self.phase.value} -> {phase.value} at step {self.steps}: {why}")
        self.phase = phase
