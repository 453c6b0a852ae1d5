"""Scene: the step while one set of modules is recomputed: its memory, the windows left for swaps, their timing.

For swaps a recompute is only another trace: what it frees is gone, later points come later, inputs are read earlier.
"""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import add

from mindspeed_swap.core.lanes import Placed, run_lanes
from mindspeed_swap.core.recompute import Chosen, Module, as_they_run, by_price, full_recompute, modules_of
from mindspeed_swap.core.simulate import host_peak, memory_curve, recompute_changes
from mindspeed_swap.core.sweeps import NOT_NEEDED, choose, lay_out
from mindspeed_swap.core.trace import StepTrace
from mindspeed_swap.core.windows import View, Window, link_rates, points_to_act, windows, windows_left

# A copy back is planned to be over this share of its duration before it is read: the measured bandwidth varies by about
# that much when both lanes are busy (55 against 47 GB/s).
PREFETCH_HEADROOM = 0.2
# Where there is room, more than that: so many times the duration, out and back. A step in which the device waits for
# the host varies by a third, and a plan made from a slow one waited for copies in fast ones (H200, experts: 8 to 14 ms
# of 133 without this).
SPARE_COPIES = 4
# Scenes kept: those of small traces are asked for again and again, those of large ones are large.
MAX_SCENES = 256


Order = list[tuple[int, int]]  # module, bytes that it frees beyond those that it replaces


@dataclass(eq=False)
class Scene:
    trace: StepTrace
    acts: list[int]  # points at which the manager acts
    keep: list[int]  # the memory curve with nothing swapped
    jobs: list[Window]
    modules: Sequence[Module]
    last_resort: set[int]  # see ``View``

    @cached_property
    def views(self) -> tuple[View, View]:
        args = self.trace, self.jobs, self.modules, self.last_resort
        return View(*args, backwards=False), View(*args, backwards=True)

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
        for ahead_first, margin in ((True, first_margin), (False, 0), (True, 1), (True, 4), (False, 2)):
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
        placed = []
        for job, release, mirrored in zip(self.jobs, releases, prefetches, strict=True):
            if release != NOT_NEEDED and mirrored != NOT_NEEDED:
                # A little longer where the manager does not act: at a point whose position was met before.
                release = self.acts[bisect_right(self.acts, release) - 1]
                prefetch = self.acts[bisect_left(self.acts, last - mirrored)]
                placed.append((prefetch, job.read, job.record, release))
        placed.sort()
        return [Placed(record, release, prefetch) for prefetch, _, record, release in placed]

    def relaxed(self, placed: list[Placed], peak: int, later: bool, sooner: bool) -> list[Placed]:
        """Releases ``later`` and copies back ``sooner``, by up to SPARE_COPIES times what the copy takes, as far as
        memory stays within ``peak`` and copies in their order. All get as much before any gets more."""
        acts, times, saved = self.acts, self.views[0].times, self.trace.saved
        rates = link_rates(self.trace)
        room = [peak - value for value in self.curve(placed)]
        here = list(placed)

        def move(at: int, step: int, limit: int, wanted_ms: float, nbytes: int) -> int:
            """From point ``at`` on, act by act, to the first at which it is that late (step -1: early), before
            ``limit``."""
            k = bisect_left(acts, at)
            while step * times[at] < step * wanted_ms:
                k += step
                if not 0 <= k < len(acts) or step * acts[k] >= step * limit:
                    break
                first, last = sorted((at, acts[k]))
                if min(room[first + 1 : last + 1]) < nbytes:
                    break
                room[first + 1 : last + 1] = [value - nbytes for value in room[first + 1 : last + 1]]
                at = acts[k]
            return at

        for times_over in range(1, SPARE_COPIES + 1):
            before = -1
            for n, ((number, release, prefetch), planned) in enumerate(zip(here, placed, strict=True)):
                nbytes = saved[number].nbytes
                out_ms, back_ms = (times_over * (self.trace.copy_overhead_ms + nbytes / rate) for rate in rates)
                if later:
                    release = move(release, 1, prefetch, times[planned.release] + out_ms, nbytes)
                if sooner:
                    limit = max(release, before - 1)
                    prefetch = move(prefetch, -1, limit, times[planned.prefetch] - back_ms, nbytes)
                before = prefetch
                here[n] = Placed(number, release, prefetch)
        return here

    def shifted(self, placed: list[Placed], target: int, tries: int) -> list[Placed]:
        """Moves single ends of absences, and where memory is then short lets one other tensor be away, as long as that
        helps. The sweeps keep the order of the lanes and never wait to make room for somebody else's copy."""
        jobs, saved, length = {job.record: job for job in self.jobs}, self.trace.saved, len(self.keep)
        looks = iter(range(tries))

        def order(here: dict[int, Placed]) -> list[Placed]:
            return sorted(here.values(), key=lambda item: (item.prefetch, jobs[item.record].read, item.record))

        def cost(here: dict[int, Placed]) -> tuple[float, int]:  # of equals the longest absences: they make room
            kept = sum(saved[p.record].nbytes * (length - p.prefetch + p.release) for p in here.values())
            return round(run_lanes(self.trace, order(here), self.modules).extra_ms, 6), kept

        def neighbours(here: dict[int, Placed], number: int) -> Iterator[dict[int, Placed]]:
            job, (_, release, prefetch) = jobs[number], here[number]
            legal = self.acts[bisect_left(self.acts, job.release) : bisect_right(self.acts, job.prefetch)]
            ends = chain(
                (Placed(number, at, prefetch) for at in legal if at < prefetch),
                (Placed(number, release, at) for at in legal if at > release),
            )
            for changed in ({**here, number: other} for other in ends):
                if next(looks, None) is None:
                    return
                over = [i for i, value in enumerate(self.curve(changed.values())) if value > target]
                if not over:
                    yield changed
                first, last = (over[0], over[-1]) if over else (0, length)
                for other in self.jobs:
                    if other.record != number and other.release < first and last <= other.prefetch:
                        item = changed.get(other.record, Placed(other.record, other.prefetch, other.release))
                        longer = Placed(
                            other.record,
                            min(item.release, self.acts[bisect_left(self.acts, first) - 1]),
                            max(item.prefetch, self.acts[bisect_left(self.acts, last)]),
                        )
                        if next(looks, None) is None:
                            return
                        if max(self.curve({**changed, other.record: longer}.values())) <= target:
                            yield {**changed, other.record: longer}

        here = {item.record: item for item in placed}
        best, moved = cost(here), True
        while moved:
            moved = False
            for number in list(here):
                for changed in neighbours(here, number):
                    found = cost(changed)
                    if found < best:
                        here, best, moved = changed, found, True
        return order(here)


class Stage:
    """All scenes of one trace, and what may be done in them."""

    def __init__(self, trace: StepTrace, *, swap: bool, recompute: bool, host_budget: int | None) -> None:
        self.trace = trace
        self.modules = modules_of(trace) if recompute else []
        self.nothing = (False,) * len(self.modules)
        self._orders: dict[tuple[int, ...], Order] = {}
        self.full = self._flags(full_recompute(self.modules))
        self.full_without_chains = self._flags(full_recompute(self.modules, chains=False))
        self._acts = points_to_act(trace)
        jobs = windows(trace) if swap else []
        if host_budget is not None:
            jobs = _fitting(trace, jobs, host_budget)
        # What is cheaper to recompute than to wait for leaves the lanes to the rest.
        price = 1.0 / max(link_rates(trace)[0], 1e-9)
        cheap = (module for module in self.modules if module.record.forward_ms < price * module.freed_bytes)
        self._cheap = {number for module in cheap for number in module.frees}
        self._scenes: dict[tuple[bool, ...], Scene] = {}
        self.plain = self._scenes[self.nothing] = Scene(
            trace, self._acts, memory_curve(trace, ()), jobs, (), set()
        )
        self._least_when_run = self._leasts()

    def _flags(self, chosen: list[Module]) -> tuple[bool, ...]:
        members = {id(module) for module in chosen}
        return tuple(id(module) in members for module in self.modules)

    def scene(self, flags: tuple[bool, ...]) -> Scene:
        found = self._scenes.get(flags)
        if found is None:
            if len(self._scenes) >= MAX_SCENES:
                self._scenes = {self.nothing: self.plain}
            trace, plain = self.trace, self.plain
            modules = as_they_run(trace, [module for module, on in zip(self.modules, flags, strict=True) if on])
            delta = [0] * (len(plain.keep) + 1)
            for i, change in recompute_changes(trace, modules):
                delta[i] += change
            keep = list(map(add, plain.keep, accumulate(delta)))
            jobs = windows_left(trace, plain.jobs, modules, self._acts)
            found = self._scenes[flags] = Scene(trace, self._acts, keep, jobs, modules, self._cheap)
        return found

    def spent_ms(self, flags: Iterable[bool]) -> float:
        """What recomputing these takes."""
        return sum(module.record.forward_ms for module, on in zip(self.modules, flags, strict=True) if on)

    def _leasts(self) -> list[int]:
        """For each module: least memory while it runs again, with everything else away that can be. A layer brings all
        that it saves back at once; parts of it do not."""
        least = self.plain.curve(self.plain.farthest) if self.modules else []
        jobs = {job.record: job for job in self.plain.jobs}
        found = []
        for module in self.modules:
            after = min(module.run + 1, len(least) - 1)
            away = [jobs[i] for i in module.frees if i in jobs]
            back = sum(job.nbytes for job in away if job.release < after <= job.prefetch)
            found.append(least[after] + back + module.working_bytes)
        return found

    def order(self, target: int, *, largest: bool = True) -> Order:
        """The modules that can run again within ``target``, those most worth it first, with what each frees more. Not
        ``largest``: without those of the name that needs most memory while it runs."""
        usable = tuple(m for m, least in enumerate(self._least_when_run) if least <= target)
        if usable and not largest:
            most = self.modules[max(usable, key=self._least_when_run.__getitem__)].record.key.name
            usable = tuple(m for m in usable if self.modules[m].record.key.name != most)
        if usable not in self._orders:
            found = by_price([self.modules[m] for m in usable])
            self._orders[usable] = [(usable[m], gained) for m, gained in found]
        return self._orders[usable]

    def first(self, order: Order, count: int) -> tuple[bool, ...]:
        """The ``count`` modules most worth recomputing."""
        chosen = Chosen(self.modules)
        for m, _ in order[:count]:
            chosen.add(m)
        return tuple(chosen.flags)


def _fitting(trace: StepTrace, jobs: list[Window], host_budget: int) -> list[Window]:
    """As many as the host has room for, longest absences first."""
    if not jobs:
        return jobs
    times = [point.time_ms for point in trace.points]
    order = sorted(jobs, key=lambda job: times[job.release] - times[job.prefetch])
    placed = [Placed(job.record, job.release, job.prefetch) for job in order]
    count = bisect_right(range(len(jobs)), host_budget, key=lambda k: host_peak(trace, placed[: k + 1]))
    return sorted(order[:count], key=lambda job: job.record)
