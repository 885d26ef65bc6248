// What PyTorch's generic code asks of an accelerator.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>

#include "core/generator.h"
#include "core/guard.h"
#include "core/pinned_memory.h"
#include "core/runtime.h"
#include "core/storage.h"

namespace torch_tpu {

namespace {

c10::DeviceIndex or_current(c10::DeviceIndex index) {
  return index < 0 ? static_cast<c10::DeviceIndex>(current_device()) : index;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Runtime::get().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    const Runtime& runtime = Runtime::get();
    return runtime.initialized() && index >= 0 && index < runtime.config().num_devices;
  }
  void init() const override { Runtime::get().client(); }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(Runtime::get().device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { checked_exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return or_current(-1); }
  // As with CUDA a negative index changes nothing and -1 comes back.
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    if (index < 0) return -1;
    return static_cast<c10::DeviceIndex>(checked_exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);  // becoming current does not touch a device
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    index = or_current(index);
    check_device_index(index);
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    index = or_current(index);
    check_device_index(index);
    return at::make_generator<GeneratorImpl>(index);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* /*data*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "tpu: a data pointer only identifies a storage; it is no address on a device");
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());  // never destroyed, as PyTorch's own
  return true;
}();

}  // namespace

}  // namespace torch_tpu
