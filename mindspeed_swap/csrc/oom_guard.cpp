// The caching allocator of CUDA and of Ascend (-DSWAP_NPU), asked twice: when it is out of memory, a Python handler may
// make room before it is asked again. Also says how much memory was allocated at most since one last asked.
//
// How an allocation is caught. The allocator offers no hook that knows the size, holds no lock and may retry:
//   * FreeMemoryCallback runs under the allocator's lock at every cache miss and is not told the size. Taking the GIL
//     there deadlocks with a thread that frees a tensor while it holds the GIL.
//   * OutOfMemoryObserver runs without the lock, but the error is thrown whatever it does.
//   * A subclass that forwards everything, stored in the exported atomic `allocator`, is legal C++. It must forward
//     some 50 virtuals, and one that a later torch adds with a default body would be lost without a warning.
// So the one allocator *object* is given another virtual table: a copy of its own with three entries replaced. Nothing
// is forwarded by hand, no page of a library is made writable, it is one pointer store to install and one to remove,
// and frees, which do not go through the table, are untouched. C++ does not promise that this works; the Itanium ABI,
// which every Linux compiler of torch follows, does. `self_test` shows it before anyone relies on it, and the caller
// removes the hook if it fails.
//
// How the peak of an interval is known. Allocated bytes can only reach a new height at an allocation, so the wrapper
// reads the allocator's own counter after each one: a copy of about 1 kB under a free lock, 0.05 us where measured.
// torch's peak figure is read, never reset: torch.cuda.max_memory_allocated() stays true. It closes the one gap, a
// free by another thread between an allocation and its reading: a figure that rose in the interval was reached in it.
// Without the hook, `track` uses the allocator's public trace trackers. They cannot be detached, cost twice as much and
// see requested sizes only, so that rounding has to be added: second best.
#ifdef SWAP_NPU
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#else
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <link.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

namespace py = pybind11;

namespace {

#ifdef SWAP_NPU
namespace native = c10_npu::NPUCachingAllocator;
using DeviceAllocator = native::NPUAllocator;
using RawStream = aclrtStream;
int current_device() { return c10_npu::current_device(); }
RawStream current_stream() { return c10_npu::getCurrentNPUStream().stream(false); }
bool capturing() { return false; }  // graph capture is refused on Ascend before the guard is installed
#else
namespace native = c10::cuda::CUDACachingAllocator;
using DeviceAllocator = native::CUDAAllocator;
using RawStream = cudaStream_t;
int current_device() { return c10::cuda::current_device(); }
RawStream current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
bool capturing() {  // copies made by a handler would become part of the graph
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}
#endif

// Retries per request. A handler frees what was asked for at the first; the others are for fragmentation.
constexpr int kMaxAttempts = 8;
// Slots of the virtual table to copy: several times what the class has. A surplus is copied, never called.
constexpr size_t kVtableSlots = 256;
constexpr size_t kVtablePrefix = 2;  // offset-to-top and type info stand before the first slot (Itanium ABI)
constexpr size_t kAggregate = 0;     // index of the sum over both pools in the allocator's statistics
constexpr size_t kProbeBytes = 512;

// ---- what was seen (any thread writes)
struct {
  std::atomic<int64_t> allocate{0}, raw{0}, raw_stream{0};  // calls that came through each replaced slot
  std::atomic<int64_t> caught{0}, retried{0};
} counters;
std::atomic<int> guarded_device{-1};
std::atomic<int64_t> interval_peak{0}, interval_largest{0};
std::mutex interval_lock;  // one take_interval at a time
int64_t torch_peak_at_start = 0;

void raise_to(std::atomic<int64_t>& maximum, int64_t value) {
  int64_t seen = maximum.load(std::memory_order_relaxed);
  while (seen < value && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void note_allocation(size_t nbytes) {
  const int device = guarded_device.load(std::memory_order_relaxed);
  if (current_device() != device) return;
  raise_to(interval_largest, static_cast<int64_t>(nbytes));
  raise_to(interval_peak, native::getDeviceStats(device).allocated_bytes[kAggregate].current);
}

// ---- the handler. Touched only under the GIL; `has_handler` spares those who need not take it.
// A plain pointer: a destructor that runs at exit, after Python has gone, would crash. Python drops it in `atexit`.
PyObject* handler = nullptr;
std::atomic<bool> has_handler{false};
thread_local bool in_handler = false;

bool python_usable() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// True: the handler made room, try again. Never throws, whatever the handler does.
bool ask_handler(size_t nbytes, int attempt) {
  // An allocation that the handler itself makes and that fails must fail: to ask again would recurse.
  if (in_handler || !has_handler.load() || current_device() != guarded_device.load() || capturing()) return false;
  // A thread that wants the GIL while the interpreter ends is killed by it.
  if (!python_usable()) return false;
  // No allocator lock is held here, so waiting for the GIL cannot deadlock with its holder's allocations.
  py::gil_scoped_acquire gil;
  py::error_scope keep_error;  // this thread may already carry a Python error: it is not ours to lose
  if (handler == nullptr) return false;
  // The failing operation runs below autograd, perhaps in inference mode. The handler's tensors must be ordinary ones.
  c10::InferenceMode ordinary_tensors(false);
  c10::AutoGradMode no_graph(false);
  struct Mark {
    Mark() { in_handler = true; }
    ~Mark() { in_handler = false; }
  } mark;
  PyObject* called = handler;
  Py_INCREF(called);  // it may remove itself
  PyObject* answer = PyObject_CallFunction(called, "ni", static_cast<Py_ssize_t>(nbytes), attempt);
  const int again = answer ? PyObject_IsTrue(answer) : -1;
  if (again < 0) {
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // deliver it where it can be raised
    PyErr_WriteUnraisable(called);
  }
  Py_XDECREF(answer);
  Py_DECREF(called);
  return again > 0;
}

template <class Call>
auto guarded(size_t nbytes, Call call) -> decltype(call()) {
  for (int attempt = 0;; ++attempt) {
    std::exception_ptr failure;
    try {
      auto block = call();
      note_allocation(nbytes);
      return block;
    } catch (const c10::OutOfMemoryError&) {
      failure = std::current_exception();
    }
    // Outside the catch block: the handler may run anything, also code that throws and catches.
    ++counters.caught;
    if (attempt == kMaxAttempts || !ask_handler(nbytes, attempt)) std::rethrow_exception(failure);
    ++counters.retried;
  }
}

// ---- the three slots. A virtual member function is called like a free one with `this` first.
using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
using RawAlloc = void* (*)(DeviceAllocator*, size_t);
using RawAllocWithStream = void* (*)(DeviceAllocator*, size_t, RawStream);
Allocate native_allocate = nullptr;
RawAlloc native_raw_alloc = nullptr;
RawAllocWithStream native_raw_alloc_with_stream = nullptr;

c10::DataPtr hooked_allocate(c10::Allocator* self, size_t nbytes) {
  counters.allocate.fetch_add(1, std::memory_order_relaxed);
  return guarded(nbytes, [&] { return native_allocate(self, nbytes); });
}
void* hooked_raw_alloc(DeviceAllocator* self, size_t nbytes) {
  counters.raw.fetch_add(1, std::memory_order_relaxed);
  return guarded(nbytes, [&] { return native_raw_alloc(self, nbytes); });
}
void* hooked_raw_alloc_with_stream(DeviceAllocator* self, size_t nbytes, RawStream stream) {
  counters.raw_stream.fetch_add(1, std::memory_order_relaxed);
  return guarded(nbytes, [&] { return native_raw_alloc_with_stream(self, nbytes, stream); });
}

// A pointer to a virtual member function holds the byte offset of its slot; how it is told from a plain one differs.
template <class Member>
size_t slot_of(Member member) {
  struct {
    uintptr_t pointer;
    ptrdiff_t adjustment;
  } parts;
  static_assert(sizeof(parts) == sizeof(member));
  std::memcpy(&parts, &member, sizeof(parts));
#if defined(__aarch64__)
  TORCH_CHECK((parts.adjustment & 1) && (parts.adjustment >> 1) == 0, "the allocator's function is not virtual");
  return parts.pointer / sizeof(void*);
#else
  TORCH_CHECK((parts.pointer & 1) && parts.adjustment == 0, "the allocator's function is not virtual");
  return (parts.pointer - 1) / sizeof(void*);
#endif
}

// Bytes from `address` to the end of the loaded segment that holds it: how far it may be read.
size_t readable_from(const void* address) {
  std::pair<uintptr_t, size_t> search{reinterpret_cast<uintptr_t>(address), 0};
  const auto visit = [](dl_phdr_info* library, size_t, void* data) {
    auto& [wanted, left] = *static_cast<std::pair<uintptr_t, size_t>*>(data);
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& segment = library->dlpi_phdr[i];
      const uintptr_t start = library->dlpi_addr + segment.p_vaddr, end = start + segment.p_memsz;
      if (segment.p_type == PT_LOAD && start <= wanted && wanted < end) left = end - wanted;
    }
    return static_cast<int>(left != 0);  // stops the search
  };
  dl_iterate_phdr(visit, &search);
  return search.second;
}

void** native_vtable = nullptr;
void** hooked_vtable = nullptr;  // never given back: a thread may be between reading the pointer and calling through it
DeviceAllocator* hooked_object = nullptr;

void** vtable_of(DeviceAllocator* object) {
  return __atomic_load_n(reinterpret_cast<void***>(object), __ATOMIC_SEQ_CST);
}
void set_vtable(DeviceAllocator* object, void** table) {
  __atomic_store_n(reinterpret_cast<void***>(object), table, __ATOMIC_SEQ_CST);
}
bool installed() { return hooked_object != nullptr && vtable_of(hooked_object) == hooked_vtable; }

void copy_vtable(DeviceAllocator* object) {
  const size_t allocate = slot_of(static_cast<c10::DataPtr (c10::Allocator::*)(size_t)>(&c10::Allocator::allocate));
  const size_t raw = slot_of(static_cast<void* (DeviceAllocator::*)(size_t)>(&DeviceAllocator::raw_alloc));
  const size_t raw_stream = slot_of(
      static_cast<void* (DeviceAllocator::*)(size_t, RawStream)>(&DeviceAllocator::raw_alloc_with_stream));
  void** table = vtable_of(object);
  const size_t slots = std::min(kVtableSlots, readable_from(table) / sizeof(void*));
  TORCH_CHECK(std::max({allocate, raw, raw_stream}) < slots, "the allocator's virtual table is not where it should be");
  TORCH_CHECK(table[-2] == nullptr, "the allocator's class is laid out in an unknown way");  // offset-to-top
  auto** copy = new void*[kVtablePrefix + slots];
  std::memcpy(copy, table - kVtablePrefix, (kVtablePrefix + slots) * sizeof(void*));
  native_vtable = table;
  hooked_vtable = copy + kVtablePrefix;
  native_allocate = reinterpret_cast<Allocate>(table[allocate]);
  native_raw_alloc = reinterpret_cast<RawAlloc>(table[raw]);
  native_raw_alloc_with_stream = reinterpret_cast<RawAllocWithStream>(table[raw_stream]);
  hooked_vtable[allocate] = reinterpret_cast<void*>(hooked_allocate);
  hooked_vtable[raw] = reinterpret_cast<void*>(hooked_raw_alloc);
  hooked_vtable[raw_stream] = reinterpret_cast<void*>(hooked_raw_alloc_with_stream);
}

// ---- trace tracker: the source of the interval where the hook is not used
std::atomic<bool> tracking{false};
std::atomic<int64_t> tracked_requested{0};

#ifndef SWAP_NPU
// Called under the allocator's lock, also when no history is recorded. Must not allocate, must not take the GIL.
void on_trace(const native::TraceEntry& entry) {
  if (!tracking || entry.device_ != guarded_device) return;
  const auto size = static_cast<int64_t>(entry.size_);
  if (entry.action_ == native::TraceEntry::ALLOC) {
    raise_to(interval_largest, size);
    raise_to(interval_peak, tracked_requested.fetch_add(size) + size);
  } else if (entry.action_ == native::TraceEntry::FREE_REQUESTED) {
    tracked_requested.fetch_sub(size);
  }
}
#endif

void start_interval(int device) {
  const auto stats = native::getDeviceStats(device);
  interval_largest = 0;
  interval_peak = tracking ? tracked_requested.load() : stats.allocated_bytes[kAggregate].current;
  torch_peak_at_start = stats.allocated_bytes[kAggregate].peak;
}

// ---- called from Python
void check_ready() {
  TORCH_CHECK(native::get() != nullptr && native::get()->initialized(),
              "the device's caching allocator is not initialised: no device, or none used yet by this process");
}

void install(int device) {
  check_ready();
  DeviceAllocator* object = native::get();
  TORCH_CHECK(hooked_object == nullptr || hooked_object == object, "the allocator was replaced since the last install");
  if (installed()) {
    TORCH_CHECK(guarded_device == device, "already guards device ", guarded_device.load());
    return;
  }
  if (hooked_vtable == nullptr) copy_vtable(object);
  TORCH_CHECK(vtable_of(object) == native_vtable, "another hook has replaced the allocator's virtual table");
  guarded_device = device;
  tracking = false;
  start_interval(device);
  hooked_object = object;
  set_vtable(object, hooked_vtable);
}

// False: somebody else's hook came on top of ours; ours then stays, without a handler, and passes everything on.
bool uninstall() {
  has_handler = false;
  Py_CLEAR(handler);
  if (!installed()) return hooked_object == nullptr || vtable_of(hooked_object) == native_vtable;
  set_vtable(hooked_object, native_vtable);
  return true;
}

void set_handler(const py::object& callable) {
  PyObject* old = handler;
  handler = callable.is_none() ? nullptr : callable.inc_ref().ptr();
  has_handler = handler != nullptr;
  Py_XDECREF(old);  // last: it may run Python code
}

// Shows that each slot is really reached, that a refusal reaches the handler as often as it should, and that allocation
// works before and after. `refused_bytes` must be a size that the allocator refuses at once, without a driver call.
// Raises RuntimeError naming what did not happen. Leaves the handler as it was.
void self_test(size_t refused_bytes) {
  TORCH_CHECK(installed(), "not installed");
  DeviceAllocator* object = native::get();
  const auto expect = [](bool happened, const char* what) { TORCH_CHECK(happened, "self-test: ", what); };
  // `volatile` keeps the compiler from knowing the object's class: these must be virtual calls, as torch's own are.
  DeviceAllocator* volatile opaque = object;
  const int64_t seen[] = {counters.allocate, counters.raw, counters.raw_stream};
  const auto all_slots = [&] {
    c10::DataPtr data = opaque->allocate(kProbeBytes);
    void* raw = opaque->raw_alloc(kProbeBytes);
    void* raw_stream = opaque->raw_alloc_with_stream(kProbeBytes, current_stream());
    const bool whole = data.get() && raw && raw_stream && data.device().index() == guarded_device;
    opaque->raw_delete(raw);
    opaque->raw_delete(raw_stream);
    return whole;
  };
  expect(all_slots(), "an allocation through the hook returned nothing");
  expect(counters.allocate == seen[0] + 1 && counters.raw == seen[1] + 1 && counters.raw_stream == seen[2] + 1,
         "an allocation did not pass through the hook exactly once");

  py::list asked;
  py::object users = py::reinterpret_borrow<py::object>(handler ? handler : Py_None);
  set_handler(py::cpp_function([&asked](size_t nbytes, int attempt) {
    asked.append(py::make_tuple(nbytes, attempt));
    return attempt == 0;  // once "try again", then "no"
  }));
  bool refused = false;
  std::string other;
  try {
    py::gil_scoped_release as_in_an_operator;
    opaque->allocate(refused_bytes);
  } catch (const c10::OutOfMemoryError&) {
    refused = true;
  } catch (const std::exception& error) {
    other = error.what();
  }
  set_handler(users);
  TORCH_CHECK(other.empty(), "self-test: a refused allocation raised another error: ", other);
  expect(refused, "an allocation that must be refused was not");
  py::list wanted;
  wanted.append(py::make_tuple(refused_bytes, 0));
  wanted.append(py::make_tuple(refused_bytes, 1));
  expect(asked.equal(wanted), "the handler was not asked as it should be");
  expect(all_slots(), "allocation failed after a refusal");
  start_interval(guarded_device);
}

void track(int device) {
#ifdef SWAP_NPU
  TORCH_CHECK(false, "not available on this device");
#else
  check_ready();
  TORCH_CHECK(!installed(), "the hook is installed: it needs no tracker");
  static bool attached = false;  // a tracker cannot be detached, only ignored
  guarded_device = device;
  tracked_requested = native::getDeviceStats(device).requested_bytes[kAggregate].current;
  tracking = true;
  if (!attached) native::attachAllocatorTraceTracker(on_trace);
  attached = true;
  start_interval(device);
#endif
}

std::tuple<int64_t, int64_t> take_interval() {
  std::lock_guard<std::mutex> one_at_a_time(interval_lock);
  TORCH_CHECK(installed() || tracking, "neither hook nor tracker is active");
  const auto stats = native::getDeviceStats(guarded_device);
  const auto& allocated = stats.allocated_bytes[kAggregate];
  const int64_t now = tracking ? tracked_requested.load() : allocated.current;
  // The next interval starts from what is allocated now: that counts, though nobody allocates it in the interval.
  int64_t peak = std::max(interval_peak.exchange(now), now);
  const int64_t largest = interval_largest.exchange(0);
  if (tracking) peak += std::max<int64_t>(0, allocated.current - now);  // the allocator's rounding, as it is now
  if (allocated.peak > torch_peak_at_start) peak = std::max<int64_t>(peak, allocated.peak);
  torch_peak_at_start = allocated.peak;
  return {peak, largest};
}

std::tuple<int64_t, int64_t> memory(int device) {
  check_ready();
  const auto stats = native::getDeviceStats(device);
  return {stats.allocated_bytes[kAggregate].current, stats.reserved_bytes[kAggregate].current};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Retry after out-of-memory, and interval peaks, for the native caching allocator.";
  module.attr("MAX_ATTEMPTS") = kMaxAttempts;
  module.def("install", &install, py::arg("device"));
  module.def("uninstall", &uninstall);
  module.def("installed", &installed);
  module.def("self_test", &self_test, py::arg("refused_bytes"));
  module.def("set_handler", &set_handler, py::arg("handler"), "handler(nbytes, attempt) -> bool, or None");
  module.def("track", &track, py::arg("device"));
  module.def("take_interval", &take_interval, "(peak allocated bytes, largest request) since the last call");
  module.def("memory", &memory, py::arg("device"), "(allocated, reserved) bytes now");
  module.def("counters", [] {
    py::dict all;
    all["allocations"] = counters.allocate + counters.raw + counters.raw_stream;
    all["caught"] = counters.caught.load();
    all["retried"] = counters.retried.load();
    return all;
  });
}
