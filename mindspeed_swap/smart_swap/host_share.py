"""HostShare: how much of what a plan's moves are expected to take the host shows in this run. Pure.

Where the device waits for the host (experts), one plan of 30 moves made a step 20 ms longer in one run and took nothing
in another one (H200, lanes.py has the figure of the first): the host was as fast again there. So the first plan reckons
with the worst that was measured, and each try tells those after it what it really was.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.retime import retimed
from mindspeed_swap.core.trace import StepTrace

# Below this part of a step, what moves take cannot be told from noise.
LEAST_TOLD_SHARE = 0.02
# Nothing is taken to be quite free: of two plans of equal times the one that moves less is to be chosen.
LEAST_SHARE = 0.05


@dataclass(slots=True)
class HostShare:
    share: float = 1.0
    plain_ms: float | None = None  # what a step takes without a plan. None: not known, so nothing is learned
    _tries: int = 0

    def told(self, trace: StepTrace, took_ms: float, plan: Plan | None) -> StepTrace:
        """A recorded step of this plan as it is without recording, when it takes so long; what is planned from it
        reckons with what moves take the host by now."""
        if plan is None:
            self.plain_ms = took_ms
            return retimed(trace, took_ms)
        planned = self.share
        self._learn(plan, took_ms)
        host_ms = plan.prediction.host_ms * self.share / planned if plan.prediction else 0.0
        told = retimed(trace, took_ms, host_ms)
        forward, backward = (self.share * waits for waits in (told.forward_waits, told.backward_waits))
        return replace(told, forward_waits=forward, backward_waits=backward)

    def _learn(self, plan: Plan, took_ms: float) -> None:
        promised = plan.prediction
        if self.plain_ms is None or promised is None or promised.host_ms < LEAST_TOLD_SHARE * self.plain_ms:
            return
        beyond_ms = took_ms - self.plain_ms - promised.stall_ms - promised.recompute_ms
        shown = min(1.0, max(LEAST_SHARE, self.share * beyond_ms / promised.host_ms))
        self.share = (self._tries * self.share + shown) / (self._tries + 1)
        self._tries += 1
