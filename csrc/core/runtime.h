#pragma once

// The process's one PJRT client and what is shared by everything above it.
//
// The client is made at first use and never destroyed: tensors, cached executables and the
// plug-in's threads may outlive any static destructor. In a child made by fork() it is unusable;
// every entry throws one clear error there.

#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/checks.h"
#include "pjrt/pjrt.h"

namespace torch_tpu {

// What Python decided before the first use (see torch_tpu/plugin.py).
struct RuntimeConfig {
  std::string plugin_path;
  std::string plugin_kind;  // "cpu", "tpu" or "custom"
  pjrt::Attributes create_options;
  int num_devices = 1;  // how many of the plug-in's devices to offer
};

class Buffer;

// Per-device state. `launch` serialises taking arguments, executing and installing results, so that
// a donated buffer is never seen by another thread.
struct DeviceState {
  std::mutex launch;
  // Guards the list of live buffers and `checks`.
  std::mutex live;
  Buffer* live_head = nullptr;

  struct PendingCheck {
    std::shared_ptr<Buffer> codes;    // one i64 each
    std::vector<ChecksRef> programs;  // whose
  };
  std::vector<PendingCheck> checks;

  std::atomic<int64_t> allocated{0}, peak{0}, requested_total{0}, freed_total{0};
  std::atomic<int64_t> num_allocs{0}, num_frees{0}, num_ooms{0}, live_buffers{0};
};

// Holds a device's launch mutex. Under it a program may be compiled, which may need the GIL; so
// nobody waits for it with the GIL in hand.
class LaunchLock {
 public:
  explicit LaunchLock(DeviceState& state) : mutex_(state.launch) {
    if (C10_UNLIKELY(!mutex_.try_lock())) wait();
  }
  ~LaunchLock() { mutex_.unlock(); }
  LaunchLock(const LaunchLock&) = delete;
  LaunchLock& operator=(const LaunchLock&) = delete;

 private:
  void wait();
  std::mutex& mutex_;
};

class Runtime {
 public:
  static Runtime& get();

  // Before first use only; throws c10::Error afterwards.
  void configure(RuntimeConfig config);
  bool initialized() const noexcept { return client_.load(std::memory_order_acquire) != nullptr; }
  bool in_bad_fork() const noexcept { return bad_fork_.load(std::memory_order_relaxed); }

  // Creates the client if need be. Throws c10::Error naming the plug-in and what to do.
  const pjrt::Client& client();
  const RuntimeConfig& config() const noexcept { return config_; }
  // Never throws: 0 if the plug-in cannot be used.
  int device_count() noexcept;
  const pjrt::Device& device(int index);
  DeviceState& state(int index);

  // Waits until everything enqueued so far on the device has finished and raises the first failure:
  // what a check says (core/checks.h), RuntimeError for a failed program.
  void synchronize(int index);
  // The same for the checks only, without waiting for values nobody asked for.
  void raise_pending_checks(int index);
  // Drops checks that turned out well, so that a loop without synchronisation does not collect
  // them.
  void compact_checks(int index);
  // Ready events of all work in flight on the device, for stream and event objects.
  std::vector<pjrt::Event> pending_events(int index);
  // Whether all work enqueued so far on the device has finished.
  bool idle(int index);

 private:
  Runtime();
  void create();

  RuntimeConfig config_;
  bool configured_ = false;
  std::mutex init_mutex_;
  std::atomic<const pjrt::Client*> client_{nullptr};
  std::vector<std::unique_ptr<DeviceState>> states_;
  std::string failure_;
  std::atomic<bool> bad_fork_{false};
};

// The calling thread's current device.
int current_device();
void set_current_device(int index);
int exchange_device(int index);

PJRT_Buffer_Type to_pjrt(c10::ScalarType type);  // throws c10::NotImplementedError
c10::ScalarType from_pjrt(PJRT_Buffer_Type type);

}  // namespace torch_tpu
