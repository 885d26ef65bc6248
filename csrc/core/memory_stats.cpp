#include "core/memory_stats.h"

#include <unistd.h>

#include <fstream>
#include <string>

#include "core/runtime.h"
#include "dispatch/trace.h"

namespace torch_tpu {

namespace {

c10::CachingAllocator::Stat& total(c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

// Bytes of the line `key` of /proc/meminfo, 0 if there is none.
size_t meminfo(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    size_t kib = 0;
    if (word == key && file >> kib) return kib * 1024;
  }
  return 0;
}

}  // namespace

c10::CachingDeviceAllocator::DeviceStats device_stats(int device) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  Runtime& runtime = Runtime::get();
  if (!runtime.initialized()) return stats;
  cut_trace(device);  // what is recorded has to have its memory to be counted
  const DeviceState& state = runtime.state(device);

  auto& count = total(stats.allocation);
  count.current = state.live_buffers.load();
  count.allocated = state.num_allocs.load();
  count.freed = state.num_frees.load();
  total(stats.active) = count;

  auto& bytes = total(stats.allocated_bytes);
  bytes.current = state.allocated.load();
  bytes.peak = state.peak.load();
  bytes.allocated = state.requested_total.load();
  bytes.freed = state.freed_total.load();
  total(stats.active_bytes) = bytes;
  total(stats.requested_bytes) = bytes;

  auto& reserved = total(stats.reserved_bytes);
  reserved = bytes;
  if (const auto plugin = runtime.device(device).memory_stats()) {
    reserved.current = plugin->pool_bytes.value_or(plugin->bytes_in_use);
    const auto& peak = plugin->pool_bytes ? plugin->peak_pool_bytes : plugin->peak_bytes_in_use;
    reserved.peak = std::max(peak.value_or(reserved.current), reserved.current);
  }

  stats.num_ooms = state.num_ooms.load();
  stats.num_device_alloc = count.allocated;
  stats.num_device_free = count.freed;
  return stats;
}

void reset_peak_stats(int device) {
  Runtime& runtime = Runtime::get();
  if (!runtime.initialized()) return;
  DeviceState& state = runtime.state(device);
  state.peak.store(state.allocated.load());
}

void reset_accumulated_stats(int device) {
  Runtime& runtime = Runtime::get();
  if (!runtime.initialized()) return;
  DeviceState& state = runtime.state(device);
  for (std::atomic<int64_t>* counter : {&state.requested_total, &state.freed_total,
                                        &state.num_allocs, &state.num_frees, &state.num_ooms}) {
    counter->store(0);
  }
}

std::pair<size_t, size_t> memory_info(int device) {
  const auto plugin = Runtime::get().device(device).memory_stats();
  if (plugin && plugin->bytes_limit) {
    const auto limit = static_cast<size_t>(*plugin->bytes_limit);
    const auto used = static_cast<size_t>(plugin->bytes_in_use);
    return {limit > used ? limit - used : 0, limit};
  }
  const size_t all =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return {std::min(meminfo("MemAvailable:"), all), all};
}

}  // namespace torch_tpu
