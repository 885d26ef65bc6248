#include "core/pinned_memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace torch_tpu {

namespace {

// XLA copies a host array that is aligned to less.
constexpr size_t kAlignment = 64;

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr) throw std::bad_alloc();
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    blocks_.emplace(static_cast<const char*>(data), size);
    stats_.active_requests.increase(1);
    stats_.active_bytes.increase(size);
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(size);
    stats_.num_host_alloc += 1;
    return {data, data, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }

  void copy_data(void* dst, const void* src, std::size_t count) const override {
    std::memcpy(dst, src, count);
  }

  bool contains(const void* data) const {
    const auto* address = static_cast<const char*>(data);
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    auto it = blocks_.upper_bound(address);
    if (it == blocks_.begin()) return false;
    --it;
    return address < it->first + it->second;
  }

  // A transfer keeps its source alive itself, so there is nothing to hold back on its behalf.
  bool record_event(void* data, void* /*ctx*/, c10::Stream /*stream*/) override {
    return contains(data);
  }

  // Freed memory goes straight back to the C library.
  void empty_cache() override {}

  at::HostStats get_stats() override {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    return stats_;
  }

  void reset_accumulated_stats() override {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    for (at::Stat* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
                           &stats_.allocated_bytes}) {
      stat->reset_accumulated();
    }
    stats_.num_host_alloc = 0;
    stats_.num_host_free = 0;
  }

  void reset_peak_stats() override {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    for (at::Stat* stat : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations,
                           &stats_.allocated_bytes}) {
      stat->reset_peak();
    }
  }

  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();  // tensors may outlive static destructors
    return *allocator;
  }

 private:
  static void release(void* data) {
    PinnedAllocator& self = get();
    {
      const std::unique_lock<std::shared_mutex> lock(self.mutex_);
      const auto it = self.blocks_.find(static_cast<const char*>(data));
      if (it == self.blocks_.end()) return;
      const size_t size = it->second;
      self.blocks_.erase(it);
      self.stats_.active_requests.decrease(1);
      self.stats_.active_bytes.decrease(size);
      self.stats_.allocations.decrease(1);
      self.stats_.allocated_bytes.decrease(size);
      self.stats_.num_host_free += 1;
    }
    std::free(data);
  }

  mutable std::shared_mutex mutex_;
  std::map<const char*, size_t> blocks_;  // by address
  at::HostStats stats_;
};

}  // namespace

at::HostAllocator* pinned_allocator() { return &PinnedAllocator::get(); }

bool is_pinned(const void* data) { return PinnedAllocator::get().contains(data); }

}  // namespace torch_tpu

REGISTER_HOST_ALLOCATOR(at::DeviceType::PrivateUse1, torch_tpu::pinned_allocator())
