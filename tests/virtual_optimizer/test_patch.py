"""The patch of Megatron's distributed optimizer, on stand-ins: what small real runs do not come to."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from adams import FusedAdam, parameters

from mindspeed_swap.patches import distributed_optimizer as patch


def state_dict(self):
    """Megatron's, where it wants to know the step."""
    inner = self.optimizer.state_dict()
    (step,) = {entries["step"].item() for entries in inner["state"].values()}
    return step


def test_a_rank_without_parameters_has_a_state_dict(sim):
    """Case 25: every shard of this rank is empty."""
    rank = SimpleNamespace(optimizer=torch.optim.AdamW([{"params": []}, {"params": []}]))
    with pytest.raises(ValueError, match="not enough values"):
        state_dict(rank)
    wrapped = patch._state_dict(state_dict)
    assert wrapped(rank) == 0
    rank.optimizer.param_groups[0]["step"] = 7.0  # as Megatron leaves it after a load
    assert wrapped(rank) == 7
    assert not rank.optimizer.state
    assert patch._state_dict(lambda self: "stub")(SimpleNamespace(optimizer=None)) == "stub"


def test_the_step_is_set_by_load_state_dict_alone():
    calls = []
    wrapped = patch._set_main_param_and_optimizer_states(lambda *args: calls.append(args))
    tensors = {"param": 1, "step": torch.tensor(3.0)}
    optimizer = torch.optim.AdamW(parameters()[:1])
    part = SimpleNamespace(optimizer=optimizer, model_param_group_index_map={"model parameter": (0, 0)})
    wrapped(part, "model parameter", tensors)
    assert calls == [(part, "model parameter", {"param": 1, "step": None})]
    assert tensors["step"] == 3


def test_parts_and_main_parameters():
    params = parameters()
    dense = SimpleNamespace(optimizer=FusedAdam(params[:2]), shard_fp32_from_float16_groups=[[params[0], None], []])
    experts = SimpleNamespace(optimizer=FusedAdam(params[2:]), fp32_from_float16_groups=[params[2:]])
    stub = SimpleNamespace(optimizer=None)
    assert patch._parts(SimpleNamespace(chained_optimizers=[dense, stub, experts])) == [dense, experts]
    assert patch._parts(dense) == [dense]
    assert list(patch._masters(dense)) == [params[0]]
    assert len(list(patch._masters(experts))) == len(params) - 2
