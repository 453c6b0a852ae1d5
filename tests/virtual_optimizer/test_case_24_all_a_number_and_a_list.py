"""State in host memory failed on resume: saved, loaded and printed for `all`, one number, and a list of them."""
import io

import pytest
import torch
from adams import differences, groups_of, parameters, train
from simulated import new_pool

from mindspeed_swap.sim import device
from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer.amount import VirtualOptions, parse_amounts
from mindspeed_swap.virtual_optimizer.virtual_optimizer import VirtualOptimizer

STAGE, STAGES = 1, 2
WORDS = {"all": ["all"], "number": ["0.0005"], "list": ["0", "0.0007"]}


def virtual_of(sim, optimizer, words, mode):
    options = VirtualOptions(parse_amounts(words, STAGES), mode)
    virtual = VirtualOptimizer(options, sim, new_pool(sim, 64 * MIB), STAGE, STAGES)
    virtual.attach([optimizer])
    return virtual


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_case_24_saved_loaded_and_printed(sim, words, mode):
    straight = torch.optim.AdamW(groups_of(parameters()))
    train(straight, range(4))

    first = torch.optim.AdamW(groups_of(parameters()))
    assert virtual_of(sim, first, words, mode).moments_bytes > 0
    train(first, range(2))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    params = [p for group in first.param_groups for p in group["params"]]
    assert all("tensor(" in repr(first.state[p][key]) for p in params for key in ("exp_avg", "exp_avg_sq"))

    again = parameters()
    for p, q in zip(again, params, strict=True):
        p.data.copy_(q.data)
    second = torch.optim.AdamW(groups_of(again))
    virtual_of(sim, second, words, mode)
    file.seek(0)
    with device.host_memory():
        state = torch.load(file, weights_only=True)
    second.load_state_dict(state)
    train(second, range(2, 4))
    assert differences(second, straight) == []
