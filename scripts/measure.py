"""``--measure-file``: what a run used and what it computed, as JSON, to compare two runs.

Memory is what torch.cuda says. Of a step nothing is kept but numbers, and nothing is changed. A step ends when its
compute has, which the host waits for; copies on other streams may go on, and count in the step that waits for them.
What the trainer does between two steps counts in the later one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_swap import runtime
from mindspeed_swap.core.host_pace import MOST_SLOWNESS, HostPace
from mindspeed_swap.smart_swap.outcomes import Phase

LOSS = "lm loss"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("measure")
    group.add_argument(
        "--measure-file",
        metavar="FILE",
        help="write memory, times, losses and hashes of the result there, one JSON per rank ({rank} is replaced)",
    )
    group.add_argument("--measure-no-hashes", action="store_true", help="large models take minutes to hash")
    group.add_argument(
        "--measure-until",
        nargs=2,
        type=int,
        metavar=("AFTER", "STEPS"),
        help="end the run after so many undisturbed steps, none of a search and none of the first AFTER; one rank only",
    )
    return parser


class Measurement:
    """Of one rank. Byte figures are allocated bytes, where they do not say reserved.

    ``static``: at the step's first forward; ``held``: most at the end of a microbatch's forward, less static.
    ``resident``, ``reserved``, ``pinned``: once the step is over; if they rise from step to step, something leaks.
    ``phases``: the step up to the optimizer's step (forward_backward) and that step itself. ``forward_ms`` and
    ``backward_ms``: device time, all microbatches; waits for other ranks are in neither. ``pace_ms``: what a
    loop of the host takes, before the step or after it; ``undisturbed``: no more than where nothing is in its way.
    ``settled``: it is none of the first steps, and of no search.
    """

    def __init__(self, file: str, hashes: bool = True, until: Sequence[int] = ()) -> None:
        """``until``: as of --measure-until."""
        self._unsettled, self._undisturbed_steps = until or (0, 0)
        self._file = file
        self._hashes = hashes
        self._phases: dict[str, dict[str, int]] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = {"forward_ms": [], "backward_ms": []}
        self._steps: list[dict[str, Any]] = []
        self._peak_before_steps = 0
        self._pace = HostPace()
        self._ended: float | None = None  # when the last step was over and its numbers taken
        self._static: int | None = None
        self._held: int | None = None
        self._model: list[torch.nn.Module] = []
        self._optimizer: Any = None

    # ---- wrappers
    def setup(self, function: Callable) -> Callable:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._model, self._optimizer = result[0], result[1]
            if self._optimizer is not None:
                self._optimizer.step = self.optimizer_step(self._optimizer.step)
            return result

        return setup_model_and_optimizer

    def step(self, function: Callable) -> Callable:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._peak_before_steps = max(self._peak_before_steps, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            self._static = self._held = None
            self._phases = {}
            settled = len(self._steps) >= self._unsettled and not searches()
            for spans in self._spans.values():
                spans.clear()
            start = self._ended or time.perf_counter()
            result = function(*args, **kwargs)
            torch.cuda.current_stream().synchronize()
            seconds = time.perf_counter() - start
            pace_ms = self._pace.end()
            self._end_phase("rest" if "optimizer" in self._phases else "forward_backward")
            self._steps.append(
                {
                    "peak_bytes": max(phase["allocated_bytes"] for phase in self._phases.values()),
                    "phases": self._phases,
                    **{name: sum(a.elapsed_time(b) for a, b in spans) for name, spans in self._spans.items()},
                    "static_bytes": self._static,
                    "held_bytes": self._held,
                    "seconds": seconds,
                    "pace_ms": pace_ms,
                    "settled": settled,
                    "resident_bytes": resident_bytes(),
                    "reserved_bytes": torch.cuda.memory_reserved(),
                    "pinned_bytes": pinned_bytes(),
                    "loss": float(result[0][LOSS]) if result[0] else None,  # the last pipeline stage has it
                }
            )
            if self._undisturbed_steps:
                self._judge()
                if sum(step["undisturbed"] for step in self._settled()) >= self._undisturbed_steps:
                    raise SystemExit(0)
            self._pace.begin()
            self._ended = time.perf_counter()
            return result

        return train_step

    def _settled(self) -> list[dict[str, Any]]:
        """The last steps: none of a search, or before one."""
        return list(itertools.takewhile(lambda step: step["settled"], self._steps[::-1]))

    def _judge(self) -> None:
        """How fast the host can be is known better with every step."""
        most_ms = MOST_SLOWNESS * self._pace.fast_ms if self._steps else 0.0
        for step in self._steps:
            step["undisturbed"] = step["pace_ms"] <= most_ms

    def forward(self, function: Callable) -> Callable:
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if self._static is None:
                self._static = torch.cuda.memory_allocated()
            result = self._timed("forward_ms", function, *args, **kwargs)
            held = torch.cuda.memory_allocated() - self._static
            self._held = held if self._held is None else max(held, self._held)
            return result

        return forward_step

    def backward(self, function: Callable) -> Callable:
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            return self._timed("backward_ms", function, *args, **kwargs)

        return backward_step

    def optimizer_step(self, function: Callable) -> Callable:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._end_phase("forward_backward")
            result = function(*args, **kwargs)
            self._end_phase("optimizer")
            return result

        return step

    def _end_phase(self, name: str) -> None:
        """The host is ahead of the device, but the allocator is called by the host: its peaks are of this phase."""
        self._phases[name] = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()

    def _timed(self, span: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = function(*args, **kwargs)
        end.record()
        self._spans[span].append((begin, end))
        return result

    # ---- result
    def write(self) -> None:
        """Hash what the run ended with and write the file. Hashing copies to the host, tensor by tensor."""
        self._judge()
        peak = max([self._peak_before_steps, *(step["peak_bytes"] for step in self._steps)])
        report = {
            "iterations": len(self._steps),
            "peak_bytes": peak,
            "steps": self._steps,
            "settled_steps": len(self._settled()),
            "host": host_memory(),
        }
        if self._hashes:
            report["sha256"] = {
                "parameters": sha256_of(parameters_of(self._model)),
                "gradients": sha256_of(gradients_of(self._model)),
                "optimizer": sha256_of(optimizer_state_of(self._optimizer)),
            }
        path = Path(self.path())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")

    def path(self) -> str:
        rank, world = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
        if "{rank}" in self._file:
            return self._file.replace("{rank}", rank)
        return f"{self._file}.rank{rank}" if world > 1 else self._file


def resident_bytes() -> int:
    """Of this process now, page-locked memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory() -> dict[str, int | None]:
    """Most bytes that this process had resident, pinned ones included, and what torch's own host allocator pinned."""
    try:
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    except (AttributeError, RuntimeError):  # older torch; the simulated device
        pinned = None
    return {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "torch_pinned_bytes": pinned}


def searches() -> bool:
    """The next step is one of a search for a plan."""
    search = runtime.get().smart_swap if runtime.started() else None
    return search is not None and search.phase is not Phase.STABLE


def pinned_bytes() -> int:
    """Page-locked by mindspeed_swap now, for swapped tensors."""
    return runtime.get().pool.pinned_bytes if runtime.started() else 0


def start(file: str, hashes: bool = True, until: Sequence[int] = ()) -> Measurement:
    """Wrap Megatron's step. Call once, after the arguments have been parsed, before pretrain."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    if until and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit("--measure-until: of one rank only, as others would wait for the one that ends first")
    measurement = Measurement(file, hashes, until)
    training.setup_model_and_optimizer = measurement.setup(training.setup_model_and_optimizer)
    training.train_step = measurement.step(training.train_step)
    schedules.forward_step = measurement.forward(schedules.forward_step)
    schedules.backward_step = measurement.backward(schedules.backward_step)
    return measurement


# ---- what is hashed: (name, value) in an order that does not depend on the run
Named = Iterator[tuple[str, Any]]


def parameters_of(model: list[torch.nn.Module]) -> Named:
    for index, chunk in enumerate(model):
        for name, parameter in sorted(chunk.named_parameters()):
            yield f"{index}.{name}", parameter


def gradients_of(model: list[torch.nn.Module]) -> Named:
    for name, parameter in parameters_of(model):
        gradient = getattr(parameter, "main_grad", None)
        yield name, parameter.grad if gradient is None else gradient


def optimizer_state_of(optimizer: Any) -> Named:
    """Parameters of the inner torch optimizers (the fp32 main ones) and their states."""
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = getattr(part, "optimizer", None)
        if inner is None:  # a rank that has no parameters to update
            continue
        for group_index, group in enumerate(inner.param_groups):
            for parameter_index, parameter in enumerate(group["params"]):
                name = f"{index}.{group_index}.{parameter_index}"
                yield name, parameter
                for key, value in sorted(inner.state.get(parameter, {}).items()):
                    yield f"{name}.{key}", value


def sha256_of(values: Named) -> str:
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
