// Simulated device memory: a c10 CPU allocator with a capacity, exact figures, a pressure handler, and a registry that
// tells the device's blocks from host memory. The copy engines are in sim_copy_engine.h.
//
// Locks: a shard of the registry or the engine's mutex, never both, and neither while the GIL is waited for. Everything
// that threads may touch while the process exits is leaked on purpose.
#include <torch/csrc/utils/pybind.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <limits>
#include <string>
#include <unordered_map>

#include "sim_copy_engine.h"

namespace py = pybind11;

namespace {

constexpr size_t kAlignment = 64;      // c10's for CPU memory
constexpr int kShardBits = 6;          // 64 locks: more than threads that allocate at once
constexpr size_t kShards = 1 << kShardBits;
constexpr int kMaxRetries = 16;        // per request; a handler that always says yes must not hang the process
constexpr uint8_t kPriority = 255;     // nobody else's allocator goes above ours
constexpr auto kSignalPoll = std::chrono::milliseconds(50);  // how late Ctrl-C may be noticed in a host wait

// ---- figures ---------------------------------------------------------------------------------------------------------
std::atomic<int64_t> g_capacity{std::numeric_limits<int64_t>::max()};
alignas(64) std::atomic<int64_t> g_allocated{0};
alignas(64) std::atomic<int64_t> g_peak{0}, g_interval_peak{0}, g_interval_request{0};
alignas(64) std::atomic<int64_t> g_requests{0}, g_ooms{0}, g_pressure_calls{0}, g_host_bytes{0};

thread_local int t_host_depth = 0;        // > 0: what this thread allocates is host memory
thread_local bool t_in_pressure = false;

sim::CopyEngine& engine() {
  static auto* instance = new sim::CopyEngine;
  return *instance;
}

void raise_to(std::atomic<int64_t>& maximum, int64_t value) {
  int64_t seen = maximum.load(std::memory_order_relaxed);
  while (seen < value && !maximum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

bool reserve(int64_t n) {
  int64_t now = g_allocated.load(std::memory_order_relaxed);
  do {
    if (n > g_capacity.load(std::memory_order_relaxed) - now) return false;
  } while (!g_allocated.compare_exchange_weak(now, now + n, std::memory_order_relaxed));
  raise_to(g_peak, now + n);
  raise_to(g_interval_peak, now + n);
  return true;
}

// ---- registry of live blocks -----------------------------------------------------------------------------------------
struct Block {
  size_t size;
  bool device;
};

struct alignas(64) Shard {
  std::mutex mutex;
  std::unordered_map<void*, Block> blocks;
};

Shard* shards() {
  static auto* instance = new Shard[kShards];
  return instance;
}

Shard& shard_of(void* pointer) {
  // Blocks are 64-byte aligned and large ones page aligned (plus malloc's header): mix before taking the top bits.
  return shards()[(((uintptr_t)pointer >> 4) * 0x9E3779B97F4A7C15ull) >> (64 - kShardBits)];
}

bool is_live_device_block(void* pointer) {
  Shard& shard = shard_of(pointer);
  std::lock_guard<std::mutex> lock(shard.mutex);
  auto found = shard.blocks.find(pointer);
  return found != shard.blocks.end() && found->second.device;
}

// ---- pressure --------------------------------------------------------------------------------------------------------
PyObject* g_handler = nullptr;            // guarded by the GIL
std::atomic<bool> g_has_handler{false};   // false once the interpreter begins to end: see the module's `close`

bool interpreter_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Asks the handler for room. An exception in it counts as "no": it cannot pass through the operator that allocates.
bool relieve(int64_t n, int attempt) {
  if (t_in_pressure || !g_has_handler.load() || interpreter_ending()) return false;
  py::gil_scoped_acquire gil;
  if (!g_handler) return false;
  py::error_scope keep_callers_error;
  py::object handler = py::reinterpret_borrow<py::object>(g_handler);
  t_in_pressure = true;
  g_pressure_calls++;
  PyObject* answer = PyObject_CallFunction(handler.ptr(), "Li", (long long)n, attempt);
  int yes = answer ? PyObject_IsTrue(answer) : -1;
  if (yes < 0) {
    const bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
    PyErr_WriteUnraisable(handler.ptr());
    if (interrupted) PyErr_SetInterrupt();  // Ctrl-C is not lost: raised again at the next check
  }
  Py_XDECREF(answer);
  t_in_pressure = false;
  return yes > 0;
}

// ---- allocator -------------------------------------------------------------------------------------------------------
std::string size_text(double bytes) {
  char text[48];
  if (bytes >= (1 << 30)) snprintf(text, sizeof text, "%.2f GiB", bytes / (1 << 30));
  else if (bytes >= (1 << 20)) snprintf(text, sizeof text, "%.2f MiB", bytes / (1 << 20));
  else snprintf(text, sizeof text, "%.0f bytes", bytes);
  return text;
}

void release(void* pointer) {
  if (!pointer) return;
  Block block;
  {
    Shard& shard = shard_of(pointer);
    std::lock_guard<std::mutex> lock(shard.mutex);
    auto found = shard.blocks.find(pointer);
    if (found == shard.blocks.end()) return;  // not ours: leaking beats corrupting the heap
    block = found->second;
    shard.blocks.erase(found);
  }
  // Not counted from here on, even if a copy keeps the memory mapped.
  (block.device ? g_allocated : g_host_bytes).fetch_sub((int64_t)block.size, std::memory_order_relaxed);
  if (!engine().quarantine(pointer, block.size)) free(pointer);
}

struct SimAllocator final : c10::Allocator {
  // The context is the data pointer, as raw_allocate() demands; size and kind are in the registry.
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &release, cpu};
    // A forked child has no device, only memory.
    const bool device = t_host_depth == 0 && !engine().forked();
    if (device) take((int64_t)n);
    else g_host_bytes.fetch_add((int64_t)n, std::memory_order_relaxed);
    void* pointer = nullptr;
    const int error = posix_memalign(&pointer, kAlignment, n);
    if (error) (device ? g_allocated : g_host_bytes).fetch_sub((int64_t)n, std::memory_order_relaxed);
    TORCH_CHECK_WITH(OutOfMemoryError, !error, "Out of host memory: tried to allocate ", n, " bytes");
    Shard& shard = shard_of(pointer);
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.blocks.emplace(pointer, Block{n, device});
    return {pointer, pointer, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, std::size_t n) const override { memcpy(dst, src, n); }

 private:
  // Counts n bytes, or asks for room and tries again.
  static void take(int64_t n) {
    g_requests.fetch_add(1, std::memory_order_relaxed);
    raise_to(g_interval_request, n);
    for (int attempt = 0; !reserve(n); attempt++) {
      if (attempt < kMaxRetries && relieve(n, attempt)) continue;
      g_ooms++;
      const int64_t capacity = g_capacity.load(), used = g_allocated.load();
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ", size_text((double)n), " (", n,
          " bytes). The device has a capacity of ", size_text((double)capacity), " (", capacity, " bytes) of which ",
          size_text((double)std::max<int64_t>(0, capacity - used)), " is free; ", size_text((double)used), " (", used,
          " bytes) is in use by this process.");
    }
  }
};

SimAllocator& allocator() {
  static auto* instance = new SimAllocator;
  return *instance;
}
c10::Allocator* g_previous = nullptr;

bool owns(const at::Tensor& tensor) {
  try {
    if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return false;
    const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (!storage || storage.device_type() != c10::DeviceType::CPU) return false;
    if (void* pointer = const_cast<void*>(storage.data())) return is_live_device_block(pointer);
    return storage.nbytes() == 0;
  } catch (const std::exception&) {  // symbolic sizes, tensors without storage
    return false;
  }
}

// ---- fork ------------------------------------------------------------------------------------------------------------
void before_fork() {
  engine().before_fork();
  for (size_t i = 0; i < kShards; i++) shards()[i].mutex.lock();
}
void after_fork(bool child) {
  for (size_t i = kShards; i-- > 0;) shards()[i].mutex.unlock();
  engine().after_fork(child);
}

// Blocks the host, without the GIL, and stays open for Ctrl-C.
void host_wait(const sim::Event* event) {
  while (true) {
    {
      py::gil_scoped_release no_gil;
      if (engine().host_wait(event, kSignalPoll)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

py::dict stats() {
  auto& counters = engine().counters;
  py::dict d;
  d["capacity_bytes"] = g_capacity.load();
  d["allocated_bytes"] = g_allocated.load();
  d["peak_bytes"] = g_peak.load();
  d["requests"] = g_requests.load();
  d["ooms"] = g_ooms.load();
  d["pressure_calls"] = g_pressure_calls.load();
  d["host_bytes"] = g_host_bytes.load();
  d["registered_bytes"] = engine().registered_bytes();
  d["pending_copies"] = engine().pending_copies();
  d["copies"] = counters.copies.load();
  d["d2h_bytes"] = counters.link_bytes[0].load();
  d["h2d_bytes"] = counters.link_bytes[1].load();
  d["dropped_copies"] = counters.dropped_copies.load();
  d["freed_under_copy"] = counters.freed_under_copy.load();
  d["late_writes"] = counters.late_writes.load();
  d["quarantined_bytes"] = counters.quarantined_bytes.load();
  return d;
}

// Host scope as an object: depth +1, or (device scope) 0 for as long as it is entered. Per thread.
struct Scope {
  bool host;
  std::vector<int> saved;
  void enter() {
    saved.push_back(t_host_depth);
    t_host_depth = host ? t_host_depth + 1 : 0;
  }
  void exit() {
    t_host_depth = saved.back();
    saved.pop_back();
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pthread_atfork(before_fork, [] { after_fork(false); }, [] { after_fork(true); });

  m.def("install", [] {
    if (!g_previous) g_previous = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator(), kPriority);
  });
  m.def("uninstall", [] {
    if (g_previous) c10::SetCPUAllocator(g_previous, kPriority);
  });
  m.def("installed", [] { return c10::GetCPUAllocator() == &allocator(); });
  m.def("owns", &owns);
  m.def("owns_pointer", [](uintptr_t pointer) { return is_live_device_block((void*)pointer); });

  m.def("set_capacity", [](int64_t bytes) { g_capacity = bytes; });
  m.def("capacity", [] { return g_capacity.load(); });
  m.def("allocated", [] { return g_allocated.load(); });
  m.def("peak", [] { return g_peak.load(); });
  m.def("reset_peak", [] {
    g_peak = g_allocated.load();
    raise_to(g_peak, g_allocated.load());
  });
  m.def("take_interval", [] {
    const int64_t request = g_interval_request.exchange(0);
    const int64_t peak = g_interval_peak.exchange(g_allocated.load());
    raise_to(g_interval_peak, g_allocated.load());  // another thread may have allocated in between
    return std::make_pair(peak, request);
  });
  m.def("stats", &stats);

  m.def("set_pressure_handler", [](py::object handler) {
    PyObject* old = g_handler;
    g_handler = handler.is_none() ? nullptr : handler.release().ptr();
    g_has_handler = g_handler != nullptr;
    Py_XDECREF(old);  // last: it may run Python code
  });

  py::class_<Scope>(m, "Scope")
      .def(py::init([](bool host) { return Scope{host, {}}; }), py::arg("host"))
      .def("__enter__", &Scope::enter)
      .def("__exit__", [](Scope& scope, const py::args&) { scope.exit(); });

  py::class_<sim::Event, std::shared_ptr<sim::Event>>(m, "Event")
      .def_static("now", [] {
        auto event = std::make_shared<sim::Event>();
        event->finish();
        return event;
      })
      .def("done", [](const sim::Event& event) { return event.done.load(std::memory_order_acquire); })
      .def("synchronize", [](const sim::EventPtr& event) { host_wait(event.get()); })
      .def("elapsed_ms", [](const sim::Event& start, const sim::Event& end) {
        if (!start.done || !end.done) throw std::runtime_error("elapsed_ms: both events must have passed");
        return std::chrono::duration<double, std::milli>(end.time - start.time).count();
      });

  m.attr("LINK_D2H") = 0;
  m.attr("LINK_H2D") = 1;
  m.attr("NO_LINK") = sim::kNoLink;
  m.def("new_stream", [] { return engine().new_stream(); });
  m.def("set_bandwidth", [](int link, double bytes_per_second) { engine().set_bandwidth(link, bytes_per_second); });
  m.def("copy", [](int stream, uintptr_t dst, uintptr_t src, size_t n, int link) {
    engine().copy(stream, (char*)dst, (char*)src, n, link);
  });
  m.def("record", [](int stream) { return engine().record(stream); });
  m.def("wait", [](int stream, const sim::EventPtr& event) { engine().wait(stream, event); });
  m.def("synchronize", [] { host_wait(nullptr); });
  m.def("register_host", [](uintptr_t address, size_t n) { engine().register_host((char*)address, n); });
  m.def("unregister_host", [](uintptr_t address) {
    for (auto& event : engine().unregister_host((char*)address)) host_wait(event.get());
  });
  m.def("is_registered", [](uintptr_t address, size_t n) { return engine().is_registered((char*)address, n); });
  m.def("shutdown", [](bool final) {
    if (final) g_has_handler = false;
    py::gil_scoped_release no_gil;
    engine().shutdown(final);
  }, py::arg("final") = false);
}
