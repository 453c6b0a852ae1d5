"""The one running instance of a training process: device, host pool, manager, guard and the front end that plans.

Patches call ``get()``; the core never does.
"""
from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from mindspeed_swap import hooks, termination
from mindspeed_swap.core.accelerator import get_accelerator, prepare_device
from mindspeed_swap.core.accelerator.cpu_binding import bind_cpu
from mindspeed_swap.core.accelerator.watch import OOM_HOOK, may_hook
from mindspeed_swap.core.host_budget import host_budget
from mindspeed_swap.core.host_pace import HostPace
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.link import COPY_OVERHEAD_MS, Link, probe_link, warn_if_slow
from mindspeed_swap.core.oom_guard import OomGuard
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.errors import SettingError
from mindspeed_swap.files import check_directory
from mindspeed_swap.fine_grained.front_end import FineGrained
from mindspeed_swap.garbage import collected_young, uncollected
from mindspeed_swap.kept_plans import KeptPlans, check_places
from mindspeed_swap.log import rank, say
from mindspeed_swap.model_state import has_state, owned_by, with_gradients
from mindspeed_swap.options import Options
from mindspeed_swap.report.writer import ReportWriter
from mindspeed_swap.smart_swap.group_peers import GroupPeers
from mindspeed_swap.smart_swap.outcomes import NoPlan, Phase
from mindspeed_swap.smart_swap.search import SmartSwap
from mindspeed_swap.smart_swap.shapes import Shapes
from mindspeed_swap.units import format_bytes
from mindspeed_swap.virtual_optimizer.overlap import Overlap
from mindspeed_swap.virtual_optimizer.virtual_optimizer import VirtualOptimizer

_NOTHING = nullcontext()
# Where there was no memory to measure the link: the slowest in use (PCIe gen 3 x16), so that plans are not too bold.
UNMEASURED_BYTES_PER_MS = 12e6
_MORE_ROOM = "give the device (or the target) more room, make a microbatch smaller or recompute a part"


class Runtime:
    """Built by the first call of ``get``: by then Megatron has chosen this rank's device."""

    # Of the features that plan. Without one nothing patched reaches them.
    manager: SwapManager
    shapes: Shapes | None = None
    fine: FineGrained | None = None
    _kept: KeptPlans

    def __init__(self, options: Options, host_budget_bytes: int) -> None:
        self._options = options
        self._accelerator = get_accelerator()
        self.pool = HostPool(self._accelerator, host_budget_bytes)
        self._report = ReportWriter(options.report_dir, rank(), options.layout) if options.report_dir else None
        self._virtual: VirtualOptimizer | None = None
        self._overlap: Overlap | None = None  # of the virtual optimizer, where an allocation that fails is told of
        self._in_optimizer = False
        self.in_step = False
        self.names_modules = options.names_modules
        if options.plans:
            self._prepare_plans()

    def _prepare_plans(self) -> None:
        self.manager = SwapManager(self._accelerator, self.pool)
        hooks.connect(self.manager)
        self._guard = OomGuard(self.manager, hook=may_hook())
        link = probe_link(self._accelerator, self.pool)
        if link is not None:
            warn_if_slow(link, self._accelerator.link_limit_bytes_per_ms())
        self._link = link or Link(*[UNMEASURED_BYTES_PER_MS] * 4)
        capacity = self._accelerator.memory().capacity_bytes
        if self._options.swap_config is not None:
            self.fine = FineGrained(self._options.swap_config, rank())
        self._kept = KeptPlans(self._options, self._accelerator.name, capacity)
        settles = self._accelerator.name != "sim"
        pipelined = (self._options.layout.get("pipeline_model_parallel_size") or 1) > 1
        how = {"failed": self._kept.failed, "settles": settles, "pipelined": pipelined}
        search = self.fine.new if self.fine else partial(SmartSwap, **how)
        self.shapes = Shapes(capacity, self._options.policy, self._kept.plans, search)
        self._models: list[Any] = []
        self._owned: list[torch.Tensor] = []
        self._optimizer: Any = None
        self._reserved: Plan | None = None  # the last plan that host memory was page-locked for
        self._pace = HostPace()
        self._microbatches: dict[int, int] = {}  # chunk -> forwards seen in this step
        if self._options.adaptive and self._accelerator.name != "sim":
            index = int(os.environ.get("LOCAL_RANK", "0"))
            say(f"{self._options.policy.feature}: {bind_cpu(self._accelerator.name, index)}", every_rank=True)

    @property
    def smart_swap(self) -> SmartSwap | None:
        return self.shapes.current if self.shapes else None

    # ---- called by the patches
    def meet_peers(self, group: Any, entangled: bool) -> None:
        """The process group of the ranks that run the same layers, and whether these talk within layers. Before the
        first step."""
        if self.shapes is not None and torch.distributed.get_world_size(group) > 1:
            self._kept.plans = self.shapes.follow(GroupPeers(group, self._accelerator, entangled))

    @contextmanager
    def step(self, models: list[Any], optimizer: Any, microbatches: int) -> Iterator[None]:
        """One training step."""
        self._in_optimizer = False
        with self._planned(models, optimizer, microbatches) if self.shapes else _NOTHING:
            self.in_step = True
            try:
                with self._overlap.step(self._may_overlap()) if self._overlap else _NOTHING:
                    yield
            finally:
                self.in_step = False
            termination.end_if_terminated()

    def _may_overlap(self) -> bool:
        """Not while steps are recorded: the plans would count on memory in which state is on its way."""
        return self.shapes is None or (self.manager.recorder is None and not self.shapes.vary)

    @contextmanager
    def _planned(self, models: list[Any], optimizer: Any, microbatches: int) -> Iterator[None]:
        """What the step did decides how the next one of the same shape runs."""
        assert self.shapes is not None
        self.shapes.begin(microbatches, self._guard.begin_step(), self.pool.budget_bytes - self.pool.used_bytes)
        if self._models != models or self.shapes.current.phase is not Phase.STABLE:
            self._owned = list(owned_by(models))  # walking through modules takes as long as starting a dozen kernels
            self._keep_owned()
        self._models, self._optimizer = models, optimizer
        self._microbatches.clear()
        if self.shapes.vary or self.shapes.current.times:
            self._pace.begin()
        if self.shapes.vary:
            self.manager.begin_step()
        else:
            self._order(self.manager.begin_step)
        try:
            with uncollected() if self.manager.recorder else collected_young():
                yield
        except torch.OutOfMemoryError:
            say(self._why_out_of_memory(), every_rank=True)
            raise
        search = self.shapes.current
        search.capacity_bytes = self._accelerator.memory().capacity_bytes  # the room may have been taken
        try:
            stats, trace = self.manager.end_step()
            changed = search.after_step(stats, trace, *self._measured() if search.times else ())
        except NoPlan as error:
            raise SettingError(f"{self._options.policy.flag}: {error}; {_MORE_ROOM}") from None
        self._keep_owned()  # now, while the device has the optimizer's step to do: it waits for what is done before one
        if changed:
            # The trace is large: not while tries still follow one another.
            self.report(with_trace=search.phase is Phase.STABLE)
            self._kept.save(self.shapes)

    def _keep_owned(self) -> None:
        self.manager.movable.keep_on_device(with_gradients(self._owned))

    def _measured(self) -> tuple[float, int, float]:
        """How long the step took, the most memory it needed, and how slow the host was. (What overlaps asks for peaks
        of its own.)"""
        peak_bytes = 0 if self._overlap else self._accelerator.take_interval().peak_bytes
        return self.manager.clock.step_ms(), peak_bytes, self._pace.slowness()

    def _order(self, begin: Any) -> None:
        assert self.shapes is not None
        order = self.shapes.current.next_step()
        if order.plan is not None and order.plan is not self._reserved:
            self._reserved = order.plan
            blocks = [swap.nbytes for swap in order.plan.swaps]
            self.pool.reserve(order.host_bytes + self.pool.used_bytes, blocks)
        if order.record and self._overlap:
            self._overlap.settle()  # what is on its way out is not what the step begins with
        if self.shapes.current.times and not self._overlap:
            self._accelerator.take_interval()  # what was between steps is no part of this one
        trace = self._new_trace(self._optimizer) if order.record else None
        begin(order.plan, trace=trace, read_order=order.read_order, light=True)

    def microbatch(self, model: Any) -> Any:
        """Forward of one microbatch. Outside a training step (evaluation) and without gradients it is nothing."""
        termination.end_if_terminated()
        if not self.in_step or not torch.is_grad_enabled():
            if self._overlap and not self.in_step:
                self._overlap.settle()  # an evaluation: its memory is not that of a training step
            return _NOTHING
        if self._overlap is not None:
            return self._overlapped_forward(model)
        return self._planned_forward(model) if self.shapes else _NOTHING

    @contextmanager
    def _overlapped_forward(self, model: Any) -> Iterator[None]:
        assert self._overlap is not None
        with self._overlap.forward(), self._planned_forward(model) if self.shapes else _NOTHING:
            yield

    def _planned_forward(self, model: Any) -> Any:
        chunk = 0 if len(self._models) == 1 else self._chunk(model)
        number = self._microbatches.get(chunk, 0)
        self._microbatches[chunk] = number + 1
        return self.manager.forward(number, chunk)

    def _chunk(self, model: Any) -> int:
        for number, candidate in enumerate(self._models):
            if candidate is model:
                return number
        raise SettingError(
            f"{self._options.names}: forward_step got a model that train_step was not given: positions of its model "
            "chunks cannot be told apart"
        )

    def layer(self, number: int, entering: Any = None) -> Any:
        """``entering``: what the layer gets. Of the first one in a step it tells the size of the microbatches."""
        termination.end_if_terminated()
        if not self.in_step:
            return _NOTHING
        if self._overlap and isinstance(entering, torch.Tensor):
            self._overlap.layer(entering)
        if not self.shapes:
            return _NOTHING
        if isinstance(entering, torch.Tensor) and self.shapes.meet(entering.numel() * entering.itemsize):
            self._order(self.manager.change_plan)
        return self.manager.layer(number)

    def call(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **how: bool
    ) -> Any:
        """A module that may be recomputed. ``how``: as the manager's."""
        if not (self.in_step and self.names_modules):
            return function(*args, **kwargs)
        return self.manager.calls.call(name, function, args, kwargs, **how)

    def kept(self, function: Callable[[], Any]) -> Any:
        """As of the manager's calls."""
        return self.manager.calls.kept(function) if self.in_step and self.names_modules else function()

    def recomputed(self) -> Any:
        """A checkpointed part of the model: it saves its inputs after it has run."""
        return self.manager.recomputed() if self.in_step else _NOTHING

    def enter_optimizer(self) -> None:
        termination.end_if_terminated()
        if self.in_step and not self._in_optimizer:  # chained optimizers step inside one another
            self._in_optimizer = True
            if self.shapes:
                self.manager.enter_optimizer()
                self._guard.enter_optimizer()
            if self._overlap:
                self._overlap.optimizer()

    def read_small(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See the accelerator's."""
        return self._accelerator.read_small(tensor)

    def will_vanish(self, tensor: torch.Tensor) -> None:
        self.manager.movable.will_vanish(tensor)

    def virtual_optimizer(self, stage: int, stages: int) -> VirtualOptimizer:
        """The one of this rank, which is in pipeline stage ``stage``."""
        if self._virtual is None:
            assert self._options.virtual_optimizer is not None
            self._virtual = VirtualOptimizer(
                self._options.virtual_optimizer, self._accelerator, self.pool, stage, stages,
                self.manager if self._options.plans else None,
            )  # fmt: skip
        return self._virtual

    def install_overlap(self, overlap: Overlap | None) -> None:
        """The virtual optimizer has found its place. Only where it can be told to give memory up do its copies overlap
        with the rest of the step."""
        if overlap is None:
            return
        if self.shapes:
            self._guard.spare = overlap.give_up
            told = not self._guard.ahead
        else:
            told = may_hook() and self._accelerator.on_pressure(lambda nbytes, attempt: overlap.give_up() > 0)
        self._overlap = overlap if told else None

    # ---- the rest
    def _why_out_of_memory(self) -> str:
        """The allocator's message knows nothing of what was tried, nor of our settings."""
        assert self.shapes is not None
        search, stats = self.shapes.current, self.manager.stats
        feature, pushed = self._options.policy.feature, format_bytes(stats.evicted_bytes)
        text = f"{feature}: out of memory in step {search.steps + 1}, {pushed} pushed out; "
        if stats.host_full:
            return text + f"host memory ({format_bytes(self.pool.budget_bytes)}) is used up: raise --swap-host-memory"
        if self._guard.ahead:
            text += f"without the allocator's hook (unset {OOM_HOOK}, or see above why there is none) room is made "
            return text + f"only ahead of need: {_MORE_ROOM}"
        floor = format_bytes(search.floor.bytes) if search.floor else "known only after two steps that fit"
        return text + f"the rest cannot move (floor: {floor}): {_MORE_ROOM}"

    def _new_trace(self, optimizer: Any) -> StepTrace:
        memory = self._accelerator.memory()
        return StepTrace(
            model=self._options.model,
            capacity_bytes=memory.capacity_bytes,
            static_bytes=memory.allocated_bytes,
            copy_overhead_ms=COPY_OVERHEAD_MS,
            **asdict(self._link),
            has_optimizer_state=has_state(optimizer),
        )

    def report(self, *, with_trace: bool) -> None:
        search, virtual = self.smart_swap, self._virtual
        if self._report is None or not (virtual or (search and search.steps)):
            return
        self._report.write_summary(search, self.pool, self._accelerator.name, virtual.summary() if virtual else None)
        if with_trace and search:
            self._report.write_trace(search.shown)

    def close(self) -> None:
        """Give everything back: threads, page-locked memory, the allocator's hook. Idempotent."""
        self.report(with_trace=True)
        if self.shapes:
            self._kept.save_unfinished(self.shapes)
        if self.fine:
            self.fine.close()
        if self.smart_swap:
            hooks.disconnect()
            self._guard.close()
            self.manager.close()
        self.pool.close()
        self._accelerator.close()


_options: Options | None = None
_host_budget_bytes = 0
_runtime: Runtime | None = None


def started() -> bool:
    return _options is not None


def start(options: Options) -> None:
    """Check what can be checked before anything is allocated, and make sure that all is given back at the end.

    Raises SettingError.
    """
    global _options, _host_budget_bytes
    check_places(options)  # what is wrong with a file is said before anything is built
    prepare_device(options.names)
    if options.report_dir:
        check_directory("--swap-report-dir", options.report_dir)
    budget = host_budget(options.host_memory_gib, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    say(budget.line)
    _options, _host_budget_bytes = options, budget.per_rank_bytes
    atexit.register(stop)
    termination.install(lambda: _runtime is not None and _runtime.in_step)


def get() -> Runtime:
    """The runtime; the first call builds it."""
    global _runtime
    if _runtime is None:
        assert _options is not None, "patches are installed only after start()"
        _runtime = Runtime(_options, _host_budget_bytes)
    return _runtime


def call(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **how: bool
) -> Any:
    """As the method; without a running instance it is the plain call."""
    return function(*args, **kwargs) if _runtime is None else _runtime.call(name, function, args, kwargs, **how)


def stop() -> None:
    """Give everything back. Idempotent."""
    global _options, _runtime
    runtime, _runtime, _options = _runtime, None, None
    termination.uninstall()
    atexit.unregister(stop)
    if runtime is not None:
        runtime.close()
