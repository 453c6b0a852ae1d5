"""VirtualOptimizer: what one rank does for ``--virtual-optimizer``, for all its optimizers.

Two ways to use state in host memory, over the same arena. *mapped*: the optimizer's kernels read and write it over the
link, where it is. *streamed*: it passes through device buffers around the step, see streamed.py.
"""
from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.core.swap_manager import SwapManager
from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say
from mindspeed_swap.units import GIB, enough_gib, format_bytes
from mindspeed_swap.virtual_optimizer.amount import FLAG, VirtualOptions
from mindspeed_swap.virtual_optimizer.arena import Arena, Unit, arena_bytes, choose, moment_bytes
from mindspeed_swap.virtual_optimizer.overlap import Overlap
from mindspeed_swap.virtual_optimizer.state import MASTER, is_adam, own_steps
from mindspeed_swap.virtual_optimizer.streamed import Streamed
from mindspeed_swap.virtual_optimizer.swap_tensor import is_out_of_reach, to_host
from mindspeed_swap.virtual_optimizer.trial import PARAMETER_BYTES, step_ms

Optimizer = torch.optim.Optimizer

# What is streamed hides behind the rest of the step, what is mapped cannot: within the step it must take half the time.
# And ranks, which measure at the same time, should agree.
CLEARLY = 0.5


class VirtualOptimizer:
    def __init__(
        self,
        options: VirtualOptions,
        accelerator: Accelerator,
        pool: HostPool,
        stage: int = 0,
        stages: int = 1,
        manager: SwapManager | None = None,
    ) -> None:
        """``manager``: of saved tensors, if they move too."""
        self._amount = options.amounts[stage]
        self._place = f"stage {stage} of {stages}"
        self._master = options.master
        self._accelerator = accelerator
        self._pool = pool
        self._manager = manager
        self._mode = options.mode
        self._why = ""
        self._arenas: list[Arena] = []
        self._streamed: list[Streamed] = []
        self.overlap: Overlap | None = None  # with the step around the optimizer's, if anything is streamed
        self._shared_step_said = False

    def attach(self, optimizers: Sequence[Optimizer], masters: Iterable[torch.Tensor] = ()) -> None:
        """Move the moments of a rank's optimizers. Call when they have been built, before anything is loaded, and again
        for others: one amount holds for all.

        ``masters``: fp32 main parameters, which may move as well. Raises SettingError if what must fit does not.
        """
        for optimizer in optimizers:
            if not is_adam(optimizer):
                raise SettingError(f"{FLAG}: {type(optimizer).__name__} is no Adam; use --optimizer adam")
        if self._master and self._accelerator.has_swapped_memory:
            raise SettingError(
                f"{FLAG}-master: on {self._accelerator.name} main parameters stay on the device: Megatron copies them "
                "directly, which the driver refuses where they are on the host; leave the flag out"
            )
        masters = list(masters) if self._master else []
        amount = None if self._amount is None else self._amount - self.moments_bytes
        chosen: list[tuple[Optimizer, list[Unit]]] = []
        for optimizer in optimizers:
            units = choose(optimizer, self._accelerator, amount, masters)
            chosen.append((optimizer, units))
            amount = amount if amount is None else amount - moment_bytes(units)
        if amount is not None and not self.moments_bytes and not any(units for _, units in chosen):
            self._check_too_small(optimizers)
        chosen = self._within_budget(chosen)
        if self._mode == "auto":
            self._mode = self._better_mode([optimizer for optimizer, units in chosen if units])
        streams = (self._accelerator.new_stream(), self._accelerator.new_stream())
        for optimizer, units in chosen:
            arena = self._placed(optimizer, units)
            self._arenas.append(arena)
            self._keep_through_load(arena)
            if self._mode == "streamed" and units:
                self._streamed.append(Streamed(arena, self._accelerator, streams))
        if self._streamed:
            self.overlap = Overlap(self._accelerator, [each.pipeline for each in self._streamed], self._manager)
            for each in self._streamed:
                each.may_keep = partial(self.overlap.may_keep, each.pipeline)
                each.later_bytes = partial(self.overlap.later_bytes, each.pipeline)
                each.came_to_rest = self.overlap.came_to_rest
        self._say()

    def _better_mode(self, optimizers: Sequence[Optimizer]) -> str:
        """Streamed was the faster one for every kernel measured (GPU, 268 M parameters: 45 ms; mapped 52 ms with fused
        kernels, 123 ms with foreach), but a link that the device's caches keep coherent could be another thing."""
        best = self._accelerator.kernels_use_host_memory_best
        if best is None and optimizers:
            took = step_ms(optimizers[0], self._accelerator, self._pool)
            if took is not None:
                figures = f"streamed {took['streamed']:.1f} ms, mapped {took['mapped']:.1f} ms"
                self._why = f": a step of {format_bytes(PARAMETER_BYTES)} of parameters {figures}"
                best = took["mapped"] < CLEARLY * took["streamed"]
        return "mapped" if best else "streamed"

    def _check_too_small(self, optimizers: Sequence[Optimizer]) -> None:
        """An amount above 0 that moves nothing where there is something to move: said, never silent."""
        sizes = [unit.nbytes for optimizer in optimizers for unit in choose(optimizer, self._accelerator, None)]
        if self._amount and sizes:
            raise SettingError(
                f"{FLAG}: {self._amount / GIB:g} GB on {self._place} is less than its smallest moment "
                f"({format_bytes(min(sizes))}): nothing would move; give more, or 0 for this stage"
            )

    def _within_budget(self, chosen: list[tuple[Optimizer, list[Unit]]]) -> list[tuple[Optimizer, list[Unit]]]:
        """``all`` must fit whole; a number is trimmed to what does."""
        need, free = sum(arena_bytes(units) for _, units in chosen), self._pool.budget_bytes - self._pool.used_bytes
        if need <= free:
            return chosen
        if self._amount is None:
            raise self._no_room(need, free)
        say(
            f"virtual optimizer: {format_bytes(need)} wanted, {format_bytes(free)} of host memory free: trimmed "
            f"(--swap-host-memory {enough_gib(need + self._pool.used_bytes)} would do), {self._place}",
            every_rank=True,
        )
        free -= len(chosen) * mmap.PAGESIZE  # each arena is of whole pages
        trimmed = []
        for optimizer, units in chosen:
            fitting = []
            for unit in units:
                nbytes = arena_bytes([unit])
                if nbytes <= free:
                    fitting.append(unit)
                    free -= nbytes
            trimmed.append((optimizer, fitting))
        return trimmed

    def _no_room(self, need: int, free: int) -> SettingError:
        what, instead = f"{FLAG} all", "a number of GB instead of all"
        if self._amount is not None:
            what, instead = f"{FLAG} {self._amount / GIB:g}", "a smaller number of GB"
        enough = enough_gib(need + self._pool.used_bytes)
        return SettingError(
            f"{what}: the optimizer state of {self._place} needs {format_bytes(need)} of host memory per rank and "
            f"{format_bytes(max(0, free))} are free; give --swap-host-memory {enough} or more if the node has it, or "
            f"{instead}"
        )

    def _placed(self, optimizer: Optimizer, units: list[Unit]) -> Arena:
        try:
            return Arena(optimizer, units, self._accelerator, self._pool)
        except MemoryError:  # the system had less than the budget said
            raise self._no_room(arena_bytes(units), self._pool.budget_bytes - self._pool.used_bytes) from None

    # ---- figures
    @property
    def moments_bytes(self) -> int:
        return sum(moment_bytes(arena.units) for arena in self._arenas)

    @property
    def master_bytes(self) -> int:
        return sum(unit.nbytes for arena in self._arenas for unit in arena.units if unit.key == MASTER)

    def _say(self) -> None:
        master = f" and {format_bytes(self.master_bytes)} of main parameters" if self.master_bytes else ""
        say(
            f"virtual optimizer: {format_bytes(self.moments_bytes)} of moments{master} in host memory "
            f"({self._mode}{self._why}), {self._place}",
            every_rank=True,
        )

    def summary(self) -> dict[str, Any]:
        """For the report; sizes in bytes."""
        return {
            "mode": self._mode,
            "stage": self._place,
            "amount_bytes": self._amount,
            "moments_bytes": self.moments_bytes,
            "master_bytes": self.master_bytes,
            "came_early_bytes": sum(each.pipeline.early_bytes for each in self._streamed),
            "left_late_bytes": sum(each.pipeline.late_bytes for each in self._streamed),
        }

    def adopt(self) -> None:
        """Take state that somebody else has put into the optimizers back into host memory."""
        for arena in self._arenas:
            arena.adopt()

    def _keep_through_load(self, arena: Arena) -> None:
        """The optimizer's ``load_state_dict`` from now on loads the arena's units in place, past the device.

        On the instance, not by torch's hooks: Transformer Engine's FusedAdam makes its state again after those.
        """
        optimizer = arena.optimizer
        load: Callable = optimizer.load_state_dict

        def load_state_dict(state_dict: dict[str, Any]) -> None:
            rest, values = arena.take_out(state_dict)
            load(rest)
            arena.put_in(values)
            if own_steps(optimizer) and not self._shared_step_said:
                self._shared_step_said = True
                say("virtual optimizer: loaded parameters shared one step count; each has its own now")

        optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
        if self._accelerator.has_swapped_memory:
            self._save_from_host(optimizer)

    def _save_from_host(self, optimizer: Optimizer) -> None:
        """The optimizer's ``state_dict`` from now on holds host copies of what nobody else could copy."""
        state_dict: Callable = optimizer.state_dict

        def host_state_dict() -> dict[str, Any]:
            whole = state_dict()
            state = {
                number: {key: to_host(value) if is_out_of_reach(value) else value for key, value in entries.items()}
                for number, entries in whole["state"].items()
            }
            return {**whole, "state": state}

        optimizer.state_dict = host_state_dict  # type: ignore[method-assign]
