"""bf16 matrix products through fp32, where the CPU has no instructions for bf16: torch's own loops then take ten to a
hundred times as long, and most of a step of a model in bf16 would be them. As on a GPU, sums are in fp32 and only the
result is rounded.

They stand below autograd, and what they widen is no memory of the simulated device: nothing else of a step changes.
"""
from __future__ import annotations

import contextlib
import sys

import torch

BELOW_AUTOGRAD = "CPU"
NAMES = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")
ZERO = torch.zeros(1, dtype=torch.bfloat16)
LIBRARY = torch.library.Library("aten", "IMPL")


def install() -> None:
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    # An older torch does not give its kernels out, a build without oneDNN does not say: then it takes its time.
    if hasattr(torch.library, "get_kernel") and has_instructions is not None and not has_instructions():
        for name in NAMES:
            kernel = _through_fp32(torch.library.get_kernel(f"aten::{name}", BELOW_AUTOGRAD))
            LIBRARY.impl(name, kernel, BELOW_AUTOGRAD, with_keyset=True, allow_override=True)


def _through_fp32(own):
    def kernel(keys, *args, **options):
        if args[0].dtype != torch.bfloat16:
            return own.call_boxed(keys, *args, **options)
        if options.get("beta") == 0:  # attention adds nothing to an array that is not filled
            args = (ZERO, *args[1:])
        with _not_of_the_device():
            results = own.call_boxed(keys, *(_to(torch.float32, torch.bfloat16, each) for each in args), **options)
        if isinstance(results, torch.Tensor):
            return _to(torch.bfloat16, torch.float32, results)
        return tuple(_to(torch.bfloat16, torch.float32, each) for each in results)

    return kernel


def _to(dtype: torch.dtype, those: torch.dtype, value):
    fits = isinstance(value, torch.Tensor) and value.dtype == those
    return torch.ops.aten._to_copy(value, dtype=dtype) if fits else value


def _not_of_the_device():
    device = sys.modules.get("mindspeed_swap.sim.device")
    return device.host_memory() if device and device.installed() else contextlib.nullcontext()
