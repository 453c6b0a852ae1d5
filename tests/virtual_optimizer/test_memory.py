"""What moves and what it frees: the amount, the device's own figures, the host's budget."""
from __future__ import annotations

import gc

import pytest
import torch
from adams import MAKES, attach, differences, groups_of, parameters, train

from mindspeed_swap.errors import SettingError
from mindspeed_swap.sim import device
from mindspeed_swap.virtual_optimizer.arena import choose, moment_bytes

LARGER = ((256, 300), (64,), (512, 512), (1000, 200), (3,))


def adamw(shapes=LARGER):
    return MAKES["adamw-foreach"](groups_of(parameters(shapes)))


@pytest.mark.parametrize("amount", [1, 11, 12, 13, 255, 1000, 800_000, 2_000_000, 4_000_000, 4_312_000, 1 << 40])
def test_never_above_and_less_than_one_moment_below(sim, amount):
    optimizer = adamw()
    everything = choose(optimizer, sim, None)
    taken = choose(optimizer, sim, amount)
    assert moment_bytes(taken) <= amount
    chosen = {(id(unit.parameter), unit.key) for unit in taken}
    left = [unit.nbytes for unit in everything if (id(unit.parameter), unit.key) not in chosen]
    assert not left or amount - moment_bytes(taken) < min(left)


def test_one_amount_for_all_optimizers_of_a_rank(sim):
    first, second = adamw(), adamw()
    amount = 5_000_000
    virtual = attach(sim, first, second, amount=amount)
    largest = max(p.nbytes for p in parameters(LARGER))
    assert amount - largest < virtual.moments_bytes <= amount
    train(first, range(2))
    train(second, range(2))
    assert differences(first, second) == []


@pytest.mark.parametrize("amount", [5_000_000, 1_000_000])
def test_one_amount_for_optimizers_that_come_one_after_the_other(sim, amount):
    """Megatron builds one for each model of a script that has several."""
    first, second, plain = adamw(), adamw(), adamw()
    virtual = attach(sim, first, amount=amount)
    virtual.attach([second])
    assert 0 < virtual.moments_bytes <= amount
    for optimizer in (first, second, plain):
        train(optimizer, range(2))
    assert differences(first, plain) == differences(second, plain) == []


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
def test_device_memory(sim, mode):
    """At the end of a step it is lower by what moved; at the peak too, but for the buffers."""

    def used(virtual):
        gc.collect()
        base = device.memory_allocated()
        optimizer = MAKES["adamw-single"](groups_of(parameters(LARGER)))
        moved = attach(sim, optimizer, mode=mode).moments_bytes if virtual else 0
        train(optimizer, range(2))
        device.reset_peak()
        optimizer.step()
        gc.collect()
        return device.memory_allocated() - base, device.max_memory_allocated() - base, moved

    end, peak, _ = used(False)
    virtual_end, virtual_peak, moved = used(True)
    assert moved == 2 * sum(p.nbytes for p in parameters(LARGER))
    assert end - virtual_end == pytest.approx(moved, rel=0.001)
    assert peak - virtual_peak > 0.75 * moved  # three buffers of a 16th


def test_case_25_empty_shards_and_tensors_elsewhere_stay(sim):
    """Case 25: neither is given to the arena, and kernels see what they saw before."""
    with device.host_memory():
        on_host = torch.nn.Parameter(torch.ones(40))
    params = [torch.nn.Parameter(torch.empty(0)), *parameters(), on_host, torch.nn.Parameter(torch.empty(0, 5))]
    optimizer = torch.optim.AdamW(params)
    virtual = attach(sim, optimizer)
    train(optimizer, range(3))
    again = [torch.nn.Parameter(torch.empty(0)), *parameters(), torch.nn.Parameter(torch.ones(40))]
    plain = torch.optim.AdamW([*again, torch.nn.Parameter(torch.empty(0, 5))])
    train(plain, range(3))
    assert differences(optimizer, plain) == []
    assert virtual.moments_bytes == 2 * sum(p.nbytes for p in parameters())


def test_a_group_without_parameters(sim):
    for make in MAKES.values():
        optimizer = make([{"params": []}, {"params": parameters()}])
        attach(sim, optimizer)
        train(optimizer, range(2))
        plain = make([{"params": []}, {"params": parameters()}])
        train(plain, range(2))
        assert differences(optimizer, plain) == []


# ---- host memory
def test_all_must_fit_whole(sim):
    with pytest.raises(SettingError, match=r"--virtual-optimizer all: .* needs 4\.1 MiB of host memory per rank") as e:
        attach(sim, adamw(), host_bytes=2 << 20)
    assert "give --swap-host-memory 0.01 or more" in str(e.value)


def test_a_number_is_trimmed_in_one_line(sim, capsys):
    virtual = attach(sim, adamw(), amount=4_000_000, host_bytes=2 << 20)
    assert 1_500_000 < virtual.moments_bytes <= 2 << 20
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert "trimmed (--swap-host-memory" in out[0] and "2.0 MiB of host memory free" in out[0]


def test_an_amount_too_small_for_anything_is_an_error(sim):
    with pytest.raises(SettingError, match=r"--virtual-optimizer: .* is less than its smallest moment"):
        attach(sim, adamw(), amount=11)


def test_not_for_other_optimizers(sim):
    with pytest.raises(SettingError, match="--virtual-optimizer: SGD is no Adam"):
        attach(sim, torch.optim.SGD(parameters(), lr=1e-3))


def test_the_line_in_the_log(sim, capsys):
    attach(sim, adamw(), mode="mapped")
    line = "[mindspeed_swap] virtual optimizer: 4.1 MiB of moments in host memory (mapped), stage 0 of 1\n"
    assert capsys.readouterr().out == line
