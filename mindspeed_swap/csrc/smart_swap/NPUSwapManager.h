// Hooks for custom C++ operators, under the names that MindSpeed's SmartSwap has. One library for CUDA, NPU and the
// simulated device: build it with `mindspeed-swap build-hooks`, link with
//   -L${TORCH_EXTENSIONS_DIR}/smart_swap/ -lsmart_swap
// and have ${TORCH_EXTENSIONS_DIR}/smart_swap/ in LD_LIBRARY_PATH.
//
// They do two things:
//   * the operator appears by name in the trace of a recorded step and in the user's torch.profiler;
//   * while it runs, memory of the tensors it named is not given up, also where the operator itself runs out of memory
//     and others are pushed out. (Memory that anyone refers to never is. The hooks are for operators that keep only an
//     address.)
// Nothing else depends on them: an operator without hooks is swapped around as correctly as one with them.
//
//   auto& swap = c10_npu::swap::NPUSwapManager::GetInstance();
//   swap.BeginHook("gmm_forward");
//   swap.TensorHook(x);
//   ... launch ...
//   swap.TensorHook(y);
//   swap.PostHook();
//   swap.EndHook();
//
// Calls belong to the thread they are made from and may nest. An operator that may throw in between uses a `Guard`,
// which ends it in any case.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace c10_npu {
namespace swap {

class __attribute__((visibility("default"))) NPUSwapManager {
 public:
  static NPUSwapManager& GetInstance();

  void BeginHook(const std::string& opName);
  // Inputs, before the launch; outputs at any time before EndHook. Undefined tensors are passed over. Raises c10::Error
  // outside BeginHook and EndHook.
  void TensorHook(const at::Tensor& tensor);
  void TensorHook(const std::optional<at::Tensor>& tensor);
  void TensorHook(at::TensorList tensors);
  void TensorHook(const std::vector<at::Tensor>& tensors);
  // The operator has been launched.
  void PostHook();
  // Lets go of its tensors.
  void EndHook();

  class __attribute__((visibility("default"))) Guard {
   public:
    explicit Guard(const std::string& opName);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
  };

 private:
  NPUSwapManager() = default;
};

}  // namespace swap
}  // namespace c10_npu
