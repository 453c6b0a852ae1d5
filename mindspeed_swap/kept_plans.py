"""Plans that outlive the run: what ``--swap-plan``, ``--swap-plan-save`` and ``--swap-plan-cache`` read and write."""
from __future__ import annotations

import os
from pathlib import Path

from mindspeed_swap.core.plan import Plan
from mindspeed_swap.files import check_file
from mindspeed_swap.log import Once, rank, say
from mindspeed_swap.options import Options
from mindspeed_swap.report.summary import versions
from mindspeed_swap.smart_swap.plan_cache import PlanCache
from mindspeed_swap.smart_swap.plan_files import Shape, load_plans, rank_file, save_plans
from mindspeed_swap.smart_swap.shapes import Shapes
from mindspeed_swap.units import MIB


class KeptPlans:
    """``plans``: to run without a search, and what is found in their place. ``failed``: digests of plans that did not
    fit, which the search adds to."""

    def __init__(self, options: Options, device: str, capacity_bytes: int) -> None:
        self._file = _rank_file(options.plan_save) if options.plan_save else None
        self._written: dict[Shape, Plan] = {}  # to the file
        self._say_once = Once()
        self._cache: PlanCache | None = None
        self.plans, self.failed = loaded_plans(options), set[str]()
        if options.plan_cache:
            key = {
                "model": options.model,
                "policy": options.policy,
                "virtual_optimizer": options.virtual_optimizer,
                "host_memory_gib": options.host_memory_gib,
                "device": device,
                "capacity_mib": capacity_bytes // MIB,
                **versions(),
            }
            self._cache = PlanCache(options.plan_cache, key, rank())
            self.plans, self.failed = self._cache.load(options.model)

    def save(self, shapes: Shapes) -> None:
        """A search went on, or is over. What a shape had before it is searched for anew stays until that is over."""
        self.plans |= shapes.stable_plans()
        self._write_file(self.plans)
        if self._cache is None:
            return
        try:
            self._cache.save(self.plans, self.failed)
        except OSError as error:
            self._say_once(f"--swap-plan-cache: not written, training goes on: {error.strerror}")

    def save_unfinished(self, shapes: Shapes) -> None:
        """Training is over. Whoever asked for a file gets one, though of a search that is not over; the cache does
        not: the next run would not search on."""
        plans = self.plans | shapes.best_plans()
        if self._file is None:
            return
        if not plans:
            say("--swap-plan-save: no plan was found, nothing is written")
        elif self._write_file(plans) and plans != self.plans | shapes.stable_plans():
            say("--swap-plan-save: training ended before the search did: the best plan so far is written")

    def _write_file(self, plans: dict[Shape, Plan]) -> bool:
        """False: it has them already, or cannot be written."""
        if self._file is None or plans == self._written:
            return False
        try:
            save_plans(self._file, rank(), plans)
        except OSError as error:
            self._say_once(f"--swap-plan-save: not written, training goes on: {error.strerror}: {self._file}")
            return False
        self._written = dict(plans)
        return True


def _rank_file(path: str) -> Path:
    return rank_file(path, rank(), int(os.environ.get("WORLD_SIZE", "1")))


def check_places(options: Options) -> None:
    """Before anything is built. Raises SettingError if a plan cannot be read, or the file not be written. (A cache
    may be one that is only read.)"""
    loaded_plans(options)
    if options.plan_save:
        check_file("--swap-plan-save", _rank_file(options.plan_save))


def loaded_plans(options: Options) -> dict[Shape, Plan]:
    """Of ``--swap-plan``. Raises SettingError."""
    return load_plans(_rank_file(options.plan_file), rank(), options.model) if options.plan_file else {}
