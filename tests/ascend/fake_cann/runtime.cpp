// A functional fake of the CANN runtime (libascendcl.so), so that the real torch_npu runs without an NPU.
//
// Device memory is host memory under a hard capacity; streams are real threads, so that asynchronous copies, events and
// waits are truly ordered or truly not. Copies can be slowed down, and then move their bytes late and piece by piece:
// whoever does not wait for one reads old bytes. Host memory that is registered for the device (what
// empty_with_swapped_memory does) is refused by every memcpy, as a driver refuses it; only kernels may use it.
//
// FAKE_NPU_CAPACITY: bytes of the device (default 1 GiB). Everything else is set by the fakecann_ functions at the end.
#include "device.h"

#include <acl/acl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
constexpr aclError kOk = 0, kOutOfMemory = 207001, kNoContext = 107002, kBadParameter = 107000, kRefused = 507899;
constexpr size_t kPiece = 256 << 10;  // a slow copy moves so much at a time

size_t capacity() {
  static const size_t bytes = [] {
    const char* text = std::getenv("FAKE_NPU_CAPACITY");
    return text ? std::strtoull(text, nullptr, 10) : size_t{1} << 30;
  }();
  return bytes;
}

thread_local int current_device = -1;
std::mutex memory_lock;
size_t used = 0;
std::map<const char*, size_t> device_blocks, host_blocks, swapped_blocks;  // start -> bytes
std::atomic<size_t> failed_mallocs{0}, refused_copies{0}, swapped_operands{0};
std::atomic<double> to_host_gbps{0}, to_device_gbps{0}, kernel_ms{0};  // 0: at once

bool inside(const std::map<const char*, size_t>& blocks, const void* address) {
  auto block = blocks.upper_bound(static_cast<const char*>(address));
  if (block == blocks.begin()) return false;
  --block;
  return static_cast<const char*>(address) < block->first + block->second;
}

// ---- streams and events
struct Stream {
  std::mutex lock;
  std::condition_variable more, idle;
  std::deque<std::function<void()>> queue;
  bool busy = false;
  int id = 0;

  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> hold(lock);
        more.wait(hold, [&] { return !queue.empty(); });
        work = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      work();
      std::lock_guard<std::mutex> hold(lock);
      busy = false;
      if (queue.empty()) idle.notify_all();
    }
  }
  bool is_idle() {
    std::lock_guard<std::mutex> hold(lock);
    return queue.empty() && !busy;
  }
  void synchronize() {
    std::unique_lock<std::mutex> hold(lock);
    idle.wait(hold, [&] { return queue.empty() && !busy; });
  }
};

// Never destroyed: threads and queued work may outlive main().
auto& streams_lock = *new std::mutex;
auto& streams = *new std::set<Stream*>;

Stream* new_stream() {
  auto* stream = new Stream;
  {
    std::lock_guard<std::mutex> hold(streams_lock);
    stream->id = static_cast<int>(streams.size());
    streams.insert(stream);
  }
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

Stream* of(aclrtStream stream) {
  static Stream* standard = new_stream();
  return stream ? static_cast<Stream*>(stream) : standard;
}

struct Event {
  std::mutex lock;
  std::condition_variable passed;
  uint64_t recorded = 0, done = 0;
  Clock::time_point time;

  uint64_t latest() {
    std::lock_guard<std::mutex> hold(lock);
    return recorded;
  }
  bool is_done() {
    std::lock_guard<std::mutex> hold(lock);
    return done >= recorded;
  }
  void wait(uint64_t generation) {
    std::unique_lock<std::mutex> hold(lock);
    passed.wait(hold, [&] { return done >= generation; });
  }
};
Event* event_of(void* event) { return static_cast<Event*>(event); }

// ---- copies
aclError check_copy(const void* dst, const void* src) {
  std::lock_guard<std::mutex> hold(memory_lock);
  if (!inside(swapped_blocks, dst) && !inside(swapped_blocks, src)) return kOk;
  ++refused_copies;
  return kRefused;
}

void copy(void* dst, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  const double gbps = kind == ACL_MEMCPY_DEVICE_TO_HOST   ? to_host_gbps.load()
                      : kind == ACL_MEMCPY_HOST_TO_DEVICE ? to_device_gbps.load()
                                                          : 0.0;
  if (gbps <= 0) {
    std::memcpy(dst, src, bytes);
    return;
  }
  auto due = Clock::now();
  for (size_t at = 0; at < bytes; at += kPiece) {
    const size_t piece = std::min(kPiece, bytes - at);
    due += std::chrono::nanoseconds(static_cast<int64_t>(piece / gbps));
    std::this_thread::sleep_until(due);  // first: the last bytes are read and written last
    std::memcpy(static_cast<char*>(dst) + at, static_cast<const char*>(src) + at, piece);
  }
}

aclError allocate(void** pointer, size_t bytes) {
  std::lock_guard<std::mutex> hold(memory_lock);
  if (used + bytes > capacity() || posix_memalign(pointer, 512, bytes ? bytes : 512)) {
    ++failed_mallocs;
    *pointer = nullptr;
    return kOutOfMemory;
  }
  used += bytes;
  device_blocks[static_cast<char*>(*pointer)] = bytes;
  return kOk;
}

}  // namespace

namespace fake {
void enqueue(aclrtStream stream, std::function<void()> work) {
  Stream* to = of(stream);
  {
    std::lock_guard<std::mutex> hold(to->lock);
    to->queue.push_back(std::move(work));
  }
  to->more.notify_one();
}
void kernel_time() {
  const double ms = kernel_ms;
  if (ms > 0) std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int64_t>(ms * 1000)));
}
void note_operand(const void* address) {
  std::lock_guard<std::mutex> hold(memory_lock);
  if (inside(swapped_blocks, address)) ++swapped_operands;
}
}  // namespace fake

// ---- the interface, as far as torch_npu calls it. Whatever is not here answers 0 (see fake_runtime.py).
EXPORT const char* aclrtGetSocName() { return "Ascend910B1"; }
EXPORT const char* aclGetRecentErrMsg() { return "fake CANN: refused"; }
EXPORT void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

EXPORT aclError aclrtGetDeviceCount(uint32_t* count) { return *count = 1, kOk; }
EXPORT aclError aclrtSetDevice(int32_t device) {
  if (device != 0) return 107001;
  current_device = device;
  return kOk;
}
EXPORT aclError aclrtGetDevice(int32_t* device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return kOk;
}
EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device < 0) return kNoContext;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current_device + 1));
  return kOk;
}
EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return kOk;
}
EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t*, int32_t* active) {
  if (active) *active = current_device == device;
  return kOk;
}

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> hold(memory_lock);
  *total = capacity();
  *free_bytes = capacity() - used;
  return kOk;
}
EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(pointer, bytes);
}
EXPORT aclError aclrtFree(void* pointer) {
  std::lock_guard<std::mutex> hold(memory_lock);
  const auto block = device_blocks.find(static_cast<char*>(pointer));
  if (block == device_blocks.end()) return kBadParameter;
  used -= block->second;
  device_blocks.erase(block);
  std::free(pointer);
  return kOk;
}
EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return kOutOfMemory;
  std::lock_guard<std::mutex> hold(memory_lock);
  host_blocks[static_cast<char*>(*pointer)] = bytes;
  return kOk;
}
EXPORT aclError aclrtFreeHost(void* pointer) {
  std::lock_guard<std::mutex> hold(memory_lock);
  if (!host_blocks.erase(static_cast<char*>(pointer))) return kBadParameter;
  swapped_blocks.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return kOk;
}
EXPORT aclError aclrtHostRegister(void* pointer, uint64_t bytes, aclrtHostRegisterType, void** device_pointer) {
  std::lock_guard<std::mutex> hold(memory_lock);
  swapped_blocks[static_cast<char*>(pointer)] = bytes;
  *device_pointer = pointer;
  return kOk;
}
EXPORT aclError aclrtHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> hold(memory_lock);
  return swapped_blocks.erase(static_cast<char*>(pointer)) ? kOk : kBadParameter;
}
EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof(*attributes));
  std::lock_guard<std::mutex> hold(memory_lock);
  // Page-locked, of the device, or memory that the runtime does not know.
  attributes->location.type = inside(device_blocks, pointer) ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : inside(host_blocks, pointer) ? ACL_MEM_LOCATION_TYPE_HOST
                                                             : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return kOk;
}

EXPORT aclError aclrtMemcpy(void* dst, size_t, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  const aclError error = check_copy(dst, src);
  if (error == kOk) copy(dst, src, bytes, kind);
  return error;
}
EXPORT aclError aclrtMemcpyAsync(
    void* dst, size_t, const void* src, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  const aclError error = check_copy(dst, src);
  if (error == kOk) fake::enqueue(stream, [=] { copy(dst, src, bytes, kind); });
  return error;
}
EXPORT aclError aclrtMemset(void* pointer, size_t, int32_t value, size_t bytes) {
  std::memset(pointer, value, bytes);
  return kOk;
}
EXPORT aclError aclrtMemsetAsync(void* pointer, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  fake::enqueue(stream, [=] { std::memset(pointer, value, bytes); });
  return kOk;
}

EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return *stream = new_stream(), kOk; }
EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return *stream = new_stream(), kOk;
}
EXPORT aclError aclrtDestroyStream(aclrtStream stream) { return of(stream)->synchronize(), kOk; }
EXPORT aclError aclrtDestroyStreamForce(aclrtStream) { return kOk; }
EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) { return of(stream)->synchronize(), kOk; }
EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return of(stream)->synchronize(), kOk;
}
EXPORT aclError aclrtSynchronizeDevice() {
  std::set<Stream*> all;
  {
    std::lock_guard<std::mutex> hold(streams_lock);
    all = streams;
  }
  for (Stream* stream : all) stream->synchronize();
  return kOk;
}
EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
EXPORT aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  *status = of(stream)->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return kOk;
}
EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) { return *id = of(stream)->id, kOk; }

// Events are never freed: queued work refers to them.
EXPORT aclError aclrtCreateEvent(aclrtEvent* event) { return *event = new Event, kOk; }
EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return *event = new Event, kOk; }
EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return *event = new Event, kOk; }
EXPORT aclError aclrtDestroyEvent(aclrtEvent) { return kOk; }
EXPORT aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return kOk; }
EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  Event* event = event_of(handle);
  uint64_t generation;
  {
    std::lock_guard<std::mutex> hold(event->lock);
    generation = ++event->recorded;
  }
  fake::enqueue(stream, [=] {
    {
      std::lock_guard<std::mutex> hold(event->lock);
      event->done = std::max(event->done, generation);
      event->time = Clock::now();
    }
    event->passed.notify_all();
  });
  return kOk;
}
EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  Event* event = event_of(handle);
  const uint64_t generation = event->latest();
  fake::enqueue(stream, [=] { event->wait(generation); });
  return kOk;
}
EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) { return event_of(event)->wait(event_of(event)->latest()), kOk; }
EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = event_of(event)->is_done() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kOk;
}
EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  *status = event_of(event)->is_done() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return kOk;
}
EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  *ms = std::chrono::duration<float, std::milli>(event_of(end)->time - event_of(start)->time).count();
  return kOk;
}
EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  fake::enqueue(stream, [=] { function(data); });
  return kOk;
}

// Looked up by name, so that a stub for the linker does not do.
EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return kOk; }
EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
EXPORT aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return kOk; }
EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return kOk; }
EXPORT aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) { return *flag = 0, kOk; }
EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return kOk; }
EXPORT aclError aclrtGetLastError(aclrtLastErrLevel) { return kOk; }

// ---- for tests, by ctypes
EXPORT void fakecann_set_link(double to_host, double to_device) {  // 10^9 bytes per second; 0: at once
  to_host_gbps = to_host;
  to_device_gbps = to_device;
}
EXPORT void fakecann_set_kernel_ms(double ms) { kernel_ms = ms; }
EXPORT size_t fakecann_used_bytes() {
  std::lock_guard<std::mutex> hold(memory_lock);
  return used;
}
EXPORT size_t fakecann_failed_mallocs() { return failed_mallocs; }
EXPORT size_t fakecann_refused_copies() { return refused_copies; }
EXPORT size_t fakecann_swapped_operands() { return swapped_operands; }
EXPORT size_t fakecann_swapped_blocks() {
  std::lock_guard<std::mutex> hold(memory_lock);
  return swapped_blocks.size();
}
