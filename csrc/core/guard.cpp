#include "core/guard.h"

#include <c10/core/DeviceCapability.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/errors.h"
#include "core/runtime.h"

namespace torch_tpu {

void check_device_index(int index) {
  if (index == current_device()) return;  // has been checked, or is 0
  const int count = Runtime::get().device_count();
  TORCH_CHECK(index >= 0 && index < count, "tpu: invalid device ordinal; got ", index,
              "; expected 0 to ", count - 1, " (there ", count == 1 ? "is " : "are ", count,
              count == 1 ? " device" : " devices",
              "). On the CPU plug-in TORCH_TPU_NUM_DEVICES sets how many there are");
}

int checked_exchange_device(int index) {
  check_device_index(index);
  return exchange_device(index);
}

void synchronize_device(int index) {
  check_device_index(index);
  Runtime& runtime = Runtime::get();
  if (runtime.initialized()) runtime.synchronize(index);
}

namespace {

// Stream numbers: 0 is the default stream, else 2 * n, plus 1 for high priority. The numbers below
// kFirstNewStream belong to the pool.
constexpr c10::StreamId kPoolSize = 32;
constexpr c10::StreamId kFirstNewStream = kPoolSize + 1;

c10::StreamId stream_id(c10::StreamId n, bool high_priority) {
  return 2 * n + (high_priority ? 1 : 0);
}

c10::StreamId& current_stream(int device) {
  static thread_local std::array<c10::StreamId, std::numeric_limits<c10::DeviceIndex>::max()>
      streams{};
  return streams.at(static_cast<size_t>(device));
}

using Clock = std::chrono::steady_clock;

// The work in flight at one call of record(). Shared with the callbacks that count it down.
struct Recording {
  const uint64_t number = next_number();  // in the order of recording
  std::mutex mutex;
  std::condition_variable finished;
  size_t remaining = 0;
  Clock::time_point time;
  std::optional<pjrt::Error> error;

  void done(const pjrt::Error* failure) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure != nullptr && !error) error = *failure;
    if (--remaining > 0) return;
    time = Clock::now();
    finished.notify_all();
  }
  bool complete() {
    const std::lock_guard<std::mutex> lock(mutex);
    return remaining == 0;
  }

 private:
  static uint64_t next_number() {
    static std::atomic<uint64_t> count{0};
    return count.fetch_add(1, std::memory_order_relaxed);
  }
};

std::shared_ptr<Recording> start_recording(int device) {
  auto recording = std::make_shared<Recording>();
  const auto events = Runtime::get().pending_events(device);
  recording->remaining = events.size() + 1;  // one for this thread: not complete before the end
  for (const pjrt::Event& event : events) {
    event.on_ready([recording](const pjrt::Error* error) { recording->done(error); });
  }
  recording->done(nullptr);
  return recording;
}

class Event {
 public:
  explicit Event(int device) : device_(device) {}

  int device() const noexcept { return device_; }
  void record() {
    auto recording = start_recording(device_);
    const std::lock_guard<std::mutex> lock(mutex_);
    recording_ = std::move(recording);
  }
  std::shared_ptr<Recording> recording() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recording_;
  }

 private:
  const int device_;
  mutable std::mutex mutex_;
  std::shared_ptr<Recording> recording_;
};

bool has_pjrt_type(c10::ScalarType type) {
  try {
    to_pjrt(type);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

c10::DeviceCapability supported_types() {
  c10::DeviceCapability capability;  // all set
#define TORCH_TPU_CLEAR_UNSUPPORTED(_, name)                          \
  if (!has_pjrt_type(c10::ScalarType::name)) {                        \
    capability.capability_data.supported_scalar_types.has_##name = 0; \
  }
  AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(TORCH_TPU_CLEAR_UNSUPPORTED)
#undef TORCH_TPU_CLEAR_UNSUPPORTED
  return capability;
}

class GuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return make_device(checked_exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return make_device(current_device()); }
  void setDevice(c10::Device device) const override { checked_exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(Runtime::get().device_count());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    static const c10::DeviceCapability capability = supported_types();
    return capability;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(index < 0 ? current_device() : index);
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = resolve(device);
    return make_stream(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(resolve(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    static std::atomic<uint32_t> next{0};
    const c10::StreamId n = 1 + next.fetch_add(1, std::memory_order_relaxed) % kPoolSize;
    return make_stream(resolve(device), stream_id(n, high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    static std::atomic<c10::StreamId> next{kFirstNewStream};
    const c10::StreamId n = next.fetch_add(1, std::memory_order_relaxed);
    return make_stream(resolve(device), stream_id(n, priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = resolve(stream.device());
    return make_stream(index, std::exchange(current_stream(index), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream /*stream*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tpu: a stream has no native handle; PJRT gives out none");
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Runtime::get().idle(stream.device_index());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_device(stream.device_index());
  }
  // Freed memory stays with the plug-in until every program that uses it is done.
  void recordDataPtrOnStream(const c10::DataPtr& /*ptr*/,
                             const c10::Stream& /*stream*/) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device ",
                static_cast<int>(device), " does not match recording stream's device ",
                static_cast<int>(stream.device_index()), ".");
    check_device_index(stream.device_index());
    auto recorded = std::unique_ptr<Event>();
    if (*event == nullptr) recorded = std::make_unique<Event>(stream.device_index());
    (recorded ? recorded.get() : static_cast<Event*>(*event))->record();
    if (recorded) *event = recorded.release();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // Nothing to enqueue: see the top of guard.h.
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->recording()->complete();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& recorded = *static_cast<Event*>(event);
    const auto recording = recorded.recording();
    std::optional<pjrt::Error> error;
    {
      std::unique_lock<std::mutex> lock(recording->mutex);
      recording->finished.wait(lock, [&] { return recording->remaining == 0; });
      error = recording->error;
    }
    Runtime& runtime = Runtime::get();
    if (runtime.initialized()) runtime.raise_pending_checks(recorded.device());
    if (error) raise_execution_error(*error, "Event.synchronize");
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    const auto from = static_cast<Event*>(start)->recording();
    const auto to = static_cast<Event*>(end)->recording();
    const std::chrono::duration<double, std::milli> span = to->time - from->time;
    // The clock is read by callbacks, which may overtake one another by a few microseconds.
    return from->number <= to->number ? std::max(span.count(), 0.0) : std::min(span.count(), 0.0);
  }

 private:
  static c10::Device make_device(int index) {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
  }
  static c10::Stream make_stream(int index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, make_device(index), id);
  }
  static int resolve(c10::Device device) {
    if (device.index() < 0) return current_device();
    check_device_index(device.index());
    return device.index();
  }
};

}  // namespace

int stream_priority(int64_t stream_id) { return (stream_id & 1) != 0 ? -1 : 0; }

namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)
}  // namespace

}  // namespace torch_tpu
