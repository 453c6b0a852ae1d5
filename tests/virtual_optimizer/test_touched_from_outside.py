"""What others do to the optimizer between its steps: state taken away, groups changed, state printed or loaded."""
from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
from adams import MAKES, FusedAdam, attach, differences, groups_of, parameters, set_gradients, train
from overlapped import Training

from mindspeed_swap.sim import device

SHAPES = ((256, 256),) * 6
FORGET = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "assign": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "pop": lambda optimizer, parameter: optimizer.state.pop(parameter),
    "del": lambda optimizer, parameter: optimizer.state.__delitem__(parameter),
    "entry": lambda optimizer, parameter: optimizer.state.__setitem__(parameter, {}),
}


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
@pytest.mark.parametrize("make", ["adamw-fused", "step-in-group"])
@pytest.mark.parametrize("how", FORGET)
def test_state_that_was_taken_away_starts_anew(sim, how, make, mode):
    def trained(virtual):
        optimizer = MAKES[make](groups_of(given := parameters()))
        if virtual:
            attach(sim, optimizer, mode=mode)
        train(optimizer, range(3))
        FORGET[how](optimizer, given[0])
        train(optimizer, range(3, 5))
        return optimizer

    assert differences(trained(True), trained(False)) == []


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
@pytest.mark.parametrize("unused", [1, 3])
def test_a_step_in_the_group_counts_although_the_last_slice_has_no_gradient(sim, mode, unused):
    def trained(virtual):
        optimizer = FusedAdam([{"params": (given := parameters(SHAPES[:3])), "lr": 1e-2}])
        if virtual:
            attach(sim, optimizer, mode=mode)
        for step in range(4):
            set_gradients(given, step)
            for parameter in given[len(given) - unused :]:
                parameter.grad = None
            optimizer.step()
        return optimizer

    ours, plain = trained(True), trained(False)
    assert ours.param_groups[0]["step"] == plain.param_groups[0]["step"] == 4
    assert all(map(torch.equal, ours.param_groups[0]["params"], plain.param_groups[0]["params"]))


@pytest.mark.parametrize("what", ["removed", "reversed", "removed and reversed"])
def test_groups_that_change(sim, what):
    def trained(virtual):
        given = parameters(SHAPES)
        optimizer = MAKES["adamw-fused"]([{"params": given[:4], "lr": 1e-2}, {"params": given[4:], "lr": 1e-3}])
        if virtual:
            attach(sim, optimizer)
        for step in range(4):
            if step == 2 and "removed" in what:
                optimizer.param_groups[0]["params"].pop(0)
            if step == 2 and "reversed" in what:
                optimizer.param_groups.reverse()
            set_gradients(given, step)
            optimizer.step()
        return given

    assert all(map(torch.equal, trained(True), trained(False)))


def test_printed_state_is_what_the_step_has_written(sim):
    device.set_link(0.01, 0.0)

    def printed(overlaps):
        training = Training(sim, overlaps)
        for _ in range(4):
            training.step()
        held = training.pipeline.held_bytes if overlaps else 0
        return held, re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", repr(training.optimizer.state))

    (held, ours), (_, plain) = printed(True), printed(None)
    assert held > 0 and ours == plain


def test_a_moment_of_another_shape_is_refused(sim):
    """Plain torch refuses it in the next step, as its kernels do not broadcast what they write to."""
    optimizer = MAKES["adamw-foreach"]([{"params": parameters(((300, 500),))}])
    attach(sim, optimizer)
    train(optimizer, range(2))
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(500)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of shape \[500\] does not fit .* \[300, 500\]"):
        optimizer.load_state_dict(state)


def test_a_number_is_trimmed_to_whole_pages_of_what_is_free(sim, capfd):
    optimizer = MAKES["adam"]([{"params": parameters(((128, 1),) * 600)}])
    virtual = attach(sim, optimizer, amount=10**6, host_bytes=512 * 1001)
    assert 512 * 980 < virtual.moments_bytes <= 512 * 1001
    assert "0.5 MiB of host memory free: trimmed (--swap-host-memory 0.01 would do)" in capfd.readouterr().out
