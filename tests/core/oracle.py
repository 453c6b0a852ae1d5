"""Oracles for the planner: an integer program that also chooses every release and prefetch point, and brute force over
all choices with the solver's own timing. For small traces, links without contention or overhead. Extra ms of a step."""
from __future__ import annotations

from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from mindspeed_swap.core.lanes import run_lanes
from mindspeed_swap.core.recompute import Chosen, Module, as_they_run
from mindspeed_swap.core.simulate import recompute_changes
from mindspeed_swap.core.solve import ALL_VERBS, _Solver
from mindspeed_swap.core.trace import StepTrace


def brute_force(trace: StepTrace, budget: int) -> float:
    stage = _Solver(trace, ALL_VERBS).stage
    best = float("inf")
    for flags in product((False, True), repeat=len(stage.modules)):
        if Chosen(stage.modules, flags).flags != list(flags):
            continue  # two of them conflict
        scene = stage.scene(flags)
        for on in product((False, True), repeat=len(scene.jobs)):
            placed = scene.lay_out(budget, {job.record for job, chosen in zip(scene.jobs, on, strict=True) if chosen})
            if max(scene.curve(placed)) <= budget:
                best = min(best, run_lanes(trace, placed, scene.modules).extra_ms)
    return best


class _Program:
    """Rows ``low <= sum of coefficient x variable <= high``."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, binary: bool = False) -> int:
        self.cost.append(0.0)
        self.binary.append(binary)
        return len(self.cost) - 1

    def at_least(self, terms: list[tuple[float, int]], low: float, high: float = np.inf) -> None:
        row: dict[int, float] = {}
        for coefficient, variable in terms:
            row[variable] = row.get(variable, 0.0) + coefficient
        self.rows.append((row, low, high))

    def solve(self) -> float | None:
        matrix = np.zeros((len(self.rows), len(self.cost)))
        for i, (row, _, _) in enumerate(self.rows):
            for variable, coefficient in row.items():
                matrix[i, variable] = coefficient
        found = milp(
            self.cost, integrality=self.binary,
            bounds=Bounds(0, [1.0 if binary else np.inf for binary in self.binary]),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for *_, high in self.rows]),
            options={"time_limit": 20.0, "mip_rel_gap": 1e-4},
        )
        return float(found.fun) if found.status == 0 else None


def at_every_run(trace: StepTrace, modules: list[Module]) -> list[Module]:
    """Each module as often as there are points at which it may run: its own, and those of what is run from it."""
    found = list(modules)
    for user in found:  # grows meanwhile
        for module in modules:
            if not set(module.frees).isdisjoint(user.keeps) and user.run < module.run:
                earlier, _ = as_they_run(trace, [module, user])
                if all((other.run, other.frees) != (earlier.run, earlier.frees) for other in found):
                    found.append(earlier)
    return found


def integer_program(trace: StepTrace, budget: int) -> float | None:
    """None where it is not solved in time (or not at all)."""
    stage = _Solver(trace, ALL_VERBS).stage
    jobs, modules, points = stage.plain.jobs, at_every_run(trace, stage.modules), trace.points
    n = len(points)
    program = _Program()
    # Compute has waited for the copies out at the point; for the copies back too.
    released, time = [program.variable() for _ in range(n)], [program.variable() for _ in range(n + 1)]
    run = [program.variable(binary=True) for _ in modules]
    leave = [{p: program.variable(binary=True) for p in range(job.release, job.prefetch)} for job in jobs]
    back = [{p: program.variable(binary=True) for p in range(job.release + 1, job.prefetch + 1)} for job in jobs]
    out_end, in_end = ([program.variable() for _ in jobs] for _ in range(2))
    out_ms = [job.nbytes / trace.d2h_bytes_per_ms for job in jobs]
    in_ms = [job.nbytes / trace.h2d_bytes_per_ms for job in jobs]
    big = points[-1].time_ms + sum(out_ms) + sum(in_ms) + sum(m.record.forward_ms for m in modules) + 1.0
    program.cost[time[n]] = 1.0
    for i in range(n + 1):  # time runs on, and recomputes take theirs
        spent = [(-m.record.forward_ms, y) for m, y in zip(modules, run, strict=True) if m.run == i - 1]
        previous = [(-1.0, time[i - 1])] if i else []
        step = 0.0 if i == n else points[i].time_ms - (points[i - 1].time_ms if i else 0.0)
        reached = time[i] if i == n else released[i]
        program.at_least([(1.0, reached), *previous, *spent], step)
        if i < n:
            program.at_least([(1.0, time[i]), (-1.0, released[i])], 0.0)
    swapped = [[(1.0, v) for v in leaves.values()] for leaves in leave]  # sums to 1 when swapped
    for j, job in enumerate(jobs):
        x = swapped[j]
        program.at_least([*x], 0.0, 1.0)
        program.at_least([*x, *((-1.0, v) for v in back[j].values())], 0.0, 0.0)
        order = [*((float(p), v) for p, v in back[j].items()), *((-float(p), v) for p, v in leave[j].items())]
        program.at_least([*order, *((-c, v) for c, v in x)], 0.0)
        cost = [(-out_ms[j], v) for _, v in x]
        again = [(-m.record.forward_ms, y) for m, y in zip(modules, run, strict=True) if m.run == job.saved]
        program.at_least([(1.0, out_end[j]), (-1.0, time[job.saved]), *cost, *again], 0.0)  # saved after a recompute
        for k, other in enumerate(jobs):
            if (other.saved, k) < (job.saved, j):  # the lane out: in the order of the saves
                program.at_least([(1.0, out_end[j]), (-1.0, out_end[k]), *cost], 0.0)
            if k < j:  # the lane back: one of the two comes first
                first = program.variable(binary=True)
                program.at_least([(1.0, in_end[j]), (-1.0, in_end[k]), (big, first)], in_ms[j])
                program.at_least([(1.0, in_end[k]), (-1.0, in_end[j]), (-big, first)], in_ms[k] - big)
        for p, v in leave[j].items():
            program.at_least([(1.0, released[p]), (-1.0, out_end[j]), (-big, v)], -big)
        for p, v in back[j].items():
            program.at_least([(1.0, in_end[j]), (-1.0, released[p]), (-big, v)], in_ms[j] - big)
        program.at_least([(1.0, time[job.read]), (-1.0, in_end[j]), *((-big, v) for _, v in x)], -big)
        for m, y in zip(modules, run, strict=True):
            if job.record in m.frees:
                program.at_least([*x, (1.0, y)], -np.inf, 1.0)
            if job.record in m.keeps and m.run < job.read:
                late = [(1.0, v) for p, v in back[j].items() if p >= m.run]
                program.at_least([*late, (1.0, y)], -np.inf, 1.0)
                needs = [(-big, v) for _, v in x]
                program.at_least([(1.0, time[m.run]), (-1.0, in_end[j]), *needs, (-big, y)], -2 * big)
    for a in range(len(modules)):
        for b in range(a):
            if Chosen(modules, [i == b for i in range(len(modules))]).conflicts(a):
                program.at_least([(1.0, run[a]), (1.0, run[b])], -np.inf, 1.0)
    for m, y in zip(modules, run, strict=True):  # not later than anything that is run from it, earlier only for that
        users = [(u, x) for u, x in zip(modules, run, strict=True) if not set(m.frees).isdisjoint(u.keeps)]
        for user, x in users:
            if user.run < m.run:
                program.at_least([(1.0, x), (1.0, y)], -np.inf, 1.0)
        if m not in stage.modules:
            program.at_least([*((1.0, x) for user, x in users if user.run == m.run), (-1.0, y)], 0.0)
    for i in range(n):
        terms = [(-float(job.nbytes), v) for j, job in enumerate(jobs) for p, v in leave[j].items() if p < i]
        terms += [(float(job.nbytes), v) for j, job in enumerate(jobs) for p, v in back[j].items() if p < i]
        for m, y in zip(modules, run, strict=True):
            terms.append((float(sum(change for at, change in recompute_changes(trace, [m]) if at <= i)), y))
        if terms and stage.plain.keep[i] > budget - sum(max(0.0, c) for c, _ in terms):
            program.at_least(terms, -np.inf, float(budget - stage.plain.keep[i]))
    found = program.solve()
    return None if found is None else found - points[-1].time_ms
