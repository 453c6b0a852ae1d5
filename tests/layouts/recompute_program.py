"""Megatron's CheckpointWithoutOutput as a machine without Transformer Engine has it, with our patches or without them.

Run by test_case_39: python recompute_program.py plain|patched
"""
import mindspeed_swap.megatron_adaptor as adaptor  # noqa: I001  before anything of Megatron

import sys

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from mindspeed_swap import runtime
from mindspeed_swap.options import Options

# What the simulated device has mended for its own runs.
for name in ("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast"):
    delattr(random, name)

if sys.argv[1] == "patched":
    adaptor.activate(Options(True, None, None, "test"))

torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
random.model_parallel_cuda_manual_seed(1)


def gradients(recompute: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    hidden = weight * 2.0
    for _ in range(2):
        if recompute:
            checkpoint = random.CheckpointWithoutOutput()
            normed = checkpoint.checkpoint(torch.tanh, hidden)
            hidden = hidden + normed @ weight
            checkpoint.discard_output_and_register_recompute(hidden)
        else:
            hidden = hidden + torch.tanh(hidden) @ weight
    hidden.sum().backward()
    return [weight.grad]


for found, expected in zip(gradients(True), gradients(False), strict=True):
    assert torch.equal(found, expected)
runtime.stop()
