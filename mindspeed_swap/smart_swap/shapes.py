"""Shapes: a search of its own for every shape that a step can have. Pure; imports no torch.

A shape is (microbatches per step, size class of what enters the first layer): batch size ramp-up changes the one,
other sequence lengths the other. Until its first layer runs, a step is taken to be like the one before; once sizes have
been seen to vary, it has no plan before that: what little is saved until then would follow that of another shape. What
varies within a shape (the tokens of an expert) moves as it is, whatever size was planned with.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.errors import SettingError
from mindspeed_swap.smart_swap.outcomes import Phase
from mindspeed_swap.smart_swap.peers import Peers
from mindspeed_swap.smart_swap.plan_files import Shape, size_class
from mindspeed_swap.smart_swap.planning import HOST_SLACK_SHARE
from mindspeed_swap.smart_swap.policy import Policy
from mindspeed_swap.smart_swap.search import SmartSwap, tell
from mindspeed_swap.units import format_bytes

_UNKNOWN = 0  # size class, before the first layer has run


class Shapes:
    """``current`` is the search of the step that runs, or of the last one."""

    def __init__(
        self,
        capacity_bytes: int,
        policy: Policy,
        saved: Mapping[Shape, Plan] | None = None,
        new: Callable[..., SmartSwap] = SmartSwap,
    ) -> None:
        """``saved``: plans to run without a search. ``new``: makes a search. Raises SettingError if this device is too
        small for a saved plan."""
        self.peers, self._search = Peers(), new
        self._capacity, self._policy, self._saved = capacity_bytes, policy, dict(saved or {})
        self._searches: dict[Shape, SmartSwap] = {}
        self._shape: Shape = (0, _UNKNOWN)
        self._sized = False
        self._host_bytes = 0
        self.current = new(capacity_bytes, policy)
        for plan in self._saved.values():
            peak = plan.prediction.peak if plan.prediction else 0
            if peak > capacity_bytes:
                raise SettingError(
                    f"--swap-plan: its step needs {format_bytes(peak)} and this device gives "
                    f"{format_bytes(capacity_bytes)}: search again without --swap-plan"
                )

    def follow(self, peers: Peers) -> dict[Shape, Plan]:
        """Before the first step. A rank may lack its file: all take the leader's saved plans, which are returned."""
        self.peers, self._saved = peers, peers.share(self._saved)
        return dict(self._saved)

    def begin(self, microbatches: int, capacity_bytes: int, host_bytes: int) -> SmartSwap:
        """A step begins. Of the device there are ``capacity_bytes`` (scripts change that late), and for swap
        ``host_bytes`` of the host."""
        self._sized, self._capacity = False, capacity_bytes
        self._host_bytes = int(max(0, host_bytes) * (1 - HOST_SLACK_SHARE))
        return self._choose((microbatches, self._shape[1]))

    @property
    def vary(self) -> bool:
        """Steps of several sizes have been met."""
        return len({size for _, size in self._searches} - {_UNKNOWN}) > 1

    def meet(self, nbytes: int) -> bool:
        """A layer gets a tensor of so many bytes. True if the plan of ``current`` begins here."""
        if self._sized:
            return False
        self._sized, varied = True, self.vary
        microbatches, before = self._shape
        shape = microbatches, size_class(nbytes)
        if shape == self._shape:
            return varied
        if before == _UNKNOWN:  # the very first step
            del self._searches[self._shape]
            if shape not in self._saved:
                self._searches[shape], self._shape = self.current, shape
                self.current.name = _name(shape)
                if self._saved:
                    self._tell(f"the plan file has none for {_text(shape)}: searched for")
                return False
        self._choose(shape)
        return True

    def _choose(self, shape: Shape) -> SmartSwap:
        search = self._searches.get(shape)
        if search is None:
            search = self._searches[shape] = self._new(shape)
        search.steps, search.capacity_bytes, search.host_bytes = self.current.steps, self._capacity, self._host_bytes
        self._shape, self.current = shape, search
        return search

    def _tell(self, text: str) -> None:
        tell(f"{self._policy.feature}: {text}")

    def _new(self, shape: Shape) -> SmartSwap:
        search, plan = self._search(self._capacity, self._policy, self.peers, _name(shape)), self._saved.get(shape)
        if plan is None:
            if self._searches and shape[1] == self._shape[1]:
                self._tell(f"{shape[0]} microbatches from step {self.current.steps + 1} on: planned anew")
            elif self._searches:
                self._tell(f"{_text(shape)} from step {self.current.steps + 1} on: planned anew")
            return search
        self._tell(f"plan of the file: {plan.text or 'nothing to swap'}, no search")
        return search.run_saved(plan)

    def stable_plans(self) -> dict[Shape, Plan]:
        """Of all shapes met whose search is over."""
        return self._plans(lambda search: search.plan if search.phase is Phase.STABLE else None)

    def best_plans(self) -> dict[Shape, Plan]:
        """Of all shapes met: where the search is not over, the best try so far that was without fault."""
        return self._plans(lambda search: search.best_plan)

    def _plans(self, of: Callable[[SmartSwap], Plan | None]) -> dict[Shape, Plan]:
        found = {shape: of(search) for shape, search in self._searches.items()}
        return {shape: plan for shape, plan in found.items() if plan is not None}


def _name(shape: Shape) -> int:
    """A number that peers can compare."""
    return shape[0] * 1000 + shape[1]


def _text(shape: Shape) -> str:
    return f"{shape[0]} microbatches of size class {shape[1]}"
