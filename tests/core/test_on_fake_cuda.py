"""Runs ``tests/gpu`` without a GPU: torch's real caching allocator over the runtime of ``fake_cudart.cpp``.

Shows the allocator hook, its self-test and the accelerator's bookkeeping; not kernels, not overlap, not speed.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_swap.core.accelerator.cuda import _cuda_include_dirs
from mindspeed_swap.units import MIB

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA"),
    pytest.mark.skipif(not _cuda_include_dirs(), reason="no CUDA headers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


@pytest.fixture(scope="module")
def fake_runtime(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    includes = [flag for folder in _cuda_include_dirs() for flag in ("-isystem", folder)]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{library.name}", *includes]
    subprocess.run([*command, str(HERE / "fake_cudart.cpp"), "-o", str(library)], check=True)
    return library


def run_on(library: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "FAKE_CUDA_CAPACITY": str(256 * MIB),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **settings,
    }
    for name in ("MINDSPEED_SWAP_DEVICE", "MINDSPEED_SWAP_DEVICE_CAPACITY", "PYTORCH_CUDA_ALLOC_CONF"):
        environment.pop(name, None)
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("hook", ["1", "0"])
def test_gpu_tests_on_the_fake_runtime(fake_runtime, hook):
    files = ["tests/gpu/test_oom_guard.py", "tests/gpu/test_cuda_accelerator.py"]
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *files[1 - int(hook) :])
    done = run_on(fake_runtime, *arguments, MINDSPEED_SWAP_OOM_HOOK=hook)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout, done.stdout


def test_without_a_compiler_it_says_what_is_lost(fake_runtime, tmp_path):
    code = """
from mindspeed_swap.core.accelerator.cuda import CudaAccelerator
print(CudaAccelerator().on_pressure(lambda nbytes, attempt: True))
"""
    done = run_on(fake_runtime, "-c", code, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "interval peaks are lower bounds" in done.stdout and "no-such-compiler" in done.stdout
    assert done.stdout.endswith("False\n")
