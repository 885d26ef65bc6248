#include "core/memory_history.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "core/activity.h"
#include "core/storage.h"

namespace torch_tpu::memory_history {

namespace {

std::atomic<bool> recording{false};
std::atomic<uint64_t> last_address{uint64_t{1} << 40};

struct History {
  std::mutex mutex;
  std::deque<Event> events;
  std::unordered_map<uint64_t, Event> live;  // made while recording, by address
  size_t max_entries = 0;
  uint32_t flags = 0;

  static History& get() {
    static auto* instance = new History();
    return *instance;
  }
  void add(Event event) {
    if (max_entries == 0) return;
    if (events.size() >= max_entries) events.pop_front();
    events.push_back(std::move(event));
  }
};

Event make_event(bool alloc, int device, uint64_t address, size_t nbytes, const char* producer) {
  return {alloc,
          device,
          address,
          nbytes,
          activity::now() / 1000,
          producer,
          activity::scope_line(),
          activity::scope_stack()};
}

}  // namespace

bool enabled() { return recording.load(std::memory_order_relaxed); }

void start(size_t max_entries, bool stacks) {
  stop();
  History& history = History::get();
  const std::lock_guard<std::mutex> lock(history.mutex);
  history.events.clear();
  history.live.clear();
  history.max_entries = max_entries;
  history.flags = stacks ? activity::kStacks | activity::kLines : 0;
  if (history.flags != 0) activity::enable(history.flags);
  recording.store(true);
}

void stop() {
  History& history = History::get();
  const std::lock_guard<std::mutex> lock(history.mutex);
  recording.store(false);
  if (history.flags != 0) activity::disable(std::exchange(history.flags, 0));
}

std::vector<Event> events() {
  History& history = History::get();
  const std::lock_guard<std::mutex> lock(history.mutex);
  return {history.events.begin(), history.events.end()};
}

uint64_t next_address(size_t nbytes) {
  const uint64_t span = (std::max<size_t>(nbytes, 1) + 511) / 512 * 512;
  return last_address.fetch_add(span, std::memory_order_relaxed);
}

void allocated(int device, uint64_t address, size_t nbytes, const char* producer) {
  if (!enabled()) return;
  Event event = make_event(true, device, address, nbytes, producer);
  History& history = History::get();
  const std::lock_guard<std::mutex> lock(history.mutex);
  history.live[address] = event;
  history.add(std::move(event));
}

void freed(int device, uint64_t address, size_t nbytes, const char* producer) {
  if (!enabled()) return;
  Event event = make_event(false, device, address, nbytes, producer);
  History& history = History::get();
  Event dropped;  // its stack is let go after the lock
  const std::lock_guard<std::mutex> lock(history.mutex);
  const auto it = history.live.find(address);
  if (it != history.live.end()) {
    dropped = std::move(it->second);
    history.live.erase(it);
  }
  history.add(std::move(event));
}

std::vector<Block> blocks(int device) {
  std::vector<Block> out;
  Runtime& runtime = Runtime::get();
  if (!runtime.initialized()) return out;
  DeviceState& state = runtime.state(device);
  {
    const std::lock_guard<std::mutex> lock(state.live);
    for (const Buffer* b = state.live_head; b != nullptr; b = b->next()) {
      if (b->nbytes() == 0) continue;
      out.push_back({true, device, b->address(), b->nbytes(), 0, b->producer(), kNoLine, nullptr});
    }
  }
  History& history = History::get();
  const std::lock_guard<std::mutex> lock(history.mutex);
  for (Block& block : out) {
    const auto it = history.live.find(block.address);
    if (it != history.live.end()) block = it->second;
  }
  return out;
}

}  // namespace torch_tpu::memory_history
