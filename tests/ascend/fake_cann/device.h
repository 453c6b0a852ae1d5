// The fake NPU: what runtime.cpp and kernels.cpp share.
#pragma once
#include <acl/acl_base.h>
#include <acl/acl_rt.h>

#include <cstddef>
#include <functional>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

// Queue work on a stream; it runs on the stream's own thread, in order.
void enqueue(aclrtStream stream, std::function<void()> work);

// Sleeps as long as a kernel is set to take (fakecann_set_kernel_ms).
void kernel_time();

// Counts a kernel that read or wrote swapped memory.
void note_operand(const void* address);

}  // namespace fake
