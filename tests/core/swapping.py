"""A swap manager over the simulated device, recorded steps, plans that swap all that can be swapped, and the comparison
with the same step without hooks."""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from simulated import new_pool

from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.saved_tensor import SavedTensor, State
from mindspeed_swap.core.step import StepStats
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import EXIT, FORWARD, OPTIMIZER, OUTSIDE, Key, Position, StepTrace
from mindspeed_swap.core.waits import Wait
from mindspeed_swap.sim import device

# What is there before the tests begin stays: collecting garbage is then quick, and these tests do it often.
gc.collect()
gc.freeze()

MIN_BYTES = 1024  # small tensors are moved too: tests stay quick
MODEL = "test"

Layer = Callable[[int], AbstractContextManager[None]]
Body = Callable[[Layer], torch.Tensor]  # the forward of one microbatch; its layers run inside ``layer(number)``


def new_manager(
    accelerator, *, host_bytes: int = 64 << 20, min_bytes: int = MIN_BYTES, skip_waits: frozenset[Wait] = frozenset()
) -> SwapManager:
    return SwapManager(accelerator, new_pool(accelerator, host_bytes), min_bytes=min_bytes, skip_waits=skip_waits)


def new_trace() -> StepTrace:
    return StepTrace(MODEL, device.capacity(), device.memory_allocated(), 1e6, 1e6)


@dataclass
class Outcome:
    """What a step computed and, with a manager, what it did."""

    losses: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    stats: StepStats = field(default_factory=StepStats)
    trace: StepTrace | None = None
    peak_bytes: int = 0


def run_step(
    body: Body,
    leaves: Sequence[torch.Tensor],
    manager: SwapManager | None = None,
    plan: Plan | None = None,
    *,
    record: bool = False,
    read_order: dict | None = None,
    microbatches: int = 1,
    forwards_first: bool = False,
    light: bool | None = None,
) -> Outcome:
    """One training step without an optimizer. No manager: plain PyTorch. ``forwards_first``: of all microbatches,
    before the first backward, as in a pipeline."""
    for leaf in leaves:
        leaf.grad = None
    device.reset_peak()
    losses, waiting = [], []
    if manager is not None:
        how = {} if light is None else {"light": light}
        manager.begin_step(plan, trace=new_trace() if record else None, read_order=read_order, **how)
    for microbatch in range(microbatches):
        with manager.forward(microbatch) if manager is not None else nullcontext():
            waiting.append(body(manager.layer if manager is not None else _no_layer))
        while waiting and (not forwards_first or microbatch == microbatches - 1):
            loss = waiting.pop(0)
            loss.backward()
            losses.append(loss.detach())
            del loss
    stats, trace = manager.end_step() if manager is not None else (StepStats(), None)
    peak_bytes = device.max_memory_allocated()
    with device.host_memory():  # takes no room from the next step
        losses = [loss.clone() for loss in losses]
        grads = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return Outcome(losses, grads, stats, trace, peak_bytes)


@contextmanager
def _no_layer(number: int) -> Iterator[None]:
    yield


def swap_all(trace: StepTrace, *, release: int = 0, prefetch: int = 1) -> Plan:
    """Swaps every tensor that the trace calls movable. Released ``release`` points after nobody else holds it, back
    ``prefetch`` points before it is read (0: on demand, the plan never asks for it back in time)."""
    swaps = []
    for record in trace.saved:
        if not record.movable:
            continue
        assert record.sole is not None and record.first_read is not None
        out = max(record.sole, record.last_use) + release
        back = max(record.first_read - prefetch, out + 1)
        if out < record.first_read:
            swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    return Plan(trace.model, 0, tuple(swaps))


def recorded_plan(body: Body, leaves: Sequence[torch.Tensor], manager: SwapManager, **distances: int) -> Plan:
    """The plan that swaps all, from a step recorded without one."""
    trace = run_step(body, leaves, manager, record=True).trace
    assert trace is not None
    return swap_all(trace, **distances)


def check_swapped(
    body: Body, leaves: Sequence[torch.Tensor], sim, *, host_bytes: int = 64 << 20, steps: int = 2, **distances: int
) -> tuple[SwapManager, Plan, Outcome]:
    """Runs plainly and under a plan that swaps all, in ``steps`` light steps and as many that are not; results must be
    equal bit for bit, and the plan carried out."""
    plain = run_step(body, leaves)
    manager = new_manager(sim, host_bytes=host_bytes)
    plan = recorded_plan(body, leaves, manager, **distances)
    assert plan.swaps, "nothing to swap: the test would show nothing"
    for number in range(2 * steps):
        outcome = run_step(body, leaves, manager, plan, light=number < steps)
        assert_same(outcome, plain)
        assert outcome.stats.offloaded_bytes == plan.swap_bytes
        assert outcome.stats.loaded_bytes == plan.swap_bytes
        assert outcome.stats.ineffective_bytes == 0
    assert_nothing_left(manager)
    return manager, plan, outcome


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparing: NaN equals NaN, -0.0 is not 0.0."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def assert_equal_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(bits(found), bits(expected))


def assert_same(found: Outcome, expected: Outcome) -> None:
    for name in ("losses", "grads"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert_equal_bits(a, b)


def settle(manager: SwapManager) -> None:
    """Whatever is unreachable is found dead, and copies under way are over."""
    gc.collect()
    manager.accelerator.synchronize()
    manager.begin_step()


def assert_nothing_left(manager: SwapManager) -> None:
    """No live graph: the manager must hold nothing, on either side."""
    settle(manager)
    assert manager.bytes_in == dict.fromkeys(State, 0)
    assert manager.pool.used_bytes == 0


class Ledger:
    """Adds up the bytes of live saved tensors from the events alone, and compares with the manager's books."""

    def __init__(self, manager: SwapManager) -> None:
        self._manager = manager
        self._where: dict[int, tuple[State, int]] = {}
        self.events: list[tuple[State | None, State]] = []
        manager.observers.append(self._event)

    def _event(self, saved: SavedTensor, old: State | None) -> None:
        before = self._where.pop(saved.serial, None)
        assert (before[0] if before else None) is old
        if saved.state is not State.DEAD:
            self._where[saved.serial] = (saved.state, saved.nbytes)
        self.events.append((old, saved.state))
        self.check()

    def check(self) -> None:
        totals = dict.fromkeys(State, 0)
        for state, nbytes in self._where.values():
            totals[state] += nbytes
        assert totals == self._manager.bytes_in
        on_host = totals[State.LEAVING] + totals[State.HOST] + totals[State.RETURNING]
        assert self._manager.pool.used_bytes == on_host


@contextmanager
def capacity(nbytes: int) -> Iterator[None]:
    before = device.capacity()
    device.set_capacity(nbytes)
    try:
        yield
    finally:
        device.set_capacity(before)


def blocks(count: int, width: int = 64, tokens: int = 64, *, seed: int = 0) -> tuple[Body, list[torch.Tensor]]:
    """``count`` residual blocks, in layers 1..count: per block two products and a nonlinearity."""
    generator = torch.Generator().manual_seed(seed)

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(*shape, generator=generator) / shape[0] ** 0.5)

    weights = [(parameter(width, 2 * width), parameter(2 * width, width)) for _ in range(count)]
    inputs = torch.randn(tokens, width, generator=generator)

    def body(layer: Layer) -> torch.Tensor:
        hidden = inputs
        for number, (up, down) in enumerate(weights, 1):
            with layer(number):
                hidden = hidden + torch.nn.functional.gelu(hidden @ up) @ down
        return hidden.square().mean()

    return body, [weight for pair in weights for weight in pair]


def capture(function: Callable[..., object], *arguments: object) -> BaseException | None:
    """The exception it ends with."""
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def plan_everything(count: int, nbytes: int) -> Plan:
    """For tensors packed outside all layers: released at the end of forward, read on demand."""
    end, never = Position(FORWARD, 0, 0, OUTSIDE, EXIT), Position(OPTIMIZER, 0, 0, OUTSIDE, EXIT)
    return Plan(MODEL, 0, tuple(Swap(Key(0, 0, OUTSIDE, ordinal), nbytes, end, never) for ordinal in range(count)))
