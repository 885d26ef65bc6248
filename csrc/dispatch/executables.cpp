#include "dispatch/executables.h"

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>

#include "core/activity.h"
#include "core/errors.h"
#include "core/runtime.h"
#include "dispatch/op_state.h"

namespace torch_tpu {

namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

}  // namespace

std::shared_ptr<pjrt::Executable> obtain_executable(const char* name, const std::string& text,
                                                    const std::string& options) {
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  const auto start = Clock::now();
  counters().compiles.fetch_add(1, std::memory_order_relaxed);
  const activity::Timer timer(activity::Kind::kCompile, name);
  try {
    auto executable = Runtime::get().client().compile(text, "mlir", options);
    counters().compile_ns.fetch_add(nanoseconds_since(start), std::memory_order_relaxed);
    return executable;
  } catch (const pjrt::Error& error) {
    raise_compile_error(error, name, text);
  }
}

}  // namespace torch_tpu
