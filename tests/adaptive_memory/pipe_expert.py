"""Pretraining whose MLP is an autograd Function with arguments that are no tensors. Run by test_function.py."""
import mindspeed_swap.megatron_adaptor  # noqa: F401, I001

import pretrain_gpt
import torch
from megatron.core.transformer.mlp import MLP

from mindspeed_swap.adaptive_memory import adapt_mem_func_wrapper


class PipeExpert(torch.autograd.Function):
    """up, gelu of a kind, down; ``times`` and ``name`` stand for what Functions take besides tensors."""

    @staticmethod
    def forward(ctx, hidden, up, down, times, name):
        wide = hidden @ up.t()
        active = torch.nn.functional.gelu(wide) * times
        ctx.save_for_backward(hidden, up, down, wide, active)
        ctx.times, ctx.name = times, name
        return active @ down.t(), None

    @staticmethod
    def backward(ctx, grad, _):
        hidden, up, down, wide, active = ctx.saved_tensors
        assert ctx.name == "expert"
        with torch.enable_grad():
            again = wide.detach().requires_grad_()
            torch.autograd.backward(torch.nn.functional.gelu(again) * ctx.times, grad @ down)
        grads = again.grad
        flat = grads.flatten(0, 1)
        return (
            grads @ up, flat.t() @ hidden.flatten(0, 1), grad.flatten(0, 1).t() @ active.flatten(0, 1), None, None
        )  # fmt: skip


def forward(self, hidden_states, *args, **kwargs):
    width = self.linear_fc2.weight.shape[1]
    up, down = self.linear_fc1.weight[:width], self.linear_fc2.weight
    with torch.no_grad():  # so that the module takes longer to run again than the Function in it, which frees as much
        for _ in range(4):
            torch.nn.functional.gelu(hidden_states @ up.t())
    return adapt_mem_func_wrapper(PipeExpert, hidden_states, up, down, 2, "expert")


MLP.forward = forward

if __name__ == "__main__":
    pretrain_gpt.main()
