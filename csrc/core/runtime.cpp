#include "core/runtime.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include "core/activity.h"
#include "core/errors.h"
#include "core/storage.h"
#include "dispatch/trace.h"

namespace torch_tpu {

namespace {

thread_local int thread_device = 0;

constexpr const char* kForkMessage =
    "Cannot re-initialize tpu in forked subprocess. To use tpu with multiprocessing, you must use "
    "the 'spawn' start method";

}  // namespace

Runtime& Runtime::get() {
  static auto* runtime = new Runtime();  // never destroyed, see the header
  return *runtime;
}

Runtime::Runtime() {
  pthread_atfork(nullptr, nullptr, [] {
    Runtime& runtime = Runtime::get();
    if (runtime.initialized()) runtime.bad_fork_.store(true, std::memory_order_relaxed);
  });
}

void Runtime::configure(RuntimeConfig config) {
  const std::lock_guard<std::mutex> lock(init_mutex_);
  TORCH_CHECK(!initialized(), "tpu: the plug-in is already in use and cannot be changed");
  config_ = std::move(config);
  configured_ = true;
  failure_.clear();
}

const pjrt::Client& Runtime::client() {
  if (C10_UNLIKELY(in_bad_fork())) TORCH_CHECK(false, kForkMessage);
  const pjrt::Client* client = client_.load(std::memory_order_acquire);
  if (C10_LIKELY(client != nullptr)) return *client;
  const std::lock_guard<std::mutex> lock(init_mutex_);
  if (!initialized()) create();
  return *client_.load(std::memory_order_acquire);
}

void Runtime::create() {
  TORCH_CHECK(configured_, "tpu: no PJRT plug-in is configured; import torch_tpu first");
  TORCH_CHECK(failure_.empty(), failure_);
  try {
    const pjrt::Api& api = pjrt::Api::load(config_.plugin_path);
    auto client = pjrt::Client::create(api, config_.create_options);
    const auto offered = static_cast<int>(client->devices().size());
    TORCH_CHECK(config_.num_devices <= offered, "TORCH_TPU_NUM_DEVICES asks for ",
                config_.num_devices, " devices; the plug-in offers ", offered);
    if (config_.num_devices <= 0) config_.num_devices = offered;
    for (int i = 0; i < config_.num_devices; ++i) {
      states_.push_back(std::make_unique<DeviceState>());
    }
    client_.store(client.release(), std::memory_order_release);
  } catch (const std::exception& error) {
    states_.clear();
    failure_ =
        c10::str("tpu: the PJRT plug-in ", config_.plugin_path, " cannot be used: ", error.what(),
                 "\nRun `python -m torch_tpu doctor` for what was found.");
    TORCH_CHECK(false, failure_);
  }
}

int Runtime::device_count() noexcept {
  if (!configured_ || in_bad_fork()) return configured_ ? config_.num_devices : 0;
  if (config_.num_devices > 0 && failure_.empty()) return config_.num_devices;
  try {
    client();
    return config_.num_devices;
  } catch (...) {
    return 0;
  }
}

const pjrt::Device& Runtime::device(int index) {
  const pjrt::Client& c = client();
  TORCH_CHECK(index >= 0 && index < config_.num_devices, "tpu: invalid device ordinal ", index,
              "; there ", config_.num_devices == 1 ? "is 1 device" : "are ",
              config_.num_devices == 1 ? "" : c10::str(config_.num_devices, " devices"));
  return c.devices()[static_cast<size_t>(index)];
}

DeviceState& Runtime::state(int index) {
  if (C10_UNLIKELY(static_cast<size_t>(index) >= states_.size())) device(index);
  return *states_[static_cast<size_t>(index)];
}

std::vector<pjrt::Event> Runtime::pending_events(int index) {
  std::vector<pjrt::Event> events;
  if (!initialized()) return events;
  cut_trace(index);
  DeviceState& s = state(index);
  const LaunchLock launch(s);
  const std::lock_guard<std::mutex> lock(s.live);
  for (Buffer* b = s.live_head; b != nullptr; b = b->next_) {
    if (b->nbytes_ == 0 || b->buffer_.is_deleted()) continue;
    pjrt::Event event = b->buffer_.ready_event();
    if (!event.ready()) events.push_back(std::move(event));
  }
  return events;
}

bool Runtime::idle(int index) { return pending_events(index).empty(); }

void Runtime::synchronize(int index) {
  client();
  cut_trace(index);
  const activity::Scope scope;
  const activity::Timer timer(activity::Kind::kWait, "synchronize", index);
  DeviceState& s = state(index);
  struct Wait {
    pjrt::Event event;
    const char* producer;
  };
  std::vector<Wait> waits;
  {
    const LaunchLock launch(s);
    const std::lock_guard<std::mutex> lock(s.live);
    for (Buffer* b = s.live_head; b != nullptr; b = b->next_) {
      if (b->nbytes_ == 0 || b->buffer_.is_deleted()) continue;
      waits.push_back({b->buffer_.ready_event(), b->producer_});
    }
  }
  std::optional<pjrt::Error> failure;
  const char* producer = nullptr;
  for (const Wait& wait : waits) {
    try {
      wait.event.await();
    } catch (const pjrt::Error& error) {
      if (!failure) {
        failure = error;
        producer = wait.producer;
      }
    }
  }
  raise_pending_checks(index);
  if (failure) raise_execution_error(*failure, producer);
}

namespace {

struct FailedCheck {
  ChecksRef checks;  // null if there is none
  int64_t code = 0;
};

FailedCheck failed(const DeviceState::PendingCheck& check) {
  std::vector<int64_t> codes(check.programs.size());
  try {
    check.codes->pjrt().to_host(codes.data(), codes.size() * sizeof(int64_t));
  } catch (const pjrt::Error&) {
    return {};  // the program failed: its results carry that error
  }
  for (size_t i = 0; i < codes.size(); ++i) {
    if (codes[i] != 0) return {check.programs[i], codes[i]};
  }
  return {};
}

}  // namespace

void Runtime::compact_checks(int index) {
  DeviceState& s = state(index);
  std::vector<DeviceState::PendingCheck> checks;
  {
    const std::lock_guard<std::mutex> lock(s.live);
    checks.swap(s.checks);
  }
  std::erase_if(checks, [](const auto& check) { return failed(check).checks == nullptr; });
  const std::lock_guard<std::mutex> lock(s.live);
  s.checks.insert(s.checks.begin(), checks.begin(), checks.end());
}

void Runtime::raise_pending_checks(int index) {
  DeviceState& s = state(index);
  std::vector<DeviceState::PendingCheck> checks;
  {
    const std::lock_guard<std::mutex> lock(s.live);
    checks.swap(s.checks);
  }
  FailedCheck first;
  for (const auto& check : checks) {
    FailedCheck found = failed(check);
    if (first.checks == nullptr) first = std::move(found);
  }
  if (first.checks != nullptr) raise_check(*first.checks, first.code);
}

void LaunchLock::wait() {
  if (PyGILState_Check() == 0) {
    mutex_.lock();
    return;
  }
  PyThreadState* state = PyEval_SaveThread();
  mutex_.lock();
  PyEval_RestoreThread(state);
}

int current_device() { return thread_device; }

void set_current_device(int index) { thread_device = index; }

int exchange_device(int index) { return std::exchange(thread_device, index); }

namespace {
struct TypePair {
  c10::ScalarType torch;
  PJRT_Buffer_Type pjrt;
};
constexpr TypePair kTypes[] = {
    {c10::ScalarType::Bool, PJRT_Buffer_Type_PRED},
    {c10::ScalarType::Char, PJRT_Buffer_Type_S8},
    {c10::ScalarType::Short, PJRT_Buffer_Type_S16},
    {c10::ScalarType::Int, PJRT_Buffer_Type_S32},
    {c10::ScalarType::Long, PJRT_Buffer_Type_S64},
    {c10::ScalarType::Byte, PJRT_Buffer_Type_U8},
    {c10::ScalarType::UInt16, PJRT_Buffer_Type_U16},
    {c10::ScalarType::UInt32, PJRT_Buffer_Type_U32},
    {c10::ScalarType::UInt64, PJRT_Buffer_Type_U64},
    {c10::ScalarType::Half, PJRT_Buffer_Type_F16},
    {c10::ScalarType::BFloat16, PJRT_Buffer_Type_BF16},
    {c10::ScalarType::Float, PJRT_Buffer_Type_F32},
    {c10::ScalarType::Double, PJRT_Buffer_Type_F64},
    {c10::ScalarType::ComplexFloat, PJRT_Buffer_Type_C64},
    {c10::ScalarType::ComplexDouble, PJRT_Buffer_Type_C128},
    {c10::ScalarType::Float8_e4m3fn, PJRT_Buffer_Type_F8E4M3FN},
    {c10::ScalarType::Float8_e5m2, PJRT_Buffer_Type_F8E5M2},
    {c10::ScalarType::Float8_e4m3fnuz, PJRT_Buffer_Type_F8E4M3FNUZ},
    {c10::ScalarType::Float8_e5m2fnuz, PJRT_Buffer_Type_F8E5M2FNUZ},
};
}  // namespace

PJRT_Buffer_Type to_pjrt(c10::ScalarType type) {
  for (const auto& pair : kTypes) {
    if (pair.torch == type) return pair.pjrt;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "dtype ", type, " is not supported on the tpu device");
}

c10::ScalarType from_pjrt(PJRT_Buffer_Type type) {
  for (const auto& pair : kTypes) {
    if (pair.pjrt == type) return pair.torch;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "PJRT buffer type ", static_cast<int>(type),
                              " has no PyTorch dtype");
}

}  // namespace torch_tpu
