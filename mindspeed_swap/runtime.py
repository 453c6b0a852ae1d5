"""The one running instance of a training process: device, host pool, manager, guard and the front end that plans.

Patches call ``get()``; the core never does.
"""
from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from mindspeed_swap.core.accelerator import get_accelerator, prepare_device
from mindspeed_swap.core.host_budget import host_budget
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.link import probe_link
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import rank, say
from mindspeed_swap.options import Options
from mindspeed_swap.report.writer import ReportWriter
from mindspeed_swap.smart_swap.peers import GroupPeers, Peers
from mindspeed_swap.smart_swap.plan_files import Shape, load_plans, rank_file, save_plans, size_class
from mindspeed_swap.smart_swap.search import NoPlan, Phase, SmartSwap
from mindspeed_swap.units import format_bytes

_NOTHING = nullcontext()
# Where there was no memory to measure the link: the slowest in use (PCIe gen 3 x16), so that plans are not too bold.
UNMEASURED_BYTES_PER_MS = 12e6
# Of the host budget, that plans leave: freed blocks of other sizes leave gaps.
HOST_SLACK_SHARE = 0.05
_UNKNOWN = 0  # size class, before the first layer has run


class Runtime:
    """Built by the first call of ``get``: by then Megatron has chosen this rank's device."""

    def __init__(self, options: Options, host_budget_bytes: int) -> None:
        self._options = options
        self._accelerator = get_accelerator()
        self.pool = HostPool(self._accelerator, host_budget_bytes)
        self.manager = SwapManager(self._accelerator, self.pool)
        self._guard = OomGuard(self.manager, hook=os.environ.get("MINDSPEED_SWAP_OOM_HOOK", "1") != "0")
        link = probe_link(self._accelerator, self.pool)
        self._d2h = link.d2h_bytes_per_ms if link else UNMEASURED_BYTES_PER_MS
        self._h2d = link.h2d_bytes_per_ms if link else UNMEASURED_BYTES_PER_MS
        self._peers: Peers | None = None
        self._plans = _loaded_plans(options)
        self._shape: Shape = (0, _UNKNOWN)
        self.smart_swap = SmartSwap(self._accelerator.memory().capacity_bytes)
        self._searches: dict[Shape, SmartSwap] = {}  # a plan fits only the same number and size of microbatches
        self._sized = False  # this step's size class is known
        self._report = ReportWriter(options.report_dir, rank(), options.layout) if options.report_dir else None
        self._models: list[Any] = []
        self._optimizer: Any = None
        self._microbatches: dict[int, int] = {}  # chunk -> forwards seen in this step
        self.in_step = False
        self._in_optimizer = False

    # ---- called by the patches
    @contextmanager
    def step(self, models: list[Any], optimizer: Any, microbatches: int, peers: Any = None) -> Iterator[None]:
        """One training step. What it did decides how the next one of the same shape runs.

        ``peers``: process group of the ranks that run the same layers."""
        if self._peers is None:
            several = peers is not None and torch.distributed.get_world_size(peers) > 1
            self._peers = GroupPeers(peers, self._accelerator) if several else Peers()
        self._models, self._optimizer = models, optimizer
        self._sized = False
        # Until its first layer runs, a step is taken to be like the one before.
        self._choose_search((microbatches, self._shape[1]))
        self._microbatches.clear()
        self._in_optimizer = False
        self.manager.movable.keep_on_device(_static_tensors(models))
        self._begin(self.manager.begin_step)
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
        _end_if_terminated()
        stats, trace = self.manager.end_step()
        try:
            changed = self.smart_swap.after_step(stats, trace)
        except NoPlan as error:
            raise SettingError(
                f"--smart-swap: {error}; give the device (or the target) more room, make a microbatch smaller or "
                "recompute a part"
            ) from None
        if changed:
            self._save_plans()
            # The trace is large: not while tries still follow one another.
            self.report(with_trace=self.smart_swap.phase is Phase.STABLE)

    def microbatch(self, model: Any) -> Any:
        """Forward of one microbatch. Outside a training step (evaluation) and without gradients it is nothing."""
        _end_if_terminated()
        if not self.in_step or not torch.is_grad_enabled():
            return _NOTHING
        chunk = next((i for i, candidate in enumerate(self._models) if candidate is model), 0)
        number = self._microbatches.get(chunk, 0)
        self._microbatches[chunk] = number + 1
        return self.manager.forward(number, chunk)

    def layer(self, number: int, entering: Any = None) -> Any:
        """``entering``: what the layer gets. Of the first one in a step it tells the size of the microbatches."""
        _end_if_terminated()
        if not self.in_step:
            return _NOTHING
        if not self._sized and isinstance(entering, torch.Tensor):
            self._sized = True
            self._meet_size(size_class(entering.numel() * entering.itemsize))
        return self.manager.layer(number)

    def recomputed(self) -> Any:
        """A checkpointed part of the model: it saves its inputs after it has run."""
        return self.manager.recomputed() if self.in_step else _NOTHING

    def enter_optimizer(self) -> None:
        _end_if_terminated()
        if self.in_step and not self._in_optimizer:  # chained optimizers step inside one another
            self._in_optimizer = True
            self.manager.enter_optimizer()

    def will_vanish(self, tensor: torch.Tensor) -> None:
        self.manager.movable.will_vanish(tensor)

    # ---- the rest
    def _begin(self, begin: Any) -> None:
        order = self.smart_swap.next_step()
        trace = self._new_trace(self._optimizer) if order.record else None
        if order.plan is not None:
            self.pool.reserve(order.host_bytes)
        begin(order.plan, trace=trace, read_order=order.read_order)

    def _meet_size(self, number: int) -> None:
        """The first layer of the step runs. If it is of another size than the last step's, so is its plan."""
        microbatches, before = self._shape
        if number == before:
            return
        if before == _UNKNOWN and self._shape in self._searches:  # the very first step: of this size, then
            search = self._searches.pop(self._shape)
            if (microbatches, number) not in self._plans:
                self._shape = microbatches, number
                self._searches[self._shape] = search
                search.name = _name(self._shape)
                return
        self._choose_search((microbatches, number))
        self._begin(self.manager.change_plan)

    def _choose_search(self, shape: Shape) -> None:
        """Batch size ramp-up and other sequence lengths change what a step is: each shape has plans of its own."""
        search = self._searches.get(shape)
        if search is None:
            if self._searches:
                say(
                    f"smart-swap: from step {self.smart_swap.steps + 1} on {shape[0]} microbatches of size class "
                    f"{shape[1]}: planned anew"
                )
            search = self._searches[shape] = self._new_search(shape)
        search.steps, self._shape, self.smart_swap = self.smart_swap.steps, shape, search
        host = self.pool.budget_bytes - self.pool.used_bytes
        search.host_bytes = max(0, int(host * (1 - HOST_SLACK_SHARE)))

    def _new_search(self, shape: Shape) -> SmartSwap:
        assert self._peers is not None
        given = {
            "capacity_bytes": self._accelerator.memory().capacity_bytes,
            "policy": self._options.policy,
            "peers": self._peers,
            "name": _name(shape),
            "tell": self._tell,
        }
        plan = self._plans.get(shape)
        if plan is None:
            if self._plans and shape[1] != _UNKNOWN:
                self._tell(f"smart-swap: no plan for {shape[0]} microbatches of size class {shape[1]} in the file")
            return SmartSwap(**given)
        peak = max(plan.prediction.peak_bytes.values()) if plan.prediction else 0
        if peak > given["capacity_bytes"]:
            raise SettingError(
                f"--swap-plan {self._options.plan_file}: its step needs {format_bytes(peak)} and this device gives "
                f"{format_bytes(given['capacity_bytes'])}: search again without --swap-plan"
            )
        self._tell(f"smart-swap: plan of the file: {format_bytes(plan.swap_bytes)} in {len(plan.swaps)} tensors")
        return SmartSwap.from_plan(plan, **given)

    def _tell(self, message: str) -> None:
        """One rank speaks for its peers; where pipeline stages differ, each stage has one that does."""
        assert self._peers is not None
        if self._peers.count == int(os.environ.get("WORLD_SIZE", "1")):
            say(message)
        elif self._peers.leader:
            say(message, every_rank=True)

    def _save_plans(self) -> None:
        if not self._options.plan_save or self.smart_swap.phase is not Phase.STABLE:
            return
        path = rank_file(self._options.plan_save, rank(), int(os.environ.get("WORLD_SIZE", "1")))
        stable = {
            shape: search.plan
            for shape, search in self._searches.items()
            if search.phase is Phase.STABLE and search.plan is not None
        }
        try:
            save_plans(path, rank(), stable)
        except OSError as error:
            say(f"--swap-plan-save: plan not written, training goes on: {error}", every_rank=True)

    def _new_trace(self, optimizer: Any) -> StepTrace:
        memory = self._accelerator.memory()
        return StepTrace(
            model=self._options.model,
            capacity_bytes=memory.capacity_bytes,
            static_bytes=memory.allocated_bytes,
            d2h_bytes_per_ms=self._d2h,
            h2d_bytes_per_ms=self._h2d,
            has_optimizer_state=_has_state(optimizer),
        )

    def report(self, *, with_trace: bool) -> None:
        if self._report is not None and self.smart_swap.steps:
            self._report.write_summary(self.smart_swap, self.pool, self._accelerator.name)
            if with_trace:
                self._report.write_trace(self.smart_swap.shown)

    def close(self) -> None:
        """Give everything back: threads, page-locked memory, the allocator's hook. Idempotent."""
        self.report(with_trace=True)
        self._guard.close()
        self.manager.close()
        self.pool.close()
        self._accelerator.close()


def _name(shape: Shape) -> int:
    """A number that peers can compare."""
    return shape[0] * 1000 + shape[1]


def _loaded_plans(options: Options) -> dict[Shape, Plan]:
    if not options.plan_file:
        return {}
    path = rank_file(options.plan_file, rank(), int(os.environ.get("WORLD_SIZE", "1")))
    return load_plans(path, rank(), options.model)


def _static_tensors(models: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Parameters, their gradient buffers and the model's buffers: storages that outlive every step."""
    for model in models:
        for parameter in model.parameters():
            yield parameter
            for name in ("main_grad", "grad"):
                gradient = getattr(parameter, name, None)
                if isinstance(gradient, torch.Tensor):
                    yield gradient
        yield from (buffer for _, buffer in model.named_buffers())  # DDP has a list in the place of buffers()


def _has_state(optimizer: Any) -> bool:
    """True if every inner optimizer already has its state: later steps use the same memory again."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    inner = [getattr(part, "optimizer", None) for part in parts]
    return all(bool(getattr(each, "state", None)) for each in inner if each is not None)


_options: Options | None = None
_host_budget_bytes = 0
_runtime: Runtime | None = None
_terminated_by = 0  # signal number


def started() -> bool:
    return _options is not None


def start(options: Options) -> None:
    """Check what can be checked before anything is allocated, and make sure that all is given back at the end.

    Raises SettingError.
    """
    global _options, _host_budget_bytes
    _loaded_plans(options)
    prepare_device(options.names)
    budget = host_budget(options.host_memory_gib, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    say(budget.line)
    _options, _host_budget_bytes = options, budget.per_rank_bytes
    atexit.register(stop)
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # somebody else's handler stays
        signal.signal(signal.SIGTERM, _on_terminate)


def get() -> Runtime:
    """The runtime; the first call builds it."""
    global _runtime
    if _runtime is None:
        assert _options is not None, "patches are installed only after start()"
        _runtime = Runtime(_options, _host_budget_bytes)
    return _runtime


def _on_terminate(number: int, frame: Any) -> None:
    """SIGTERM would end the process without running ``atexit``: page-locked memory must be given back first.

    Raising here would be lost if the signal came during a finaliser or an allocator's callback, so inside a step the
    next border of the step raises. A second signal has the default action.
    """
    del frame
    global _terminated_by
    signal.signal(number, signal.SIG_DFL)
    _terminated_by = number
    if _runtime is None or not _runtime.in_step:
        _end_if_terminated()


def _end_if_terminated() -> None:
    if _terminated_by:
        raise SystemExit(128 + _terminated_by)


def stop() -> None:
    """Give everything back. Idempotent."""
    global _options, _runtime
    runtime, _runtime, _options = _runtime, None, None
    if signal.getsignal(signal.SIGTERM) is _on_terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit.unregister(stop)
    if runtime is not None:
        runtime.close()
