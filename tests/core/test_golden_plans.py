"""Plans for recorded steps, as text: a change of plan is a visible diff. Rewrite with ``python test_golden_plans.py``.

The steps are real runs of Megatron on the simulated device (record_traces.py): one rank without and with records of
modules, PP 4, PP 2 with VPP, experts over two ranks, and 32768 tokens. Its copies are instant, so the link is made so
slow that it matters.
"""
from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from mindspeed_swap.core.explain import explain
from mindspeed_swap.core.simulate import memory_curve, simulate
from mindspeed_swap.core.solve import ALL_VERBS, KEEP_SWAP, floor, solve
from mindspeed_swap.core.trace import StepTrace

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FIXTURES.glob("*.json.gz"))


def load(name: str) -> StepTrace:
    return StepTrace.from_json(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()).decode())


def text_of(name: str) -> str:
    trace = load(name)
    # A step carries half of what could be swapped.
    rate = sum(record.nbytes for record in trace.saved if record.movable) / trace.step_ms / 2
    trace.d2h_bytes_per_ms = trace.h2d_bytes_per_ms = rate
    trace.d2h_both_bytes_per_ms = trace.h2d_both_bytes_per_ms = 0.85 * rate
    lines = []
    for verbs in (KEEP_SWAP, ALL_VERBS):
        low, high = floor(trace, verbs).reachable_bytes, max(memory_curve(trace, ()))
        for share in (0.6, 0.2):
            plan = solve(trace, low + int((high - low) * share), verbs)
            outcome = simulate(trace, plan)
            assert outcome.peak <= plan.budget_bytes
            lines.append(f"== {'|'.join(verbs)}, budget {plan.budget_bytes}: {outcome.step_ms:.2f} ms")
            lines += explain(trace, plan)
            lines += [f"{tuple(s.key)} away {tuple(s.release)} .. {tuple(s.prefetch)}" for s in plan.swaps]
            lines += [f"{tuple(r.key)} again, {r.nbytes} bytes" for r in plan.recomputes]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("one_rank", "pipeline_model_parallel_size=1"),
        ("pp4_last", "pipeline_model_parallel_size=4"),
        ("vpp_first", "virtual_pipeline_model_parallel_size=2"),
        ("experts", "num_experts=4"),
        ("long_32k", "seq_length=32768"),
    ],
)
def test_every_kind_of_run_is_there(name: str, of: str) -> None:
    assert of in load(name).model


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_the_same(name: str) -> None:
    assert text_of(name) == (FIXTURES / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_two_percent_above_the_floor_of_a_real_run_is_solved(name: str) -> None:
    trace = load(name)
    for verbs in (KEEP_SWAP, ALL_VERBS):
        budget = int(1.02 * floor(trace, verbs).bytes)
        assert simulate(trace, solve(trace, budget, verbs)).peak <= budget


if __name__ == "__main__":
    for each in NAMES:
        (FIXTURES / f"{each}.txt").write_text(text_of(each))
