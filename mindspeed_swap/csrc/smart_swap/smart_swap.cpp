// libsmart_swap.so, see NPUSwapManager.h. It knows of no device and of no Python: a listener, set by the process that
// records steps, is told when an operator begins and ends.
#include "NPUSwapManager.h"

#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>

namespace c10_npu {
namespace swap {
namespace {

using Listener = void (*)(int ends, const char* name);
std::atomic<Listener> listener{nullptr};

struct Operator {
  std::string name;
  // Storages, not tensors: eviction looks at how many refer to a storage, and a tensor that the caller has counts once
  // however many handles there are to it.
  std::vector<c10::Storage> held;
  std::unique_ptr<at::RecordFunction> range;
  bool posted = false;
};
thread_local std::vector<Operator> running;

Operator& innermost(const char* hook) {
  TORCH_CHECK(!running.empty(), hook, " of NPUSwapManager outside BeginHook and EndHook");
  return running.back();
}

void tell(int ends, const std::string& name) {
  if (const Listener told = listener.load()) told(ends, name.c_str());
}

}  // namespace

NPUSwapManager& NPUSwapManager::GetInstance() {
  static NPUSwapManager manager;
  return manager;
}

void NPUSwapManager::BeginHook(const std::string& opName) {
  Operator begun{opName, {}, std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE)};
  if (begun.range->isActive()) begun.range->before("mindspeed_swap: operator " + opName);
  running.push_back(std::move(begun));
  tell(0, opName);
}

void NPUSwapManager::TensorHook(const at::Tensor& tensor) {
  Operator& op = innermost("TensorHook");
  if (tensor.defined() && tensor.has_storage()) op.held.push_back(tensor.storage());
}
void NPUSwapManager::TensorHook(const std::optional<at::Tensor>& tensor) {
  if (tensor.has_value()) TensorHook(*tensor);
}
void NPUSwapManager::TensorHook(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) TensorHook(tensor);
}
void NPUSwapManager::TensorHook(const std::vector<at::Tensor>& tensors) { TensorHook(at::TensorList(tensors)); }

void NPUSwapManager::PostHook() {
  Operator& op = innermost("PostHook");
  if (op.posted) return;
  op.posted = true;
  op.range.reset();
  tell(1, op.name);
}

void NPUSwapManager::EndHook() {
  innermost("EndHook");
  PostHook();
  // Off the list first: freeing may run anything.
  const Operator ended = std::move(running.back());
  running.pop_back();
}

NPUSwapManager::Guard::Guard(const std::string& opName) { GetInstance().BeginHook(opName); }
NPUSwapManager::Guard::~Guard() { GetInstance().EndHook(); }

}  // namespace swap
}  // namespace c10_npu

// For mindspeed_swap, by ctypes.
extern "C" __attribute__((visibility("default"))) void mindspeed_swap_set_listener(
    c10_npu::swap::Listener told) {
  c10_npu::swap::listener = told;
}
extern "C" __attribute__((visibility("default"))) int mindspeed_swap_running_operators() {
  return static_cast<int>(c10_npu::swap::running.size());
}
