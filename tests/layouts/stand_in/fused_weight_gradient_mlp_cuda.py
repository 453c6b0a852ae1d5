"""In place of apex's kernel of that name: adds a linear layer's weight gradient into the gradient buffer."""
import torch


def wgrad_gemm_accum_fp32(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(torch.matmul(grad_output.t(), input).to(main_grad.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
