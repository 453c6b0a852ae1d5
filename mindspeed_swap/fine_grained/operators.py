"""Operators: the unit in which a swap configuration counts. Pure; imports no torch.

One operator is one call of a leaf, a module without modules inside, in which something is saved. (What saves nothing
cannot be seen in backward, and would count in forward only.) In backward it runs from the first to the last read of
what was saved in it. Forward and backward of all microbatches are one sequence, in recorded order.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from mindspeed_swap.core.recompute import WHOLE_LAYER
from mindspeed_swap.core.simulate import position_index
from mindspeed_swap.core.trace import BACKWARD, FORWARD, Position, StepTrace, plain_name


@dataclass(frozen=True, slots=True)
class Operators:
    """``begins``, ``ends``: points, of the operators in the order in which they begin. ``owner``: point of a save ->
    number (in ``trace.modules``) of the leaf call that it happened in."""

    begins: list[int]
    ends: list[int]
    owner: dict[int, int]

    def after(self, point: int, count: int) -> int | None:
        """Where the operator is over that is ``count`` after ``point``. None: the step is over before."""
        if count == 0:
            return point + 1
        index = bisect_right(self.begins, point) + count - 1
        return self.ends[index] if index < len(self.ends) else None

    def before(self, point: int, count: int) -> int | None:
        """Where the operator begins that is ``count`` before the one that runs at ``point``. None: there are less."""
        if count == 0:
            return point - 1
        index = bisect_right(self.begins, point) - 1
        if index >= 0 and point <= self.ends[index]:
            point = self.begins[index]
        index = bisect_left(self.begins, point) - count
        return self.begins[index] if index >= 0 else None


def leaves(trace: StepTrace) -> list[int]:
    """Numbers of the calls of modules that nothing of their layer is inside."""
    parents = set()
    for module in trace.modules:
        name = plain_name(module.key)
        while "." in name:
            name = name.rpartition(".")[0]
            parents.add((module.key.chunk, module.key.layer, name))
    return [
        i
        for i, module in enumerate(trace.modules)
        if (name := plain_name(module.key)) != WHOLE_LAYER and (module.key.chunk, module.key.layer, name) not in parents
    ]


def operators(trace: StepTrace) -> Operators:
    first_at = position_index(trace)
    calls = sorted(leaves(trace), key=lambda i: trace.modules[i].begin)
    begins = [trace.modules[i].begin for i in calls]
    owner: dict[int, int] = {}
    reads: dict[int, tuple[int, int]] = {}  # by number of the call: first and last point
    for point, at in enumerate(p.position for p in trace.points):
        if at.ordinal < 0 or at.phase not in (FORWARD, BACKWARD):
            continue
        saved = first_at.get(Position(FORWARD, *at[1:]))
        index = bisect_right(begins, saved) - 1 if saved is not None else -1
        if saved is None or index < 0 or saved > trace.modules[calls[index]].end:
            continue
        if at.phase == FORWARD:
            owner[point] = calls[index]
        else:
            reads[calls[index]] = reads.get(calls[index], (point, point))[0], point
    spans = [(trace.modules[i].begin, trace.modules[i].end) for i in set(owner.values())]
    spans = sorted(spans + list(reads.values()))
    return Operators([begin for begin, _ in spans], [end for _, end in spans], owner)
