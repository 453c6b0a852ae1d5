"""Keep, swap and recompute against an exact integer program and brute force; full recompute and all-swap beaten.

Brute force tries every choice of tensors and modules, with the points that the solver's own sweeps give it; the integer
program has the rules of ``simulate`` and also places every release and prefetch, so it is never above brute force (and
the solver, which moves single points in the end, is often below it). Both, like the solver, leave one thing out that
``simulate`` knows: to load on demand what could have been prefetched.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from oracle import brute_force, integer_program
from traces import LLAMA_MODULES, Shape, megatron_trace, random_trace

from mindspeed_swap.core.attempt import Corner
from mindspeed_swap.core.lanes import run_lanes
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import plain_step_ms, simulate
from mindspeed_swap.core.solve import ALL_VERBS, _Solver, solve
from mindspeed_swap.core.trace import StepTrace

SHARES = (0.1, 0.4, 0.7, 0.0)
MOST_CANDIDATES = 12  # tensors to swap and modules to recompute
BRUTE_CANDIDATES = 10


def small(seed: int) -> StepTrace:
    """Irregular, or (every fourth) Megatron-shaped."""
    if seed % 4 < 3:
        return random_trace(seed, tensors=4 + seed % 9, points=20, modules=seed % 4)
    modules = (("a", (1,), (0,), 0.1 + 0.1 * (seed % 7)), ("b", (2,), (1,), 0.3), ("layer", (1, 2), (0,), 1.0))
    return megatron_trace(
        Shape(
            layers=1 + seed // 4 % 2, sites_mib=(16.0, 64.0, 32.0), unmovable_mib=0, static_mib=64, optimizer_mib=0,
            logits_mib=0, layer_forward_ms=(1.0, 3.0, 10.0)[seed % 3], transient_mib=32 * (seed % 5),
            modules=modules, d2h_gbps=(50.0, 10.0, 20.0)[seed // 8 % 3],
        )
    )


def cases(count: int) -> Iterator[tuple[StepTrace, int, int]]:
    """(trace, budget, candidates): budgets that need a plan and can be met, the tightest one included."""
    for seed in itertools.count():
        trace = small(seed)
        solver = _Solver(trace, ALL_VERBS)
        low, high = solver.least.peak, max(solver.keep)
        candidates = len(solver.stage.plain.jobs) + len(solver.stage.modules)
        if low < high and candidates <= MOST_CANDIDATES:
            yield trace, low + int((high - low) * SHARES[seed // 4 % 4]), candidates
            count -= 1
        if not count:
            return


def solver_plan(trace: StepTrace, budget: int) -> Plan:
    return solve(trace, budget, ALL_VERBS)


def ratios(planner: Callable[[StepTrace, int], Plan], count: int) -> tuple[list[float], list[float]]:
    """Step times over those of brute force (up to 10 candidates) and over those of the integer program, sorted."""
    brute: list[float] = []
    exact: list[float] = []
    for trace, budget, candidates in cases(count):
        outcome = simulate(trace, planner(trace, budget))
        assert outcome.peak <= budget
        plain = plain_step_ms(trace)
        if candidates <= BRUTE_CANDIDATES:
            brute.append(outcome.step_ms / (plain + brute_force(trace, budget)))
        bound = integer_program(trace, budget)
        if bound is not None:
            exact.append(outcome.step_ms / (plain + bound))
            assert exact[-1] > 1.0 - 1e-3, "faster than what is possible: one of the two is wrong"
    print(f"\nbrute force: {len(brute)} cases, worst {max(brute):.4f}; exact: {len(exact)}, worst {max(exact):.4f}")
    assert len(exact) >= 0.95 * count, "a slow machine may cost the integer program a few of its answers, not more"
    return sorted(brute), sorted(exact)


def check(found: tuple[list[float], list[float]]) -> None:
    brute, exact = found
    assert brute[-1] <= 1.02
    assert exact[-1] <= 1.02


def test_within_two_percent_of_the_oracles() -> None:
    check(ratios(solver_plan, 40))


@pytest.mark.full
def test_within_two_percent_of_the_oracles_in_300_cases() -> None:
    check(ratios(solver_plan, 300))


def plan_of(trace: StepTrace, corner: Corner, budget: int) -> Plan:
    return _Solver(trace, ALL_VERBS)._plan(budget, corner.flags, corner.placed)


def one_of_the_corners(trace: StepTrace, budget: int) -> Plan:
    fitting = [corner for corner in _Solver(trace, ALL_VERBS).corners if corner.peak <= budget]
    return plan_of(trace, fitting[0], budget)


def a_little_too_careful(trace: StepTrace, budget: int) -> Plan:
    """The solver itself, told a tenth less than there is."""
    low = _Solver(trace, ALL_VERBS).least.peak
    return solve(trace, budget - (budget - low) // 10, ALL_VERBS)


@pytest.mark.parametrize("worse", [one_of_the_corners, a_little_too_careful])
def test_a_planted_worse_solver_is_caught(worse: Callable[[StepTrace, int], Plan]) -> None:
    with pytest.raises(AssertionError):
        check(ratios(worse, 24))


def test_case_33_never_slower_than_all_swap_or_full_recompute_at_their_memory() -> None:
    traces = [small(seed) for seed in range(12)]
    traces += [megatron_trace(Shape(layers=8, modules=LLAMA_MODULES, layer_forward_ms=ms)) for ms in (2.0, 7.0, 30.0)]
    for trace in traces:
        solver = _Solver(trace, ALL_VERBS)
        for corner in solver.corners:
            spent = run_lanes(trace, corner.placed, solver.stage.scene(corner.flags).modules).extra_ms
            for budget in (corner.peak, corner.peak + (max(solver.keep) - corner.peak) // 3):
                prediction = solver.solve(budget).prediction
                assert prediction is not None
                assert prediction.step_ms <= plain_step_ms(trace) + spent + 1e-6


def test_keep_and_swap_say_when_recompute_would_be_faster() -> None:
    trace = megatron_trace(Shape(layers=8, modules=LLAMA_MODULES, layer_forward_ms=1.0, optimizer_mib=0))
    solver = _Solver(trace)
    full = next(corner for corner in _Solver(trace, ALL_VERBS).corners if any(corner.flags) and not corner.placed)
    plan = solver.solve(max(full.peak, solver.least.peak))
    assert plan.prediction is not None and plan.prediction.faster_recompute_ms is not None
    assert plan.prediction.faster_recompute_ms < plan.prediction.step_ms
    fast = megatron_trace(Shape(layers=8, modules=LLAMA_MODULES, layer_forward_ms=500.0, optimizer_mib=0))
    prediction = solve(fast, full.peak).prediction
    assert prediction is not None and prediction.faster_recompute_ms is None
