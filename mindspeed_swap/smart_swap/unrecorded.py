"""Unrecorded: recorded steps as they are when nothing is recorded, and no plan moves anything. Pure.

What a try takes beyond its promise is told as the pace of the host in that step, not as what its moves take. That was
learned once, by what tries took beyond the step without a plan; where the host's pace changes by a fifth within
seconds it came out at anything from nothing to four times, and plans went from one extreme to the other for it (H200,
experts: 176 ms without a move, where 20 moves would have made it 150). Up to twice, plans are the same as without.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.retime import retimed
from mindspeed_swap.core.trace import ModuleKey, StepTrace


@dataclass(slots=True)
class Unrecorded:
    """A module is not to be dearer, or cheaper, for not having run again in the last try: what that takes is
    remembered, the least that was seen, as the host may have been slow in any of them."""

    _again_ms: dict[ModuleKey, float] = field(default_factory=dict)

    def told(self, trace: StepTrace, took_ms: float, plan: Plan | None) -> StepTrace:
        """A recorded step of this plan, when steps of it that are not recorded take so long."""
        for module in trace.modules:
            found = [each for each in (module.again_ms, self._again_ms.get(module.key)) if each is not None]
            if found:
                module.again_ms = self._again_ms[module.key] = min(found)
        promised = plan.prediction if plan else None
        return retimed(trace, took_ms, promised.host_ms if promised else 0.0)
