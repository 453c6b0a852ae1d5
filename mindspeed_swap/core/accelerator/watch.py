"""Who watches a torch caching allocator: the hook of ``csrc/oom_guard.cpp`` or, where it cannot be had, statistics."""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_swap.errors import SettingError
from mindspeed_swap.log import say

OOM_HOOK = "MINDSPEED_SWAP_OOM_HOOK"
# The allocator refuses one exbibyte before it looks at its cache or calls the driver: a refusal without side effects.
# (Less would first empty the cache and, with expandable segments, map all memory that the device has.)
REFUSED_BYTES = 1 << 60

Handler = Callable[[int, int], bool]


class Watch(Protocol):
    """What ``csrc/oom_guard.cpp`` and its replacement have in common."""

    def memory(self, device: int, /) -> tuple[int, int]: ...
    def take_interval(self) -> tuple[int, int]: ...
    def set_handler(self, handler: Handler | None, /) -> None: ...
    def uninstall(self) -> Any: ...


def may_hook() -> bool:
    """What the environment says. Raises SettingError."""
    setting = os.environ.get(OOM_HOOK, "1")
    if setting not in ("0", "1"):
        raise SettingError(f"{OOM_HOOK}={setting!r}: expected 1 (use the allocator hook if it works) or 0 (do not)")
    return setting == "1"


def watch_allocator(module: Any, place: str, index: int, build: Callable[[], Any]) -> tuple[Watch, bool]:
    """The best there is, and whether it retries allocations. Says in one line what was chosen and why.

    ``module``: torch.cuda or torch.npu; ``build`` loads the extension for it; ``place`` is for messages.
    """
    hook = may_hook()
    try:
        guard = build()
    except (SettingError, RuntimeError, OSError, ImportError) as error:
        return _statistics(module, place, index, str(error).strip().splitlines()[-1], every_rank=True)
    reason = f"{OOM_HOOK}=0"
    if hook:
        try:
            guard.install(index)
            guard.self_test(REFUSED_BYTES)
        except RuntimeError as error:
            guard.uninstall()
            reason = str(error).splitlines()[0]
        else:
            say(f"{place}: out-of-memory is caught in the allocator (hook installed, self-test passed)")
            return guard, True
    try:
        guard.track(index)
    except RuntimeError:  # this allocator has no trace to follow
        return _statistics(module, place, index, reason, every_rank=hook)
    consequence = "no allocator hook, evicting ahead; interval peaks from the allocator's trace"
    say(f"{place}: {consequence} ({reason})", every_rank=hook)
    return guard, False


def _statistics(module: Any, place: str, index: int, reason: str, *, every_rank: bool) -> tuple[Watch, bool]:
    consequence = "no allocator hook, evicting ahead; interval peaks are lower bounds"
    say(f"{place}: {consequence} ({reason})", every_rank=every_rank)
    return StatisticsOnly(module, index), False


class StatisticsOnly:
    """Without the extension: what ``memory_stats`` tells without resetting the user's peaks.

    The peak of an interval is exact if it is the highest so far and else a lower bound, what was allocated at its end.
    The largest request is not visible; the rise within the interval stands for it.
    """

    def __init__(self, module: Any, index: int) -> None:
        self._module = module
        self._index = index
        self._start_bytes, self._start_peak = self._read()

    def _read(self) -> tuple[int, int]:
        stats = self._module.memory_stats(self._index)
        return stats.get("allocated_bytes.all.current", 0), stats.get("allocated_bytes.all.peak", 0)

    def memory(self, device: int) -> tuple[int, int]:
        return self._module.memory_allocated(device), self._module.memory_reserved(device)

    def take_interval(self) -> tuple[int, int]:
        now, torch_peak = self._read()
        peak = max(now, self._start_bytes, torch_peak if torch_peak > self._start_peak else 0)
        rise = peak - min(now, self._start_bytes)
        self._start_bytes, self._start_peak = now, torch_peak
        return peak, rise

    def set_handler(self, handler: Handler | None) -> None:
        raise NotImplementedError("allocations are not retried without the extension")

    def uninstall(self) -> bool:
        return True
