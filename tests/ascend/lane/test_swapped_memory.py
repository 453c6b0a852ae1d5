"""Optimizer state in swapped memory, which the fake runtime, like a driver, does not copy: only kernels reach it."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from npu_device import COUNTERS, fake, same_bits

from mindspeed_swap.core.host_pool import HostPool
from mindspeed_swap.errors import SettingError
from mindspeed_swap.units import MIB
from mindspeed_swap.virtual_optimizer import swap_tensor
from mindspeed_swap.virtual_optimizer.amount import VirtualOptions
from mindspeed_swap.virtual_optimizer.swap_tensor import is_swap_tensor, mark_swap_tensor, to_host
from mindspeed_swap.virtual_optimizer.virtual_optimizer import VirtualOptimizer

SHAPES = ((64, 33), (7,), (30, 50), (1,))
# Patterns that a kernel for floats may change: a signalling NaN with a payload, a denormal, -0.0.
ODD_BITS = torch.tensor([0x7FA12345, 1, -(2**31), 0x3F800000], dtype=torch.int32)


def make(params=None, dtype=torch.float32):
    random = torch.Generator().manual_seed(3)
    values = params or [torch.randn(shape, generator=random) for shape in SHAPES]
    params = [torch.nn.Parameter(value.to(dtype).npu()) for value in values]
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def train(optimizer, steps):
    for step in steps:
        random = torch.Generator().manual_seed(100 + step)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=random).npu()
        optimizer.step()


def attach(npu, optimizer, mode="auto", amount=None, host_bytes=64 * MIB):
    virtual = VirtualOptimizer(VirtualOptions((amount,), mode), npu, HostPool(npu, host_bytes))
    virtual.attach([optimizer])
    return virtual


def moments(optimizer):
    states = (optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"])
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def equal(found, plain) -> bool:
    params = zip(found.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True)
    return all(same_bits(a, b) for a, b in params) and all(
        same_bits(to_host(a), to_host(b)) for a, b in zip(moments(found), moments(plain), strict=True)
    )


# ---- the memory
def test_a_direct_copy_is_refused():
    """Control: the tests below would fail if anything copied directly. In a process of its own: with the task queue, as
    here, torch_npu's first error of this kind ends everything."""
    code = """
import torch, torch_npu
memory = torch_npu.empty_with_swapped_memory([4096], dtype=torch.uint8, device="npu:0")
for copy in memory.cpu, lambda: memory.copy_(torch.zeros(4096, dtype=torch.uint8)):
    try:
        copy()
    except RuntimeError:
        print("refused")
"""
    environment = os.environ | {"TASK_QUEUE_ENABLE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("refused\n") == 2, done.stdout + done.stderr


def test_bits_go_in_and_out_unchanged(npu):
    refused = COUNTERS["refused_copies"]()
    memory = npu.swapped_memory(16).view(torch.float32)
    npu.write_mapped(memory, ODD_BITS.view(torch.float32))
    assert same_bits(npu.host_copy(memory), ODD_BITS.view(torch.float32))
    mark_swap_tensor(memory, npu)
    assert same_bits(to_host(memory[1:3]), ODD_BITS[1:3].view(torch.float32))
    for nbytes in (16, 7):  # in words, and not
        buffer, again, stream = npu.empty(16), npu.empty(16).fill_(0), npu.new_stream()
        npu.wait(stream, npu.record(npu.compute_stream()))
        raw = memory.view(torch.uint8)
        npu.copy(buffer[:nbytes], raw[:nbytes], stream)
        npu.copy(raw[:nbytes], buffer[:nbytes], stream)
        npu.copy(again[:nbytes], raw[:nbytes], stream)
        npu.synchronize()
        assert torch.equal(again[:nbytes].cpu(), ODD_BITS.view(torch.uint8)[:nbytes])
    assert COUNTERS["refused_copies"]() == refused


def test_it_is_no_device_memory_and_is_not_ours_to_move(npu):
    before, allocated = fake.fakecann_swapped_blocks(), npu.memory().allocated_bytes
    memory = npu.swapped_memory(MIB)
    assert npu.memory().allocated_bytes == allocated and fake.fakecann_swapped_blocks() == before + 1
    assert not npu.owns(memory) and not npu.owns(memory[5:])
    assert npu.owns(torch.empty(10, device="npu"))
    del memory
    assert fake.fakecann_swapped_blocks() == before


def test_arenas_are_made_one_at_a_time(npu, monkeypatch):
    inside, most = [0], [0]
    made = torch_npu.empty_with_swapped_memory

    def counting(*args, **kwargs):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.02)
        inside[0] -= 1
        return made(*args, **kwargs)

    monkeypatch.setattr(torch_npu, "empty_with_swapped_memory", counting)
    threads = [threading.Thread(target=npu.swapped_memory, args=(4096,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


def test_a_torch_npu_without_it_is_told_what_is_needed(npu, monkeypatch):
    monkeypatch.delattr(torch_npu, "empty_with_swapped_memory")
    with pytest.raises(SettingError, match=r"25\.0\.RC1, CANN 8\.1\.RC1 .* found: torch 2\.13\.0.*, torch_npu 2\.13"):
        npu.swapped_memory(4096)


# ---- the virtual optimizer
@pytest.mark.parametrize("mode", ["auto", "mapped", "streamed"])
def test_training_gives_the_same_bits(npu, mode):
    refused, operands = COUNTERS["refused_copies"](), COUNTERS["swapped_operands"]()
    plain, optimizer = make(), make()
    virtual = attach(npu, optimizer, mode)
    assert virtual.summary()["mode"] == ("streamed" if mode == "streamed" else "mapped")
    assert all(is_swap_tensor(moment) and not npu.owns(moment) for moment in moments(optimizer))
    for step in range(3):
        train(plain, range(step, step + 1))
        train(optimizer, range(step, step + 1))
        assert equal(optimizer, plain)
    assert COUNTERS["refused_copies"]() == refused and COUNTERS["swapped_operands"]() > operands


@pytest.mark.parametrize("mode", ["mapped", "streamed"])
def test_saving_and_loading(npu, mode, tmp_path):
    """``state_dict`` holds host copies; a load goes to the same memory again."""
    plain, optimizer = make(), make()
    attach(npu, optimizer, mode)
    train(plain, range(2))
    train(optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    values = [parameter.detach().cpu() for parameter in optimizer.param_groups[0]["params"]]
    resumed = make(values)
    attach(npu, resumed, mode)
    places = [moment.data_ptr() for moment in moments(resumed)]
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    assert places == [moment.data_ptr() for moment in moments(resumed)]
    train(plain, range(2, 4))
    train(resumed, range(2, 4))
    assert equal(resumed, plain)


def test_megatrons_distributed_optimizer_reads_and_writes_it(npu):
    """Its two accessors, which all its checkpoint formats go through, with our patches around them."""
    from mindspeed_swap.patches.distributed_optimizer import PATCHES

    wrappers = {target.rsplit(".", 1)[1]: wrapper for target, wrapper in PATCHES}
    optimizer, plain = make(), make()
    attach(npu, optimizer)
    train(optimizer, range(2))
    train(plain, range(2))
    parameters, others = optimizer.param_groups[0]["params"], plain.param_groups[0]["params"]
    part = SimpleNamespace(optimizer=optimizer, model_param_group_index_map={"weight": (0, 1)})
    refused = COUNTERS["refused_copies"]()

    def get(self, model_param):
        return {"param": parameters[1], **self.optimizer.state[parameters[1]]}

    def set_(self, model_param, tensors):
        for key, value in get(self, model_param).items():
            if isinstance(tensors[key], torch.Tensor):
                value.copy_(tensors[key])

    tensors = wrappers["_get_main_param_and_optimizer_states"](get)(part, "weight")
    assert tensors["exp_avg"].device.type == "cpu" and tensors["param"] is parameters[1]
    assert same_bits(tensors["exp_avg"], plain.state[others[1]]["exp_avg"])
    new = {key: torch.full_like(value.detach(), 2.0, device="cpu") for key, value in tensors.items() if key != "step"}
    with torch.no_grad():
        wrappers["_set_main_param_and_optimizer_states"](set_)(part, "weight", new)
    state = optimizer.state[parameters[1]]
    assert is_swap_tensor(state["exp_avg"]) and bool((to_host(state["exp_avg"]) == 2).all())
    assert bool((parameters[1].cpu() == 2).all()) and COUNTERS["refused_copies"]() == refused


def test_main_parameters_stay(npu):
    optimizer = make()
    virtual = VirtualOptimizer(VirtualOptions((None,), "auto", True), npu, HostPool(npu, 64 * MIB))
    with pytest.raises(SettingError, match="--virtual-optimizer-master: on npu main parameters stay"):
        virtual.attach([optimizer], optimizer.param_groups[0]["params"])


def test_printing(npu):
    optimizer = make()
    attach(npu, optimizer)
    train(optimizer, range(1))
    moment = moments(optimizer)[0]
    assert repr(to_host(moment)).startswith("tensor([[")


def test_the_wrappers_of_torchs_own_methods(npu):
    memory = npu.swapped_memory(16).view(torch.float32)
    mark_swap_tensor(memory, npu)
    copy_ = swap_tensor.swap_tensor_copy_wrapper(torch.Tensor.copy_)
    cpu = swap_tensor.swap_tensor_func_wrapper(torch.Tensor.cpu, "cpu")
    assert copy_(memory, torch.arange(4.0)) is memory
    assert torch.equal(cpu(memory), torch.arange(4.0))


def test_a_number_moves_as_much_and_no_more_than_the_budget(npu):
    optimizer = make()
    virtual = attach(npu, optimizer, amount=10000)
    assert 0 < virtual.moments_bytes <= 10000
    with pytest.raises(SettingError, match="--swap-host-memory"):
        attach(npu, make(), host_bytes=4096)
