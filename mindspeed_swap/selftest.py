"""``mindspeed-swap selftest``: does what training relies on work on this device? It takes minutes at most.

Each check prints one line: PASS, the name, figures. The first that fails prints FAIL, what was seen and what it means,
and ends the test: later ones rely on it.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: the same sums in the same order

import torch

from mindspeed_swap.core.accelerator import Accelerator, get_accelerator, prepare_device
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.link import probe_link
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Plan, Swap
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.units import GIB, MIB, format_bytes
from mindspeed_swap.virtual_optimizer.amount import VirtualOptions
from mindspeed_swap.virtual_optimizer.swap_tensor import to_host
from mindspeed_swap.virtual_optimizer.virtual_optimizer import VirtualOptimizer

CAPACITY = "MINDSPEED_SWAP_DEVICE_CAPACITY"
# Enough that no buffer of the allocator's own counts, little enough to be filled in no time.
CAPACITIES = {"sim": "256MiB", "cuda": "4GiB", "npu": "4GiB"}
UNITS = 32  # of saved memory in a device
OVERFILL = 1.5
LAYERS, STEPS = 6, 3
OPTIMIZER_SHAPES = ((1024, 512), (300, 7), (513,), (1,))


class Failed(Exception):
    def __init__(self, seen: str, meaning: str) -> None:
        super().__init__(seen)
        self.meaning = meaning


def selftest(device: str) -> int:
    """Returns the exit code. Raises SettingError if there is no such device, or it cannot be used."""
    os.environ["MINDSPEED_SWAP_DEVICE"] = device
    os.environ.setdefault(CAPACITY, CAPACITIES[device])
    start = time.monotonic()
    prepare_device("selftest")
    accelerator = get_accelerator()
    print(f"device: {accelerator.name}, {format_bytes(accelerator.memory().capacity_bytes)} of it used for this test")
    checks = (bandwidth, out_of_memory, small_model, swapped_adam)
    try:
        for check in checks:
            name = check.__name__.replace("_", " ")
            try:
                figures = check(accelerator)
            except Failed as failed:
                print(f"FAIL  {name}: {failed}\n      It means: {failed.meaning}")
                return 1
            except Exception as error:
                print(f"FAIL  {name}: {type(error).__name__}: {str(error).strip()}")
                print("      It means: something this check relies on is missing or broken on this device; see above")
                return 1
            print(f"PASS  {name}: {figures}")
    finally:
        accelerator.close()
    print(f"PASS: all {len(checks)} checks in {time.monotonic() - start:.0f} s")
    return 0


@contextmanager
def _manager(accelerator: Accelerator, host_bytes: int) -> Iterator[SwapManager]:
    pool = HostPool(accelerator, host_bytes)
    manager = SwapManager(accelerator, pool, min_bytes=1)
    try:
        yield manager
    finally:
        manager.close()
        pool.close()


def _place(accelerator: Accelerator) -> torch.device:
    return accelerator.empty(1).device


def _same_bits(found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return to_host(tensor.detach().contiguous()).reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(a), raw(b)) for a, b in zip(found, plain, strict=True))


# ---- the checks
def bandwidth(accelerator: Accelerator) -> str:
    pool = HostPool(accelerator, GIB // 4)
    try:
        link = probe_link(accelerator, pool)
    finally:
        pool.close()
    if link is None:
        raise Failed("not measured", "no page-locked host memory: see `ulimit -l`, and the container's limit")
    return str(link)


def out_of_memory(accelerator: Accelerator) -> str:
    """Saves more than the device holds: it must be evicted, and come back as it was."""
    capacity, before = accelerator.memory().capacity_bytes, accelerator.memory().allocated_bytes
    numbers = (capacity - before) // UNITS // 4
    count = int(UNITS * OVERFILL)
    place = _place(accelerator)

    def step(manager: SwapManager | None) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(numbers, device=place))
        losses = []
        with manager.forward(0) if manager else nullcontext():
            for number in range(count):
                saved = torch.empty(numbers, device=place).fill_(number)
                losses.append((weight * saved).sum())
                del saved
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        total.backward()  # each element of the gradient is the sum over what was saved
        assert weight.grad is not None
        return accelerator.host_copy(weight.grad)

    try:
        step(None)
    except torch.OutOfMemoryError:
        pass
    else:
        raise Failed("more was allocated than the capacity", f"{CAPACITY} is not in force")
    torch.ones(1, requires_grad=True).sum().backward()  # lets go of the failed graph
    with _manager(accelerator, int(capacity * OVERFILL) + GIB // 4) as manager:
        guard = OomGuard(manager)
        manager.begin_step()
        try:
            gradient = step(manager)
        except torch.OutOfMemoryError as error:
            how = "evicting ahead" if guard.ahead else "the allocator's hook"
            raise Failed(
                f"not survived ({str(error).splitlines()[0]})",
                f"{how} does not make room on this device, or fragments cannot be used: try expandable segments",
            ) from None
        finally:
            guard.close()
        evictions, nbytes = manager.stats.evictions, manager.stats.evicted_bytes
    expected = float(sum(range(count)))
    if not bool((gradient == expected).all()):
        raise Failed("what was pushed out came back changed", "copies are not ordered as they must be: do not train")
    if not evictions:
        raise Failed("nothing was evicted", "the device held more than its capacity")
    way = "ahead of it (no allocator hook)" if guard.ahead else "caught in the allocator"
    return f"{way}, {evictions} evictions, {format_bytes(nbytes)} pushed out and back"


class _Model:
    def __init__(self, place: torch.device, width: int = 256, tokens: int = 512) -> None:
        random = torch.Generator().manual_seed(0)
        values = [torch.randn(width, width, generator=random) / width**0.5 for _ in range(LAYERS)]
        self.weights = [torch.nn.Parameter(value.to(place)) for value in values]
        self._inputs = torch.randn(tokens, width, generator=random).to(place)

    def step(self, manager: SwapManager | None) -> list[torch.Tensor]:
        for weight in self.weights:
            weight.grad = None
        with manager.forward(0) if manager else nullcontext():
            hidden = self._inputs
            for number, weight in enumerate(self.weights, 1):
                with manager.layer(number) if manager else nullcontext():
                    hidden = hidden + torch.tanh(torch.mm(hidden, weight)) * hidden
            loss = hidden.square().sum()
        del hidden
        loss.backward()
        return [loss, *(weight.grad.clone() for weight in self.weights if weight.grad is not None)]


def small_model(accelerator: Accelerator) -> str:
    """All that can be moved goes to the host and back: losses and gradients keep their bits."""
    model = _Model(_place(accelerator))
    plain = model.step(None)
    if not _same_bits(model.step(None), plain):
        raise Failed("two plain steps differ", "kernels of this device are not deterministic: bits prove nothing here")
    with _manager(accelerator, GIB // 4) as manager:
        memory = accelerator.memory()
        trace = StepTrace("selftest", memory.capacity_bytes, memory.allocated_bytes, 1e6, 1e6)
        manager.begin_step(trace=trace)
        recorded = model.step(manager)
        manager.end_step()
        plan = _swap_all(trace)
        moved = 0
        for _ in range(STEPS):
            manager.begin_step(plan)
            found = model.step(manager)
            stats, _ = manager.end_step()
            moved = stats.offloaded_bytes
            if not (_same_bits(found, plain) and _same_bits(recorded, plain)):
                raise Failed("bits differ from the plain step", "copies and compute are out of order: do not train")
            if not plan.swaps or stats.loaded_bytes != plan.swap_bytes:
                raise Failed("the plan was not carried out", "saved tensors are held by others, or in private formats")
    return f"{len(plan.swaps)} tensors, {format_bytes(moved)} to the host and back in each of {STEPS} steps, same bits"


def _swap_all(trace: StepTrace) -> Plan:
    swaps = []
    for record in trace.saved:
        if record.movable and record.sole is not None and record.first_read is not None:
            out = max(record.sole, record.last_use)
            back = max(record.first_read - 2, out + 1)
            if out < record.first_read:
                swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    return Plan(trace.model, 0, tuple(swaps))


def swapped_adam(accelerator: Accelerator) -> str:
    """AdamW with its moments in host memory, both ways, against the plain one."""
    place = _place(accelerator)
    times = []
    for mode in ("mapped", "streamed"):
        plain, swapped = _adam(place), _adam(place)
        pool = HostPool(accelerator, 64 * MIB)
        virtual = VirtualOptimizer(VirtualOptions((None,), mode), accelerator, pool)
        virtual.attach([swapped])
        for step in range(STEPS):
            _set_gradients(plain, step)
            _set_gradients(swapped, step)
            plain.step()
            start = time.monotonic()
            swapped.step()
            accelerator.synchronize()
            times.append(f"{mode} {(time.monotonic() - start) * 1e3:.1f} ms")
            for name, values in _state(plain).items():
                if not _same_bits(_state(swapped)[name], values):
                    raise Failed(
                        f"{name} differ after step {step + 1} ({mode})",
                        "kernels do not compute the same on host memory, or read it before it is written: "
                        "do not use --virtual-optimizer here",
                    )
        if not virtual.moments_bytes:
            raise Failed("no moment moved", "parameters are not seen as memory of this device")
        pool.close()
    return f"{STEPS} steps, same bits ({times[STEPS - 1]}, {times[-1]})"


def _adam(place: torch.device) -> torch.optim.AdamW:
    random = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=random) for shape in OPTIMIZER_SHAPES]
    return torch.optim.AdamW([torch.nn.Parameter(value.to(place)) for value in values], foreach=False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _set_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for parameter in _parameters(optimizer):
        parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.device)


def _state(optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    parameters = _parameters(optimizer)
    state: dict[str, list[Any]] = {"parameters": parameters}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = [optimizer.state[parameter][name] for parameter in parameters]
    return state

