"""Scene: the step while one set of modules is recomputed: its memory, the windows left for swaps, their timing.

For swaps a recompute is only another trace: what it frees is gone, later points come later, inputs are read earlier.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from mindspeed_swap.core.choose import choose
from mindspeed_swap.core.lanes import Placed
from mindspeed_swap.core.recompute import Chosen, Module, by_price, full_recompute, modules_of
from mindspeed_swap.core.simulate import host_peak, memory_curve
from mindspeed_swap.core.timing import NOT_NEEDED, lay_out
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.core.windows import View, Window, link_rates, windows

# A copy back is planned to be over this share of its duration before it is read: the measured bandwidth varies by about
# that much when both lanes are busy (55 against 47 GB/s).
PREFETCH_HEADROOM = 0.2
# Scenes kept: those of small traces are asked for again and again, those of large ones are large.
MAX_SCENES = 256


class Scene:
    def __init__(
        self, trace: StepTrace, modules: Sequence[Module], allowed: set[int] | None, last_resort: set[int]
    ) -> None:
        """``allowed``: numbers of the records that may be swapped, None for all."""
        self.trace = trace
        self.modules = modules
        self.keep = memory_curve(trace, (), modules)
        jobs = windows(trace, modules)
        self.jobs: list[Window] = [job for job in jobs if allowed is None or job.record in allowed]
        self._last_resort = last_resort
        self._views: tuple[View, View] | None = None

    @property
    def views(self) -> tuple[View, View]:
        if self._views is None:
            args = self.trace, self.jobs, self.modules, self._last_resort
            self._views = View(*args, backwards=False), View(*args, backwards=True)
        return self._views

    @property
    def farthest(self) -> list[Placed]:
        """Everything away as long as it may be."""
        order = sorted(self.jobs, key=lambda job: (job.prefetch, job.read, job.record))
        return [Placed(job.record, job.release, job.prefetch) for job in order]

    def curve(self, placed: Iterable[Placed]) -> list[int]:
        """``memory_curve``, quicker, for legal swaps."""
        delta = [0] * (len(self.keep) + 1)
        saved = self.trace.saved
        for number, release, prefetch in placed:
            nbytes = saved[number].nbytes
            delta[release + 1] -= nbytes
            delta[prefetch + 1] += nbytes
        return [held + change for held, change in zip(self.keep, accumulate(delta), strict=False)]

    def choices(self, target: int, least: int, first_margin: int) -> Iterator[set[int]]:
        """Ways to choose records, most promising first. A copy under way frees nothing until it is over, which
        ``choose`` does not see: so aim below the target by some tensors."""
        largest = max((job.nbytes for job in self.jobs), default=0)
        for ahead_first, margin in ((True, first_margin), (True, 1), (False, 0), (True, 4), (False, 2)):
            aim = max(least, target - margin * largest)
            over = [value - aim for value in self.keep] + [-1]
            chosen = [False] * len(self.jobs)
            sweeps = [(self.views[0], over), (self.views[1], over[::-1])]
            for view, excess in sweeps if ahead_first else reversed(sweeps):
                choose(view, excess, chosen)
            yield {job.record for job, on in zip(self.jobs, chosen, strict=True) if on}
        yield {job.record for job in self.jobs}

    def lay_out(self, target: int, wanted: set[int]) -> list[Placed]:
        """Points for the wanted records, in the order in which their copies back are queued."""
        ahead, astern = self.views
        last = len(self.keep) - 1
        over = [value - target for value in self.keep] + [-1]
        chosen = [job.record in wanted for job in self.jobs]
        releases = lay_out(ahead, over, chosen, ahead.until, 0.0)
        chosen = [release != NOT_NEEDED for release in releases]
        until = [last - release for release in releases]
        prefetches = lay_out(astern, over[::-1], chosen, until, PREFETCH_HEADROOM)
        placed = [
            (last - mirrored, job.read, job.record, release)
            for job, release, mirrored in zip(self.jobs, releases, prefetches, strict=True)
            if release != NOT_NEEDED and mirrored != NOT_NEEDED
        ]
        placed.sort()
        return [Placed(record, release, prefetch) for prefetch, _, record, release in placed]


class Stage:
    """All scenes of one trace, and what may be done in them."""

    def __init__(self, trace: StepTrace, *, swap: bool, recompute: bool, host_budget: int | None) -> None:
        self.trace = trace
        self.modules = modules_of(trace) if recompute else []
        self.nothing = (False,) * len(self.modules)
        self.order = by_price(self.modules)
        everything = {id(module) for module in full_recompute(self.modules)}
        self.full = tuple(id(module) in everything for module in self.modules)
        self._allowed: set[int] | None = None if swap else set()
        if swap and host_budget is not None:
            self._allowed = _fitting(trace, host_budget)
        # What is cheaper to recompute than to wait for leaves the lanes to the rest.
        price = 1.0 / max(link_rates(trace)[0], 1e-9)
        cheap = (module for module in self.modules if module.record.forward_ms < price * module.freed_bytes)
        self._cheap = {number for module in cheap for number in module.frees}
        self._scenes: dict[tuple[bool, ...], Scene] = {}
        self.plain = self.scene(self.nothing)

    def scene(self, flags: tuple[bool, ...]) -> Scene:
        found = self._scenes.get(flags)
        if found is None:
            if len(self._scenes) >= MAX_SCENES:
                self._scenes.clear()
            last_resort = self._cheap if any(flags) else set()
            found = self._scenes[flags] = Scene(self.trace, self.members(flags), self._allowed, last_resort)
        return found

    def members(self, flags: Iterable[bool]) -> list[Module]:
        return [module for module, on in zip(self.modules, flags, strict=True) if on]

    def first(self, count: int) -> tuple[bool, ...]:
        """The ``count`` modules most worth recomputing."""
        chosen = Chosen(self.modules)
        for m, _ in self.order[:count]:
            chosen.add(m)
        return tuple(chosen.flags)


def _fitting(trace: StepTrace, host_budget: int) -> set[int]:
    """As many records as the host has room for, longest windows first."""
    times = [point.time_ms for point in trace.points]
    jobs = sorted(windows(trace), key=lambda job: times[job.release] - times[job.prefetch])
    placed = [Placed(job.record, job.release, job.prefetch) for job in jobs]
    count = bisect_right(range(len(jobs)), host_budget, key=lambda k: host_peak(trace, placed[: k + 1]))
    return {job.record for job in jobs[:count]}
