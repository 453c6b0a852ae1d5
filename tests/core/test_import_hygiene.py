"""What importing the core brings along, and what it does not touch. Each in a fresh interpreter."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = sorted(path.stem for path in (ROOT / "mindspeed_swap" / "core").glob("*.py") if path.stem != "__init__")
PURE = ("trace", "plan", "retime", "simulate", "solve", "sweeps", "windows")
FOREIGN = ("megatron", "apex", "transformer_engine", "torch_npu", "triton")


def python(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_SWAP_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_the_core_brings_nothing_foreign_and_starts_nothing():
    """Not even what torch itself would bring: all that is there afterwards is ours or came with ``import torch``."""
    modules = ["mindspeed_swap.core", *(f"mindspeed_swap.core.{name}" for name in CORE)]
    modules += ["mindspeed_swap.core.accelerator", "mindspeed_swap.core.accelerator.base", "mindspeed_swap.sim.device"]
    modules += ["mindspeed_swap.core.accelerator.sim", "mindspeed_swap.core.accelerator.cuda"]
    result = python(f"""
import sys, threading, torch
before = set(sys.modules)
import importlib
for name in {modules!r}:
    importlib.import_module(name)
foreign = [m for m in sys.modules if m.split('.')[0] in {FOREIGN!r}]
assert not foreign, foreign
assert not torch.cuda.is_initialized()
assert not torch._C._cuda_isInBadFork() if hasattr(torch._C, '_cuda_isInBadFork') else True
assert threading.active_count() == 1
others = {{m.split('.')[0] for m in set(sys.modules) - before}} - {{'mindspeed_swap'}}
assert not {{o for o in others if o.split('.')[0] not in sys.stdlib_module_names and not o.startswith('torch')}}, others
from mindspeed_swap.sim import device
assert not device.installed() and device._extension is None
""")
    assert result.returncode == 0, result.stderr
    assert not result.stdout


@pytest.mark.parametrize("name", PURE)
def test_the_planner_needs_no_torch(name):
    result = python(f"""
import sys
sys.modules['torch'] = None
sys.modules['numpy'] = None
import mindspeed_swap.core.{name}
assert not any(m.startswith('torch.') for m in sys.modules)
""")
    assert result.returncode == 0, result.stderr


def test_the_device_is_told_by_its_type_alone():
    """Under torch_npu's transfer_to_npu the other ways say CUDA on an NPU. (The simulated device answers for them.)"""
    unsafe = ("is_" + "cuda", "torch.cuda." + "is_available")
    files = [path for folder in ("mindspeed_swap", "patches") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    found = [
        (path.name, word)
        for path in files
        if (ROOT / "mindspeed_swap" / "sim") not in path.parents
        for word in unsafe
        if word in path.read_text()
    ]
    assert not found
