// The copy engines of the simulated device: streams as worker threads, events, a link with a speed, and a quarantine
// that turns "freed while a copy still needs it" into wrong data and a counter instead of a crash.
//
// Knows nothing of Python and of the allocator. One mutex guards everything but the bytes themselves; it is never held
// while bytes are copied, and nobody who holds it waits for the GIL.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace sim {

using Clock = std::chrono::steady_clock;

constexpr size_t kChunk = 1 << 20;           // bytes between two looks at the clock and at the stop flag
constexpr unsigned char kPoison = 0xFF;      // all ones is a NaN in bf16, fp16 and fp32
constexpr size_t kPage = 4096, kLine = 64;   // light poison: one cache line per page spoils any result for 1/64 of the cost
// A worker that wakes late must not cost the link its idle time; a pause longer than this is a real one.
constexpr auto kLinkSlack = std::chrono::microseconds(200);
constexpr auto kTimerSlack = std::chrono::microseconds(50);  // Linux's: sleeping less than this oversleeps
constexpr int kLinks = 2;                    // device to host, host to device
constexpr int kNoLink = -1;

struct Event {
  std::atomic<bool> done{false};
  Clock::time_point time{};  // valid once done
  void finish() {
    time = Clock::now();
    done.store(true, std::memory_order_release);
  }
};
using EventPtr = std::shared_ptr<Event>;

struct Counters {
  std::atomic<int64_t> freed_under_copy{0}, late_writes{0}, quarantined_bytes{0}, dropped_copies{0}, copies{0};
  std::atomic<int64_t> link_bytes[kLinks] = {};
};

struct Range {
  char* begin = nullptr;
  size_t size = 0;
  bool overlaps(const Range& other) const {
    return begin < other.begin + other.size && other.begin < begin + size;
  }
};

// A freed block that queued copies still refer to. Those copies share it; the last one to finish frees the memory.
struct Quarantined {
  Range range;
  Counters& counters;
  bool written = false;  // a copy was going to write into it
  Quarantined(Range r, Counters& c) : range(r), counters(c) { counters.quarantined_bytes += (int64_t)range.size; }
  ~Quarantined() {
    counters.quarantined_bytes -= (int64_t)range.size;
    if (written) counters.late_writes++;
    free(range.begin);
  }
};

struct Item {
  enum Kind { kCopy, kRecord, kWait } kind;
  EventPtr event;  // kRecord, kWait
  Range dst{}, src{};
  int link = kNoLink;
  std::vector<std::shared_ptr<Quarantined>> keeps{};
};

struct Stream {
  std::deque<Item> queue;  // the front is running; push_back leaves references to it valid
  std::condition_variable work;
  std::thread worker;
};

class CopyEngine {
 public:
  Counters counters;

  int new_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<Stream>());
    return (int)streams_.size() - 1;
  }

  void set_bandwidth(int link, double bytes_per_second) {
    std::lock_guard<std::mutex> lock(mutex_);
    links_.at((size_t)link).bytes_per_second = bytes_per_second;
  }

  void copy(int stream, char* dst, char* src, size_t n, int link) {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream& target = open(stream);
    if (n == 0) return;
    Item item{Item::kCopy, nullptr, {dst, n}, {src, n}, link};
    bool read_before = false;
    for_each_copy([&](Item& queued) { read_before |= queued.src.overlaps(item.dst); });
    // What a copy will overwrite is undefined from now on: whoever reads it without waiting must not find old bytes that
    // happen to be right.
    if (!read_before && !item.dst.overlaps(item.src)) poison_lightly(item.dst);
    pending_copies_++;
    enqueue(target, std::move(item));
  }

  EventPtr record(int stream) {
    auto event = std::make_shared<Event>();
    std::lock_guard<std::mutex> lock(mutex_);
    Stream& target = open(stream);
    if (target.queue.empty()) event->finish();
    else enqueue(target, Item{Item::kRecord, event});
    return event;
  }

  void wait(int stream, const EventPtr& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream& target = open(stream);
    if (!event->done.load(std::memory_order_acquire)) enqueue(target, Item{Item::kWait, event});
  }

  // Blocks until the event (null: everything queued) has passed or `patience` is over; true if it has passed.
  bool host_wait(const Event* event, Clock::duration patience) {
    if (event && event->done.load(std::memory_order_acquire)) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    refuse_forked();
    return progress_.wait_for(lock, patience, [&] { return event ? event->done.load() : idle(); });
  }

  // Takes over a block that its owner frees. False, the usual case: no queued copy needs it, free it at once.
  bool quarantine(void* pointer, size_t n) {
    if (pending_copies_.load(std::memory_order_acquire) == 0) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    const Range range{(char*)pointer, n};
    std::shared_ptr<Quarantined> block;
    for_each_copy([&](Item& item) {
      const bool written = item.dst.overlaps(range);
      if (!written && !item.src.overlaps(range)) return;
      if (!block) block = std::make_shared<Quarantined>(range, counters);
      block->written |= written;
      item.keeps.push_back(block);
    });
    if (!block) return false;
    counters.freed_under_copy++;
    memset(pointer, kPoison, n);
    return true;
  }

  void register_host(char* address, size_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Range range{address, n};
    for (auto& entry : registered_)
      if (entry.second.overlaps(range)) throw std::invalid_argument("host memory is already registered");
    registered_[address] = range;
  }

  // The owner may unmap the memory when this is over, so the copies that use it spoil their data now. They are finished
  // when host_wait(event) is true; no event: there are none.
  std::vector<EventPtr> unregister_host(char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = registered_.find(address);
    if (found == registered_.end()) throw std::invalid_argument("host memory is not registered at this address");
    const Range range = found->second;
    registered_.erase(found);
    std::vector<EventPtr> busy;
    if (forked_) return busy;
    for (auto& stream : streams_) {
      bool used = false;
      for (Item& item : stream->queue) {
        if (item.kind != Item::kCopy) continue;
        for (const Range& part : {item.dst, item.src}) {
          if (!part.overlaps(range)) continue;
          memset(part.begin, kPoison, part.size);  // not the whole range: its owner may still use the rest
          used = true;
        }
      }
      if (!used) continue;
      busy.push_back(std::make_shared<Event>());
      stream->queue.push_back(Item{Item::kRecord, busy.back()});
      stream->work.notify_one();
    }
    if (!busy.empty()) counters.freed_under_copy++;
    return busy;
  }

  bool is_registered(char* address, size_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = registered_.upper_bound(address);
    if (after == registered_.begin()) return false;
    const Range& range = std::prev(after)->second;
    return address + n <= range.begin + range.size;
  }

  int64_t registered_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t total = 0;
    for (auto& entry : registered_) total += (int64_t)entry.second.size;
    return total;
  }

  int64_t pending_copies() const { return pending_copies_.load(); }

  // Stops and joins the workers. What is queued is dropped (a caller that wants it synchronizes first) and its events
  // pass, so that nobody waits for ever. Workers start again on demand unless `final`. Idempotent.
  void shutdown(bool final) {
    if (forked_) return;
    std::vector<std::thread> workers;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stopping_) {  // another thread is at it
        progress_.wait(lock, [&] { return !stopping_; });
      }
      closed_ |= final;
      stopping_ = true;
      for (auto& stream : streams_) {
        if (stream->worker.joinable()) workers.push_back(std::move(stream->worker));
        stream->work.notify_all();
      }
      progress_.notify_all();
    }
    for (auto& worker : workers) worker.join();
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& stream : streams_) {
      while (!stream->queue.empty()) {
        if (stream->queue.front().kind == Item::kCopy) counters.dropped_copies++;
        finish_front(*stream);
      }
    }
    registered_.clear();
    stopping_ = false;
    progress_.notify_all();
  }

  // fork(): the mutex is taken around it, so that the child does not inherit it from a thread that it does not have.
  void before_fork() { mutex_.lock(); }
  void after_fork(bool child) {
    if (child) {
      forked_ = true;  // no workers here: frees go straight through, everything else is refused
      pending_copies_ = 0;
    }
    mutex_.unlock();
  }
  bool forked() const { return forked_; }

 private:
  struct Link {
    double bytes_per_second = 0;  // 0: as fast as memory
    Clock::time_point free_at{};
  };

  std::mutex mutex_;
  std::condition_variable progress_;  // an item has finished, or we are stopping
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Link> links_{kLinks};
  std::map<char*, Range> registered_;
  std::atomic<int64_t> pending_copies_{0};
  std::atomic<bool> stopping_{false}, forked_{false};
  bool closed_ = false;

  void refuse_forked() const {
    if (forked_) throw std::runtime_error("the simulated device cannot be used in a forked process");
  }

  Stream& open(int stream) {
    refuse_forked();
    if (closed_ || stopping_) throw std::runtime_error("the simulated device has been shut down");
    return *streams_.at((size_t)stream);
  }

  bool idle() const {
    for (auto& stream : streams_)
      if (!stream->queue.empty()) return false;
    return true;
  }

  template <class F>
  void for_each_copy(F&& visit) {
    for (auto& stream : streams_)
      for (Item& item : stream->queue)
        if (item.kind == Item::kCopy) visit(item);
  }

  void enqueue(Stream& stream, Item item) {
    stream.queue.push_back(std::move(item));
    if (!stream.worker.joinable()) start(stream);
    stream.work.notify_one();
  }

  void start(Stream& stream) {
    // Signals belong to the main thread: a worker that took Ctrl-C would delay it.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    stream.worker = std::thread([this, &stream] { work(stream); });
    pthread_setname_np(stream.worker.native_handle(), "sim-copy");
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(Stream& stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      stream.work.wait(lock, [&] { return stopping_ || !stream.queue.empty(); });
      if (stopping_) return;
      Item& item = stream.queue.front();
      if (item.kind == Item::kCopy) transfer(item, lock);
      if (item.kind == Item::kWait)
        progress_.wait(lock, [&] { return stopping_ || item.event->done.load(std::memory_order_acquire); });
      if (stopping_) return;
      finish_front(stream);
      progress_.notify_all();
    }
  }

  void finish_front(Stream& stream) {
    Item& item = stream.queue.front();
    if (item.kind == Item::kRecord) item.event->finish();
    if (item.kind == Item::kCopy) pending_copies_--;
    stream.queue.pop_front();
  }

  void transfer(const Item& item, std::unique_lock<std::mutex>& lock) {
    for (size_t offset = 0; offset < item.dst.size && !stopping_; offset += kChunk) {
      const size_t n = std::min(kChunk, item.dst.size - offset);
      const Clock::time_point deadline = book(item.link, n);
      lock.unlock();
      memcpy(item.dst.begin + offset, item.src.begin + offset, n);
      lock.lock();
      const bool last = offset + n == item.dst.size;
      if (deadline > Clock::now() + (last ? Clock::duration::zero() : Clock::duration(kTimerSlack)))
        progress_.wait_until(lock, deadline, [&] { return stopping_.load(); });
    }
    if (stopping_) return;
    counters.copies++;
    if (item.link != kNoLink) counters.link_bytes[item.link] += (int64_t)item.dst.size;
  }

  // Reserves the link for n bytes; when they will have passed. Streams of one direction share its link.
  Clock::time_point book(int index, size_t n) {
    if (index == kNoLink) return {};
    Link& link = links_[(size_t)index];
    if (link.bytes_per_second <= 0) return {};
    const auto now = Clock::now();
    if (link.free_at + kLinkSlack < now) link.free_at = now;
    link.free_at += std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>((double)n / link.bytes_per_second));
    return link.free_at;
  }

  static void poison_lightly(const Range& range) {
    for (size_t offset = 0; offset < range.size; offset += kPage)
      memset(range.begin + offset, kPoison, std::min(kLine, range.size - offset));
  }
};

}  // namespace sim
