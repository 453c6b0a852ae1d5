"""The lower bound of a step at a budget: no plan can be faster, whatever it swaps or recomputes. Pure; measured inputs.

    plain step time + for each microbatch the least, over what is recomputed, of
        recompute time + time of the copies that fit into no window

Bytes that must leave: the plain run's forward/backward peak less the budget. What leaves goes out during one forward
and comes back during one backward, each at the bandwidth of its direction with the link to itself; what is above that
is exposed. Recompute is taken in any fraction, cheapest per byte first. Both make the bound lower than what can be had.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """Times in ms, per microbatch but for the step's; all of the plain run but for the link and the modules."""

    step_ms: float
    forward_ms: float
    backward_ms: float
    microbatches: int
    peak_bytes: int
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    recompute: tuple[tuple[int, float], ...] = ()  # (bytes freed, ms) of parts of the model that do not overlap


def lower_bound_ms(inputs: Inputs, budget_bytes: int) -> float:
    leave = max(0, inputs.peak_bytes - budget_bytes)
    cheapest_first = sorted(inputs.recompute, key=lambda option: option[1] / option[0])
    # The cost is convex and bends only where an option is used up or a window is full.
    windows = (inputs.out_bytes_per_ms * inputs.forward_ms, inputs.in_bytes_per_ms * inputs.backward_ms)
    bends = {0.0, *(leave - window for window in windows)}
    total = 0.0
    for nbytes, _ in cheapest_first:
        total += nbytes
        bends.add(total)
    bends.add(min(total, leave))
    cost = min(
        _recompute_ms(cheapest_first, again) + exposed_ms(inputs, leave - again)
        for again in bends
        if 0 <= again <= min(total, leave)
    )
    return inputs.step_ms + inputs.microbatches * cost


def exposed_ms(inputs: Inputs, swapped: float) -> float:
    """Of the copies of one microbatch, out and back."""
    late_out = max(0.0, swapped / inputs.out_bytes_per_ms - inputs.forward_ms)
    return late_out + max(0.0, swapped / inputs.in_bytes_per_ms - inputs.backward_ms)


def _recompute_ms(cheapest_first: Sequence[tuple[int, float]], wanted: float) -> float:
    spent = 0.0
    for nbytes, ms in cheapest_first:
        taken = min(nbytes, wanted)
        spent += ms * taken / nbytes
        wanted -= taken
    return spent


def optimizer_bound_ms(inputs: Inputs, moved: int) -> float:
    """Exposed time of optimizer state that comes in while the last backward runs and leaves during the next forward."""
    return exposed_ms(
        Inputs(0.0, inputs.forward_ms, inputs.backward_ms, 1, 0, inputs.out_bytes_per_ms, inputs.in_bytes_per_ms), moved
    )


def recompute_options(trace: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Of the first microbatch of a recorded step (step_trace.json), one for each module name.

    Modules are within one another. Each counts for what its inner ones do not free, at the time that they do not take:
    less than it could be had for, so the bound stays one.
    """
    saved = {tuple(record["key"]): record["nbytes"] for record in trace["saved"]}
    modules: dict[tuple[Any, ...], tuple[int, float]] = {}
    for record in trace["modules"]:
        microbatch, chunk, layer, name = record["key"]
        if microbatch == 0:
            freed = sum(saved.get(tuple(key), 0) for key in record["frees"])
            if freed > 0:
                modules[chunk, layer, name] = (freed, record["forward_ms"])
    options: dict[str, tuple[int, float]] = {}
    for (chunk, layer, name), (freed, ms) in modules.items():
        own, own_ms = freed, ms
        for (other_chunk, other_layer, inner), (inner_freed, inner_ms) in modules.items():
            if (other_chunk, other_layer) == (chunk, layer) and _parent(inner, modules, chunk, layer) == name:
                own, own_ms = own - inner_freed, own_ms - inner_ms
        if own > 0:
            nbytes, time = options.get(name, (0, 0.0))
            options[name] = nbytes + own, time + max(0.0, own_ms)
    return list(options.values())


def _parent(name: str, modules: Mapping[tuple[Any, ...], Any], chunk: int, layer: int) -> str | None:
    """The innermost module around it that frees something. "layer" is around all."""
    if name == "layer":
        return None
    outer = name.rpartition(".")[0]
    while outer:
        if (chunk, layer, outer) in modules:
            return outer
        outer = outer.rpartition(".")[0]
    return "layer"
