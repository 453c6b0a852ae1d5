"""HostShare: how much of what a plan's moves are expected to take the host shows in this run; and how long modules took
to run again. Pure.

Where the device waits for the host (experts), moves took three times as long in one run as in another one (H200, one
plan each): so fast was the host there. The first plan reckons with what is usual (lanes.py), or it would avoid moves,
and nothing would tell that they cost less; each try tells those after it what it really was. And a module is not to be
dearer, or cheaper, for not having run again in the last try.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from mindspeed_swap.core.plan import Plan, Prediction
from mindspeed_swap.core.retime import retimed
from mindspeed_swap.core.simulate import plain_step_ms
from mindspeed_swap.core.trace import ModuleKey, StepTrace

# Below this part of a step, what moves take cannot be told from noise.
LEAST_TOLD_SHARE = 0.02
# Nothing is taken to be quite free: of two plans of equal times the one that moves less is to be chosen.
LEAST_SHARE = 0.15
# The most that was met: three times, and some more.
MOST_SHARE = 4.0


@dataclass(slots=True)
class HostShare:
    share: float = 1.0
    plain_ms: float | None = None  # what a step takes without a plan. None: not known, so nothing is learned
    _tries: int = 0
    _last: Plan | None = None  # that was learned from
    _again_ms: dict[ModuleKey, float] = field(default_factory=dict)  # what modules took when they last ran again

    def told(self, trace: StepTrace, took_ms: float, plan: Plan | None, trouble: int) -> StepTrace:
        """A recorded step of this plan as it is without recording, when it takes so long; what is planned from it
        reckons with what moves take the host by now."""
        for module in trace.modules:
            if module.again_ms is None:
                module.again_ms = self._again_ms.get(module.key)
            else:
                self._again_ms[module.key] = module.again_ms
        if plan is None:
            told = retimed(trace, took_ms)
            pressed = trace.evicted_bytes or trace.stall_ms  # what that took is in took_ms
            self.plain_ms = None if pressed else plain_step_ms(told)
            return told
        promised = plan.prediction
        if promised is not None and not trouble and plan is not self._last:
            self._learn(promised, took_ms)
            self._last = plan
        host_ms = promised.host_ms * self.share / promised.host_share if promised else 0.0
        return replace(retimed(trace, took_ms, host_ms), host_share=self.share)

    def _learn(self, promised: Prediction, took_ms: float) -> None:
        if self.plain_ms is None or not promised.host_ms:
            return
        beyond_ms = took_ms - self.plain_ms - promised.stall_ms - promised.recompute_ms
        if max(beyond_ms, promised.host_ms / promised.host_share) <= LEAST_TOLD_SHARE * self.plain_ms:
            return
        shown = min(MOST_SHARE, max(LEAST_SHARE, promised.host_share * beyond_ms / promised.host_ms))
        self.share = (self._tries * self.share + shown) / (self._tries + 1)
        self._tries += 1
