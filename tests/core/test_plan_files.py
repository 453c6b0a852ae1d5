"""Trace and plan files: the round trip, and damaged or foreign ones; the planner needs no torch."""
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from traces import LLAMA_MODULES, MIB, Shape, megatron_trace

from mindspeed_swap.core.explain import explain
from mindspeed_swap.core.plan import Plan
from mindspeed_swap.core.simulate import simulate
from mindspeed_swap.core.solve import ALL_VERBS, solve
from mindspeed_swap.core.trace import StepTrace

TRACE = megatron_trace(Shape(layers=4, modules=LLAMA_MODULES), model="num_layers=4 hidden_size=4096")
PLAN = solve(TRACE, 6500 * MIB, ALL_VERBS)


def test_round_trip() -> None:
    assert PLAN.swaps and PLAN.recomputes and PLAN.prediction is not None
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert StepTrace.from_json(TRACE.to_json()) == TRACE
    assert StepTrace.from_json(TRACE.to_json()).to_json() == TRACE.to_json()


def test_a_plan_from_a_trace_read_back_is_the_same() -> None:
    assert solve(StepTrace.from_json(TRACE.to_json()), 6500 * MIB, ALL_VERBS).to_json() == PLAN.to_json()


DAMAGE: list[tuple[str, list[Any], Any, str]] = [
    ("plan", ["version"], 99, "plan version 99: this release reads version 2"),
    ("plan", ["swaps", 1, "nbytes"], "12", r"damaged plan: swaps\[1\]: nbytes is '12'"),
    ("plan", ["swaps", 0, "nbytes"], True, r"damaged plan: swaps\[0\]: nbytes is True"),
    ("plan", ["swaps", 0, "release"], ["F", 0], r"swaps\[0\]: release: .* expected 5 values"),
    ("plan", ["swaps", 0, "key"], [0, 0, None, 1], r"swaps\[0\]: key: layer is None"),
    ("plan", ["swaps", 0, "extra"], 1, r"swaps\[0\]: extra is unknown"),
    ("plan", ["swaps"], None, "swaps: expected a list"),
    ("plan", ["prediction"], {"peak_bytes": {}}, "prediction: step_ms is missing"),
    ("plan", ["model"], None, "model is None"),
    ("plan", ["swaps", 0, "nbytes"], -1, r"swaps\[0\]: nbytes is -1"),
    ("plan", ["prediction", "step_ms"], float("nan"), "prediction: step_ms is nan"),
    ("plan", ["recomputes", 0, "key"], [0, 0, 1], r"recomputes\[0\]: key: .* expected 4 values"),
    ("trace", ["version"], None, "trace version None"),
    ("trace", ["points", 3, "time_ms"], "soon", r"damaged trace: points\[3\]: time_ms is 'soon'"),
    ("trace", ["points", 3], 7, r"points\[3\]: expected an object"),
    ("trace", ["saved", 2, "died"], 10**6, r"saved\[2\]: died is point 1000000"),
    ("trace", ["saved", 2, "movable"], 1, r"saved\[2\]: movable is 1"),
    ("trace", ["static_bytes"], 1.5, "static_bytes is 1.5"),
    ("trace", ["points", 2, "time_ms"], float("inf"), r"points\[2\]: time_ms is inf"),
    ("trace", ["modules", 1, "end"], 10**6, r"modules\[1\]: end is point 1000000"),
    ("trace", ["modules", 1, "frees", 0], [9, 9, 9, 9], r"modules\[1\]: \(9, 9, 9, 9\) was never saved"),
    ("trace", ["saved", 1, "key"], [0, 0, 1, 0], "one key names two records"),
    ("trace", ["saved", 9, "first_read"], 0, r"saved\[9\]: first_read is point 0, before saved at \d+"),
    ("trace", ["modules", 3, "end"], 0, r"modules\[3\]: end is point 0, before begin at \d+"),
    ("trace", ["waits"], [{"key": [0, 0, 1, 0], "point": -1, "cause": "x", "start_ms": 0, "end_ms": 1}],
     r"waits\[0\]: point is -1"),
]


@pytest.mark.parametrize(("what", "path", "value", "message"), DAMAGE)
def test_damage_is_named(what: str, path: list[Any], value: Any, message: str) -> None:
    reader = Plan if what == "plan" else StepTrace
    data = json.loads((PLAN if what == "plan" else TRACE).to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        reader.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": "other"}', PLAN.to_json()[:200]])
@pytest.mark.parametrize("reader", [Plan, StepTrace])
def test_foreign_files_are_refused(reader: Any, text: str) -> None:
    with pytest.raises(ValueError, match="damaged|version"):
        reader.from_json(text)


def test_a_missing_field_and_a_double_swap_are_named() -> None:
    data = json.loads(PLAN.to_json())
    data["swaps"].append(data["swaps"][0])
    with pytest.raises(ValueError, match="is there twice"):
        Plan.from_json(json.dumps(data))
    del data["swaps"][0]["prefetch"]
    with pytest.raises(ValueError, match=r"swaps\[0\]: prefetch is missing"):
        Plan.from_json(json.dumps(data))


def test_a_plan_of_another_model_is_refused_by_the_first_field_that_differs() -> None:
    other = replace(PLAN, model="num_layers=4 hidden_size=8192")
    with pytest.raises(ValueError, match="another model: hidden_size=8192, the trace has hidden_size=4096"):
        simulate(TRACE, other)


def test_explain_names_phases_sites_and_cost() -> None:
    lines = explain(TRACE, PLAN)
    assert any(line.startswith("phase B: peak ") for line in lines)
    assert any(line.startswith("phase O: ") and "untouched by the plan" in line for line in lines)
    assert any(line.startswith("swap ") and "tensor 6" in line for line in lines)
    assert any("may not move: ours not" in line for line in lines)
    assert explain(TRACE, Plan(TRACE.model, 1 << 50))[-1] == "nothing is swapped: everything fits"


def test_the_planner_imports_without_torch() -> None:
    names = ("plan", "trace", "simulate", "solve", "explain")
    code = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n" + "\n".join(
        f"import mindspeed_swap.core.{name}" for name in names
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
