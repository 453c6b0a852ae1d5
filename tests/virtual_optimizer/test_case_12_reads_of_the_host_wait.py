"""Host memory read before the copy had drained: whoever reads swapped state gets what the step has written."""
import pytest
import torch
from adams import attach, differences, groups_of, parameters, same, train

from mindspeed_swap.sim import device
from mindspeed_swap.virtual_optimizer.swap_tensor import to_host

SLOW, FAST = 0.02, 16.0  # 10^9 bytes per second


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
def test_case_12_read_right_after_the_step(sim, mode):
    optimizer = torch.optim.AdamW(groups_of(parameters()))
    plain = torch.optim.AdamW(groups_of(parameters()))
    attach(sim, optimizer, mode=mode)
    train(plain, range(3))
    device.set_link(SLOW, FAST)  # what the step sends back is late
    train(optimizer, range(3))
    for ours, theirs in zip(optimizer.param_groups, plain.param_groups, strict=True):
        for p, q in zip(ours["params"], theirs["params"], strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                assert same(to_host(optimizer.state[p][key]), plain.state[q][key].contiguous())
    assert differences(optimizer, plain) == []


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
def test_case_12_saved_right_after_the_step(sim, mode, tmp_path):
    optimizer = torch.optim.AdamW(groups_of(parameters()))
    plain = torch.optim.AdamW(groups_of(parameters()))
    attach(sim, optimizer, mode=mode)
    train(plain, range(2))
    device.set_link(SLOW, FAST)
    train(optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state")
    with device.host_memory():
        state = torch.load(tmp_path / "state", weights_only=True)["state"]
    expected = plain.state_dict()["state"]
    assert all(same(state[n][key], expected[n][key]) for n in expected for key in ("exp_avg", "exp_avg_sq"))
