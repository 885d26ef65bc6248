// The allocator as PyTorch's generic code sees it: torch.accelerator's memory functions and
// torch.UntypedStorage(device="tpu") come here.

#include <c10/core/CachingDeviceAllocator.h>

#include "core/guard.h"
#include "core/memory_stats.h"
#include "core/runtime.h"
#include "core/storage.h"

namespace torch_tpu {

namespace {

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override { return tpu_allocator()->allocate(nbytes); }
  void copy_data(void* dst, const void* src, std::size_t count) const override {
    tpu_allocator()->copy_data(dst, src, count);
  }

  // There is something to report once the runtime has been started.
  bool initialized() override { return Runtime::get().initialized(); }
  // Freed memory went back to the plug-in at once.
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  // The plug-in keeps memory until every program that uses it is done.
  void recordStream(const c10::DataPtr& /*ptr*/, c10::Stream /*stream*/) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device_index(device);
    return device_stats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    check_device_index(device);
    reset_accumulated_stats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    check_device_index(device);
    reset_peak_stats(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_info(device);
  }
};

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();  // storages may outlive static destructors
  return allocator;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_allocator())

}  // namespace

}  // namespace torch_tpu
