#include "core/modes.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <string>

namespace torch_tpu {

namespace {

std::atomic<EagerMode> default_mode{EagerMode::kStrict};
std::atomic<bool> excess_precision{false};
// How many overrides are in force anywhere. While there is none, reading a mode costs one load.
std::atomic<int> overrides{0};

// The one part of at::ThreadLocalState open to extensions holds Python objects by name; ours holds
// none and carries plain numbers. Immutable, because threads share it.
struct Overrides : c10::SafePyObject {
  Overrides() : c10::SafePyObject(nullptr, nullptr) {}
  int mode = kNoOverride;
  int passes = kNoOverride;
  int checks = kNoOverride;
  int options = kNoOverride;

  bool none() const {
    return mode == kNoOverride && passes == kNoOverride && checks == kNoOverride &&
           options == kNoOverride;
  }
};

const std::string& tls_key() {
  static const auto* key = new std::string("torch_tpu.overrides");
  return *key;
}

const Overrides* thread_overrides() {
  using Tls = at::impl::ThreadLocalPythonObjects;
  if (overrides.load(std::memory_order_relaxed) == 0 || !Tls::contains(tls_key())) return nullptr;
  return static_cast<const Overrides*>(Tls::get(tls_key()).get());
}

int exchange_override(int Overrides::* field, int value) {
  const Overrides* current = thread_overrides();
  auto next = std::make_shared<Overrides>();
  if (current != nullptr) {
    next->mode = current->mode;
    next->passes = current->passes;
    next->checks = current->checks;
    next->options = current->options;
  }
  const int previous = (*next).*field;
  (*next).*field = value;
  overrides.fetch_add((value != kNoOverride ? 1 : 0) - (previous != kNoOverride ? 1 : 0),
                      std::memory_order_relaxed);
  if (next->none()) {
    if (current != nullptr) at::impl::ThreadLocalPythonObjects::erase(tls_key());
  } else {
    at::impl::ThreadLocalPythonObjects::set(tls_key(), std::move(next));
  }
  return previous;
}

void check_mode(int mode) {
  TORCH_CHECK_VALUE(mode >= 0 && mode <= static_cast<int>(EagerMode::kFused),
                    "eager mode: no such mode; got ", mode, "; expected 0, 1 or 2");
}

int global_passes() {
  // Throws where the older and the newer setters of precision were mixed; the newer ones speak of
  // other backends only, so what holds here is the default.
  try {
    switch (at::globalContext().float32MatmulPrecision()) {
      case at::Float32MatmulPrecision::MEDIUM:
        return 1;
      case at::Float32MatmulPrecision::HIGH:
        return 3;
      case at::Float32MatmulPrecision::HIGHEST:
        return 6;
    }
  } catch (const c10::Error&) {
  }
  return 6;
}

}  // namespace

EagerMode eager_mode() {
  const Overrides* thread = thread_overrides();
  if (thread != nullptr && thread->mode != kNoOverride) {
    return static_cast<EagerMode>(thread->mode);
  }
  return default_mode.load(std::memory_order_relaxed);
}

int matmul_passes() {
  const Overrides* thread = thread_overrides();
  if (thread != nullptr && thread->passes != kNoOverride) return thread->passes;
  return global_passes();
}

int number_checks() {
  const Overrides* thread = thread_overrides();
  return thread != nullptr && thread->checks != kNoOverride ? thread->checks : 0;
}

int compiler_options() {
  const Overrides* thread = thread_overrides();
  return thread != nullptr ? thread->options : kNoOverride;
}

int exchange_compiler_options(int set) {
  TORCH_CHECK_VALUE(set >= kNoOverride, "compiler options: no such set; got ", set);
  return exchange_override(&Overrides::options, set);
}

bool allow_excess_precision() { return excess_precision.load(std::memory_order_relaxed); }

void set_eager_mode(int mode) {
  check_mode(mode);
  default_mode.store(static_cast<EagerMode>(mode), std::memory_order_relaxed);
}

void set_allow_excess_precision(bool allow) {
  excess_precision.store(allow, std::memory_order_relaxed);
}

int exchange_eager_mode_override(int mode) {
  if (mode != kNoOverride) check_mode(mode);
  return exchange_override(&Overrides::mode, mode);
}

int exchange_number_checks(int checks) {
  TORCH_CHECK_VALUE(checks == kNoOverride || (checks >= 0 && checks <= 3),
                    "debug: no such checks; got ", checks, "; expected bits 1 (NaN) and 2 (Inf)");
  return exchange_override(&Overrides::checks, checks);
}

int exchange_matmul_passes_override(int passes) {
  TORCH_CHECK_VALUE(passes == kNoOverride || passes == 1 || passes == 3 || passes == 6,
                    "precision: no such number of passes; got ", passes, "; expected 1, 3 or 6");
  return exchange_override(&Overrides::passes, passes);
}

}  // namespace torch_tpu
