// The operator of MindSpeed's SmartSwap documentation, its ACLNN call stubbed: a product and some scratch memory.
#include "NPUSwapManager.h"

#include <torch/extension.h>

std::vector<at::Tensor> npu_gmm(const at::Tensor& x, const at::Tensor& weight, int64_t scratch_bytes) {
  c10_npu::swap::NPUSwapManager::GetInstance().BeginHook("gmm_forward");
  c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(x);
  c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(weight);

  auto scratch = at::empty({scratch_bytes}, x.options().dtype(at::kByte));
  std::vector<at::Tensor> y{at::matmul(x, weight)};

  c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(y);
  c10_npu::swap::NPUSwapManager::GetInstance().PostHook();
  c10_npu::swap::NPUSwapManager::GetInstance().EndHook();
  return y;
}

// An operator that keeps only addresses: it lets go of what it was given before it allocates.
void by_address(py::list given, bool with_hooks, int64_t scratch_bytes) {
  auto& swap = c10_npu::swap::NPUSwapManager::GetInstance();
  swap.BeginHook("by_address");
  if (with_hooks) swap.TensorHook(given.cast<std::vector<at::Tensor>>());
  given.attr("clear")();
  {
    py::gil_scoped_release as_operators_do;
    auto scratch = at::empty({scratch_bytes}, at::kByte);
  }
  swap.EndHook();
}

void fails_inside(bool with_guard) {
  if (with_guard) {
    c10_npu::swap::NPUSwapManager::Guard guard("fails");
    throw std::runtime_error("inside the operator");
  }
  c10_npu::swap::NPUSwapManager::GetInstance().BeginHook("fails");
  throw std::runtime_error("inside the operator");
}

void out_of_place() { c10_npu::swap::NPUSwapManager::GetInstance().TensorHook(at::empty({1})); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("npu_gmm", &npu_gmm);
  m.def("by_address", &by_address);
  m.def("fails_inside", &fails_inside);
  m.def("out_of_place", &out_of_place);
}
