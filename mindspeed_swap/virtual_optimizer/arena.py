"""Arena: the moments of one optimizer that live in host memory, in one page-locked block, from the start to the end.

A *unit* is one moment (or main parameter) of one parameter. At rest ``optimizer.state`` holds the unit's tensor over
host memory, so that saving, loading and printing find it where they look. If somebody puts another tensor in its place
(a load, the optimizer's own initialisation), ``adopt`` copies that into host memory and puts ours back.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_swap.core.accelerator.base import Accelerator
from mindspeed_swap.core.host_pool import ALIGNMENT, HostBlock, HostPool
from mindspeed_swap.virtual_optimizer.state import MASTER, complete_state, moment_dtype, moment_keys, shaped_like
from mindspeed_swap.virtual_optimizer.swap_tensor import mark_swap_tensor

Optimizer = torch.optim.Optimizer


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False, slots=True)
class Unit:
    """One tensor of the optimizer's state. ``start``: first byte in the arena; ``resting``: it, over host memory."""

    parameter: torch.Tensor
    key: str  # of optimizer.state, or MASTER
    dtype: torch.dtype
    start: int = 0
    resting: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.dtype.itemsize


def choose(
    optimizer: Optimizer, accelerator: Accelerator, amount: int | None, masters: Iterable[torch.Tensor] = ()
) -> list[Unit]:
    """The units to move: in the optimizer's order each moment that still fits into ``amount`` bytes (None: all).

    So less of ``amount`` is left than any moment that was not taken has. ``masters``: main parameters that may move;
    those do whose moments all do, and do not count. Empty shards and parameters elsewhere than on the device stay.
    """
    may_move = {id(master) for master in masters}
    units: list[Unit] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.numel() == 0 or not accelerator.owns(parameter):
                continue
            dtype = moment_dtype(optimizer, parameter)
            all_taken = True
            for key in moment_keys(group):
                unit = Unit(parameter, key, dtype)
                if amount is not None and unit.nbytes > amount:
                    all_taken = False
                    continue
                amount = amount if amount is None else amount - unit.nbytes
                units.append(unit)
            if all_taken and id(parameter) in may_move:
                units.append(Unit(parameter, MASTER, parameter.dtype))
    return units


def moment_bytes(units: Iterable[Unit]) -> int:
    return sum(unit.nbytes for unit in units if unit.key != MASTER)


def arena_bytes(units: Iterable[Unit]) -> int:
    return sum(aligned(unit.nbytes) for unit in units)


class Arena:
    """The units of one optimizer, placed. Makes the optimizer's state complete: what does not move is on the device.

    Raises MemoryError if the pool cannot give ``arena_bytes(units)``.
    """

    def __init__(self, optimizer: Optimizer, units: list[Unit], accelerator: Accelerator, pool: HostPool) -> None:
        self.optimizer = optimizer
        self.units = units
        self.before_use: Callable[[], None] = lambda: None  # of the host memory, from outside the step
        self.nbytes = arena_bytes(units)
        self._accelerator = accelerator
        self._block: HostBlock | None = None
        # Flat uint8, what ``Accelerator.copy`` takes as host memory; kept until the process ends.
        self.host_bytes, map_host = self._new_memory(pool)
        at = 0
        for unit in units:
            unit.start, host = at, self.host_bytes[at : at + unit.nbytes]
            at += aligned(unit.nbytes)
            unit.resting = shaped_like(map_host(host).view(unit.dtype), unit.parameter)
            mark_swap_tensor(unit.resting, accelerator, self.come_to_rest)
            host.zero_()  # by the host, if it can: nothing on the device has seen this memory yet
        self._by_parameter: dict[torch.Tensor, dict[str, Unit]] = {}
        for unit in units:
            self._by_parameter.setdefault(unit.parameter, {})[unit.key] = unit
            if unit.key != MASTER:
                optimizer.state[unit.parameter].setdefault(unit.key, unit.resting)
        self.adopt()

    def _new_memory(self, pool: HostPool) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Of the pool, or of the device's driver, and what makes a slice of it a tensor of the device."""
        if not self.units:
            return torch.empty(0, dtype=torch.uint8), self._accelerator.map_host
        if self._accelerator.has_swapped_memory:
            if pool.charge(self.nbytes):
                return self._accelerator.swapped_memory(self.nbytes), lambda part: part
        elif (block := pool.alloc(self.nbytes)) is not None:
            self._block = block
            return block.tensor, self._accelerator.map_host
        raise MemoryError(
            f"no {self.nbytes} bytes of host memory: of {pool.budget_bytes} may be pinned, {pool.pinned_bytes} are, "
            f"{pool.used_bytes} in use"
        )

    def give_back(self, pool: HostPool) -> None:
        """The memory. Nobody may use the state after this, nor be using it."""
        if self._block is not None:
            pool.free(self._block)

    def come_to_rest(self) -> None:
        """Before anybody outside the step reads the state, or writes to it."""
        self.before_use()

    def units_of(self, parameter: torch.Tensor) -> Mapping[str, Unit]:
        return self._by_parameter.get(parameter, {})

    def adopt(self) -> None:
        """Put every unit's own tensor (back) in its place, keeping the values of what was there instead. Raises
        RuntimeError if that is of another shape."""
        for unit in self.units:
            assert unit.resting is not None
            if unit.key == MASTER:
                found: Any = unit.parameter.data
            else:
                found = self.optimizer.state[unit.parameter].get(unit.key)
            if isinstance(found, torch.Tensor) and found.data_ptr() != unit.resting.data_ptr():
                self.come_to_rest()
                self._write(unit, found)
            elif found is None:  # taken away: it starts anew, as in torch
                self.come_to_rest()
                unit.resting.zero_()
            self.rest(unit)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                complete_state(self.optimizer, group, parameter)

    def rest(self, unit: Unit) -> None:
        assert unit.resting is not None
        if unit.key == MASTER:
            unit.parameter.data = unit.resting
        else:
            self.optimizer.state[unit.parameter][unit.key] = unit.resting

    # ---- loading
    def take_out(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Unit, torch.Tensor | None]]]:
        """``state_dict`` without the units, and the value given for each unit (None: none).

        Torch would copy them to the device, all at once, on the way into the optimizer.
        """
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        ours = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(saved) != len(ours):
            return dict(state_dict), []  # the optimizer says better what is wrong
        states = dict(state_dict["state"])
        values: list[tuple[Unit, torch.Tensor | None]] = []
        for number, parameter in zip(saved, ours, strict=True):
            given = states.get(number)
            units = {key: unit for key, unit in self.units_of(parameter).items() if key != MASTER}
            values += [(unit, (given or {}).get(key)) for key, unit in units.items()]
            if given is not None:
                states[number] = {key: value for key, value in given.items() if key not in units}
        return {**state_dict, "state": states}, values

    def put_in(self, values: Iterable[tuple[Unit, torch.Tensor | None]]) -> None:
        self.come_to_rest()
        for unit, value in values:
            assert unit.resting is not None
            if value is None:
                unit.resting.zero_()  # a parameter without state starts anew, as in torch
            elif value.data_ptr() != unit.resting.data_ptr():
                self._write(unit, value)
            self.rest(unit)
        self.adopt()

    def _write(self, unit: Unit, value: torch.Tensor) -> None:
        assert unit.resting is not None
        if value.shape != unit.resting.shape:  # a copy would broadcast it
            raise RuntimeError(
                f"optimizer state {unit.key!r} of shape {list(value.shape)} does not fit its parameter of shape "
                f"{list(unit.resting.shape)}"
            )
        self._accelerator.write_mapped(unit.resting, value)
