"""Plans as files: what is written comes back, and what is of another run is refused by its first difference."""
from __future__ import annotations

import json

import pytest

from mindspeed_swap.core.plan import Plan, Prediction, Swap
from mindspeed_swap.core.trace import BACKWARD, FORWARD, Key, Position
from mindspeed_swap.errors import SettingError
from mindspeed_swap.smart_swap.plan_files import first_difference, load_plans, rank_file, save_plans, size_class

MODEL = "num_layers=4 hidden_size=64 recompute_modules=['mlp', 'norm'] params_dtype=torch.bfloat16"
PLAN = Plan(
    MODEL,
    1000,
    (Swap(Key(0, 0, 1, 2), 500, Position(FORWARD, 0, 0, 1, 4), Position(BACKWARD, 0, 0, 2, 1)),),
    prediction=Prediction({"F": 900, "B": 800}, 12.5, 0.0),
)


def test_there_and_back(tmp_path):
    path = tmp_path / "deep" / "plan.json"
    plans = {(4, 80): PLAN, (8, 81): Plan(MODEL, 2000)}
    save_plans(path, 1, plans)
    assert load_plans(path, 1, MODEL) == plans
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "model, rank, says",
    [
        (MODEL.replace("hidden_size=64", "hidden_size=128"), 0, "hidden_size=64, this run has hidden_size=128"),
        (MODEL.replace(", 'norm'", ""), 0, "recompute_modules=['mlp', 'norm'], this run has recompute_modules=['mlp']"),
        (MODEL + " tensor_model_parallel_size=2", 0, "tensor_model_parallel_size=None, this run has"),
        (MODEL, 1, "is the plan of rank 0, this is rank 1"),
    ],
)
def test_the_first_difference_is_named(tmp_path, model, rank, says):
    save_plans(tmp_path / "plan", 0, {(4, 80): PLAN})
    with pytest.raises(SettingError) as error:
        load_plans(tmp_path / "plan", rank, model)
    assert f"--swap-plan {tmp_path / 'plan'}: " in str(error.value) and says in str(error.value)


def test_a_plan_of_several_ranks_is_not_one_of_one(tmp_path):
    save_plans(rank_file(str(tmp_path / "plan[1]"), 1, 2), 1, {(4, 80): PLAN})
    with pytest.raises(SettingError, match=r"is not there, but plan\[1\].rank1 is, of a run with more ranks"):
        load_plans(tmp_path / "plan[1]", 0, MODEL)
    with pytest.raises(SettingError, match="cannot be read"):
        load_plans(tmp_path / "plan1", 0, MODEL)


def test_versions_and_damage(tmp_path):
    path = tmp_path / "plan"
    save_plans(path, 0, {(4, 80): PLAN})
    content = json.loads(path.read_text())
    content["plans"]["4x80"]["version"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(SettingError, match="plan version 99"):
        load_plans(path, 0, MODEL)
    path.write_text(json.dumps({**content, "version": 7}))
    with pytest.raises(SettingError, match="file version 7, this release reads 1"):
        load_plans(path, 0, MODEL)
    for damaged in ("{", '{"version": 1, "plans"', "[" * 200_000):
        path.write_text(damaged)
        with pytest.raises(SettingError, match=r"is damaged \(.*\): search again"):
            load_plans(path, 0, MODEL)
    path.write_text(json.dumps({**content, "plans": []}))
    with pytest.raises(SettingError, match=r"is damaged \(.*\): search again"):
        load_plans(path, 0, MODEL)
    path.write_text(json.dumps({**content, "plans": {}}))
    with pytest.raises(SettingError, match="holds no plan: search again"):
        load_plans(path, 0, MODEL)
    with pytest.raises(SettingError, match="cannot be read"):
        load_plans(tmp_path / "none", 0, MODEL)


def test_files_of_ranks():
    assert str(rank_file("a/plan.json", 0, 1)) == "a/plan.json"
    assert str(rank_file("a/plan.json", 3, 8)) == "a/plan.json.rank3"
    assert str(rank_file("a/{rank}/plan.json", 3, 8)) == "a/3/plan.json"


def test_equal_fingerprints_have_no_difference():
    assert first_difference(MODEL, MODEL) == ""


def test_size_classes_are_four_to_an_octave():
    assert [size_class(n) for n in range(5)] == [0, 1, 2, 3, 4]
    sizes = range(4, 5000)
    assert all(size_class(a) <= size_class(a + 1) <= size_class(a) + 1 for a in sizes)
    assert all(size_class(2 * a) == size_class(a) + 4 for a in sizes)
