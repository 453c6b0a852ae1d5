"""What cannot work is said in one message; what is not ours to move is counted."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch_npu
from npu_device import manager_of

from mindspeed_swap.core.accelerator import get_accelerator, prepare_device
from mindspeed_swap.core.accelerator.npu import NpuAccelerator, check_npu
from mindspeed_swap.errors import SettingError


@pytest.fixture(autouse=True)
def _forget():
    get_accelerator.cache_clear()
    yield
    get_accelerator.cache_clear()


@pytest.mark.parametrize("choice", ["auto", "npu"])
def test_it_is_chosen(monkeypatch, choice):
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", choice)
    prepare_device("--smart-swap")
    accelerator = get_accelerator()
    assert isinstance(accelerator, NpuAccelerator) and accelerator.name == "npu"
    accelerator.close()


@pytest.mark.parametrize("name", ["mem_get_info", "get_per_process_memory_fraction"])
def test_an_old_torch_npu_is_told_what_is_needed(monkeypatch, name):
    monkeypatch.delattr(torch.npu, name)
    with pytest.raises(SettingError, match=rf"lacks {name}.*driver 25\.0\.RC1, CANN 8\.1\.RC1.*torch_npu 2\.13\.0"):
        check_npu()


def test_a_pluggable_allocator_is_refused(monkeypatch):
    monkeypatch.setattr(torch.npu, "get_allocator_backend", lambda: "pluggable")
    with pytest.raises(SettingError, match="--smart-swap cannot be used with a pluggable NPU allocator"):
        check_npu("--smart-swap")
    monkeypatch.undo()
    monkeypatch.setenv("PYTORCH_NO_NPU_MEMORY_CACHING", "1")
    with pytest.raises(SettingError, match="unset it"):
        check_npu()


def test_no_npu(monkeypatch):
    monkeypatch.setattr(torch.npu, "device_count", lambda: 0)
    with pytest.raises(SettingError, match="no NPU found"):
        check_npu()


def test_internal_formats_pass_through_and_are_counted(npu, monkeypatch, capsys):
    private = torch.empty(64 << 10, device="npu")
    NZ = 29
    original = torch_npu.get_npu_format
    address = private.data_ptr()
    monkeypatch.setattr(torch_npu, "get_npu_format", lambda t: NZ if t.data_ptr() == address else original(t))
    with manager_of(npu) as manager:
        manager.begin_step()
        with manager.forward(0):
            passed = [manager._pack(private) for _ in range(3)]
            moved = manager._pack(torch.empty(64 << 10, device="npu"))
        assert manager.unpack(passed[0]).data_ptr() == private.data_ptr()
        assert manager.stats.saved == 1 and moved.saved is not None
    assert npu.passed_formats == {NZ: 3}
    npu.close()
    said = capsys.readouterr().out
    assert said.count("NPU-internal format 29") == 1 and "3 in format 29" in said


def test_under_transfer_to_npu_it_is_still_the_npu():
    """There torch.cuda answers for the NPU, and flags for CUDA are true on its tensors."""
    code = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu
assert torch.cuda.device_count() == 1 and torch.empty(3, device="cuda").device.type == "npu"
from mindspeed_swap.core.accelerator import get_accelerator, prepare_device
prepare_device("--smart-swap")
accelerator = get_accelerator()
assert accelerator.name == "npu" and accelerator.owns(torch.empty(3, device="cuda"))
block = accelerator.empty(1000)
block.copy_(torch.ones(1000, dtype=torch.uint8))
assert int(block.cpu().sum()) == 1000
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
