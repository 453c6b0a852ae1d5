"""Which accelerator a process gets, and that choosing one touches no other."""
from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindspeed_swap.core.accelerator import get_accelerator, prepare_device
from mindspeed_swap.core.accelerator.sim import SimAccelerator
from mindspeed_swap.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    get_accelerator.cache_clear()
    yield
    get_accelerator.cache_clear()


@pytest.fixture
def cuda_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """Stands in for the CUDA accelerator, so that the choice can be tested without a GPU."""
    module = types.ModuleType("cuda")
    module.CudaAccelerator = type("CudaAccelerator", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mindspeed_swap.core.accelerator.cuda", module)
    return module.CudaAccelerator


def test_sim_is_chosen_by_name_and_cached(sim: SimAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "sim")
    accelerator = get_accelerator()
    assert isinstance(accelerator, SimAccelerator) and accelerator.name == "sim"
    assert get_accelerator() is accelerator


@pytest.mark.parametrize("choice", ["auto", None])
def test_auto_never_simulates(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if choice is None:
        monkeypatch.delenv("MINDSPEED_SWAP_DEVICE", raising=False)
    else:
        monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", choice)
    with pytest.raises(SettingError, match="MINDSPEED_SWAP_DEVICE=sim"):
        get_accelerator()


def test_auto_takes_cuda_if_there(cuda_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("MINDSPEED_SWAP_DEVICE", raising=False)
    assert isinstance(get_accelerator(), cuda_class)


def test_cuda_by_name(cuda_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "cuda")
    assert isinstance(get_accelerator(), cuda_class)


def test_npu_goes_before_cuda(cuda_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as transfer_to_npu makes it
    torch_npu = types.SimpleNamespace(npu=types.SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)  # type: ignore[arg-type]
    module = types.ModuleType("npu")
    module.NpuAccelerator = type("NpuAccelerator", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mindspeed_swap.core.accelerator.npu", module)
    for choice in ("auto", "npu"):
        monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", choice)
        get_accelerator.cache_clear()
        assert isinstance(get_accelerator(), module.NpuAccelerator)


def test_an_npu_that_is_not_there_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", "npu")
    with pytest.raises(SettingError, match=r"torch_npu cannot be loaded.*CANN 8\.1\.RC1.*found: torch "):
        prepare_device("--smart-swap")


@pytest.mark.parametrize("choice", ["gpu", "", "SIM"])
def test_unknown_names_are_refused(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_SWAP_DEVICE", choice)
    with pytest.raises(SettingError, match="MINDSPEED_SWAP_DEVICE=.*auto, cuda, npu, sim"):
        get_accelerator()


def test_choosing_imports_nothing_it_does_not_need() -> None:
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        from mindspeed_swap.core.accelerator import device_choice, get_accelerator
        from mindspeed_swap.core import extension
        from mindspeed_swap.sim import device
        device_choice()
        new = set(sys.modules) - before
        unwanted = {"torch_npu", "torch.utils.cpp_extension"} | {
            f"mindspeed_swap.core.accelerator.{name}" for name in ("cuda", "npu", "sim")}
        assert not unwanted & new, unwanted & new
        assert not torch.cuda.is_initialized() and not device.installed()
        assert not device.is_device(torch.ones(3))
        """
    environment = os.environ | {"PYTHONPATH": ".", "MINDSPEED_SWAP_DEVICE": "sim"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
