"""What of the CUDA accelerator can be asked without a GPU: settings that cannot work, imports that do nothing."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")

CHECK = """
import torch
from mindspeed_swap.core.accelerator.cuda import check_allocator
{before}
try:
    check_allocator("--smart-swap")
except ValueError as error:
    print(error)
print("initialised:", torch.cuda.is_initialized())
"""
PLUGGABLE = """
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
change_current_allocator(CUDAPluggableAllocator("libc.so.6", "malloc", "free"))
"""


def run(before: str = "", **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(before=before)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_native_allocator_is_accepted_and_no_context_is_made():
    assert run() == "initialised: False\n"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_cuda_malloc_async_is_refused(variable):
    said = run(**{variable: "backend:cudaMallocAsync"})
    assert "--smart-swap" in said and "backend:cudaMallocAsync" in said and "initialised: False" in said


def test_a_pluggable_allocator_is_refused():
    said = run(PLUGGABLE)
    assert "--smart-swap" in said and "pluggable" in said and "memory-fragmentation" in said


def test_no_caching_is_refused():
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in run(PYTORCH_NO_CUDA_MEMORY_CACHING="1")


@pytest.mark.skipif(torch._C._cuda_getDeviceCount() > 0, reason="there is a GPU")
def test_without_a_gpu_the_error_says_so():
    from mindspeed_swap.core.accelerator.cuda import CudaAccelerator

    with pytest.raises(ValueError, match="no CUDA device"):
        CudaAccelerator()
