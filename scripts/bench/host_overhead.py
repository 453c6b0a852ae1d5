"""Host time of our saved-tensor hooks, per tensor kept and per tensor swapped, and of a step with nothing to swap.

    python scripts/bench/host_overhead.py --out runs/bench [--device sim] [--tensors 1000]

A chain of matrix products, each of which saves one tensor, in layers of ten. Pack and unpack are timed around the
calls that autograd makes, whatever they do; parameters that pass through do not count.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from machine import describe, versions  # noqa: E402
from results import VERSION  # noqa: E402
from workloads import GPU, SIM  # noqa: E402

LAYER = 10  # products in one
STEPS = 10
# Columns and rows of the chain for host times: a product and a copy of its input must take less than the host does, or
# the device's queues fill up and the host waits for it. And of the chain for the step time: there each product must
# take longer than its dispatch.
SIZES = {GPU: ((1024, 128), (4096, 2048)), SIM: ((128, 128), (128, 256))}


class Timers:
    """What autograd's calls of the hooks took, in microseconds. Installed in place of torch's class of hooks."""

    def __init__(self) -> None:
        self.pack: list[float] = []
        self.unpack: list[float] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        original = torch.autograd.graph.saved_tensors_hooks

        def hooks(pack: Any, unpack: Any) -> Any:
            def timed_pack(tensor: torch.Tensor) -> Any:
                start = time.perf_counter_ns()
                packed = pack(tensor)
                end = time.perf_counter_ns()
                counts = not isinstance(tensor, torch.nn.Parameter)
                if counts:
                    self.pack.append((end - start) / 1000)
                return counts, packed

            def timed_unpack(packed: Any) -> torch.Tensor:
                start = time.perf_counter_ns()
                tensor = unpack(packed[1])
                end = time.perf_counter_ns()
                if packed[0]:
                    self.unpack.append((end - start) / 1000)
                return tensor

            return original(timed_pack, timed_unpack)

        torch.autograd.graph.saved_tensors_hooks = hooks
        try:
            yield
        finally:
            torch.autograd.graph.saved_tensors_hooks = original

    def both(self) -> float:
        return statistics.median(self.pack) + statistics.median(self.unpack)


class Chain:
    def __init__(self, columns: int, rows: int, tensors: int) -> None:
        like = {"dtype": torch.bfloat16, "device": "cuda"}
        self.weight = torch.nn.Parameter(torch.randn(columns, columns, **like) / columns**0.5)
        self.start = torch.randn(rows, columns, **like)
        self.layers = tensors // LAYER

    def step(self, manager: Any = None, plan: Any = None, trace: Any = None) -> tuple[float, Any, Any]:
        """(seconds, statistics and trace of the manager)"""
        self.weight.grad = None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if manager is not None:
            manager.begin_step(plan, trace=trace, light=True)  # as in training
        with manager.forward(0) if manager is not None else nullcontext():
            value = self.start
            for number in range(1, self.layers + 1):
                with manager.layer(number) if manager is not None else nullcontext():
                    for _ in range(LAYER):
                        value = value @ self.weight
            loss = value.float().sum()
            del value
        loss.backward()
        stats, recorded = manager.end_step() if manager is not None else (None, None)
        torch.cuda.synchronize()
        return time.perf_counter() - begin, stats, recorded


def swap_all(trace: Any) -> Any:
    """Every tensor goes out when it is saved and comes back a layer before it is read."""
    from mindspeed_swap.core.plan import Plan, Swap

    swaps = []
    for record in trace.saved:
        if record.movable and record.sole is not None and record.first_read is not None:
            out = max(record.sole, record.last_use) + LAYER
            back = record.first_read - LAYER
            if out < back:
                swaps.append(Swap(record.key, record.nbytes, trace.points[out].position, trace.points[back].position))
    return Plan(trace.model, 0, tuple(swaps))


def measure(device: str, tensors: int) -> dict[str, Any]:
    from mindspeed_swap.core.accelerator import get_accelerator
    from mindspeed_swap.core.host_pool import HostPool
    from mindspeed_swap.core.swap_manager import SwapManager
    from mindspeed_swap.core.trace import StepTrace

    (columns, rows), size_of_step = SIZES[device]
    accelerator = get_accelerator()
    pool = HostPool(accelerator, 2 * tensors * rows * columns * 2)
    manager = SwapManager(accelerator, pool, min_bytes=1024)
    chain = Chain(columns, rows, tensors)

    def timed(plan: Any) -> tuple[Timers, Any]:
        chain.step(manager, plan)
        timers = Timers()
        with timers.installed():
            for _ in range(STEPS):
                _, stats, _ = chain.step(manager, plan)
        return timers, stats

    kept, _ = timed(None)
    memory = accelerator.memory()
    trace = chain.step(manager, trace=StepTrace("chain", memory.capacity_bytes, memory.allocated_bytes, 1e6, 1e6))[2]
    plan = swap_all(trace)
    swapped, stats = timed(plan)
    long = Chain(*size_of_step, tensors)
    seconds: dict[Any, list[float]] = {None: [], manager: []}
    for number in range(2 * STEPS + 2):  # in turn, so that a slow moment meets both, and each as often after the other
        for which in (None, manager) if number % 2 else (manager, None):
            seconds[which].append(long.step(which)[0])
    plain_ms, managed_ms = (1000 * statistics.median(seconds[which][2:]) for which in (None, manager))
    manager.close()
    return {
        "tensors": len(kept.pack) // STEPS, "swapped_tensors": len(plan.swaps), "moved_bytes": stats.offloaded_bytes,
        "kept_us": kept.both(), "swapped_us": swapped.both(),
        "pack_us": {"kept": statistics.median(kept.pack), "swapped": statistics.median(swapped.pack)},
        "unpack_us": {"kept": statistics.median(kept.unpack), "swapped": statistics.median(swapped.unpack)},
        "plain_step_ms": plain_ms, "step_ms": managed_ms,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=(GPU, SIM), default=GPU)
    parser.add_argument("--tensors", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.device == SIM:
        os.environ["MINDSPEED_SWAP_DEVICE"] = "sim"
        import mindspeed_swap.megatron_adaptor  # noqa: F401  redirects torch.cuda
    found = measure(args.device, args.tensors)
    args.out.mkdir(parents=True, exist_ok=True)
    data = {"version": VERSION, "machine": describe(args.device), "versions": versions(), "points": []}
    data |= {"command": f"scripts/bench/host_overhead.py --tensors {args.tensors}", "host_overhead": found}
    (args.out / f"{args.device}-host_overhead.json").write_text(json.dumps(data, indent=1) + "\n")
    ratio = found["step_ms"] / found["plain_step_ms"] - 1
    print(f"{found['tensors']} tensors a step; pack + unpack: kept {found['kept_us']:.1f} us, swapped "
          f"{found['swapped_us']:.1f} us ({found['swapped_tensors']}); nothing to swap: {ratio:+.2%} step time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
