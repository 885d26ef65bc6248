#include "dispatch/executables.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>

#include "core/activity.h"
#include "core/errors.h"
#include "core/runtime.h"
#include "dispatch/describe.h"
#include "dispatch/op_state.h"
#include "dispatch/untraced.h"

namespace torch_tpu {

namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

double seconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

// What the cache beyond this process answered (torch_tpu/program/cache.py). Its methods take the
// GIL. What goes wrong in them costs a compilation, not the program; but find() may be interrupted
// while it waits for another process.
class Ticket {
 public:
  Ticket(const char* name, const std::string& text, const std::string& options) {
    const py::gil_scoped_acquire gil;
    try {
      const Untraced untraced;
      ticket_ = py::module_::import("torch_tpu.program.cache")
                    .attr("find")(name, py::bytes(text), py::bytes(options));
      if (ticket_.is_none()) return;
      const py::object payload = ticket_.attr("payload");
      if (payload.is_none()) return;
      payload_ = payload.cast<py::bytes>();
      remote_ = ticket_.attr("source").cast<std::string>() == "remote";
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() {
    const py::gil_scoped_acquire gil;
    if (asked()) call("close");
    payload_ = py::object();
    ticket_ = py::object();
  }

  bool asked() const { return !ticket_.is_none(); }
  bool found() const { return static_cast<bool>(payload_); }
  bool remote() const { return remote_; }
  // Valid without the GIL for as long as this object lives.
  std::string_view payload() const {
    return {PyBytes_AS_STRING(payload_.ptr()),
            static_cast<size_t>(PyBytes_GET_SIZE(payload_.ptr()))};
  }

  void reject(const char* why) {
    const py::gil_scoped_acquire gil;
    payload_ = py::object();
    call("reject", why);
  }

  void store(const pjrt::Executable& executable, double compile_seconds) {
    std::string bytes;
    std::string failure;
    try {
      bytes = executable.serialize();
    } catch (const pjrt::Error& error) {
      failure = error.what();
    }
    const py::gil_scoped_acquire gil;
    if (failure.empty()) {
      call("store", py::bytes(bytes), compile_seconds);
    } else {
      call("cannot_store", failure);
    }
  }

 private:
  template <typename... Args>
  void call(const char* method, Args&&... args) noexcept {
    try {
      const Untraced untraced;
      ticket_.attr(method)(std::forward<Args>(args)...);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch_tpu compile cache");
    }
  }

  py::object ticket_ = py::none();
  py::object payload_;
  bool remote_ = false;
};

struct Made {
  std::string name;
  const char* source;
  double seconds;
  std::weak_ptr<pjrt::Executable> executable;
};

struct Registry {
  std::mutex mutex;
  std::vector<Made> made;
  size_t sweep_at = 1024;

  void add(Made entry) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (made.size() >= sweep_at) {
      std::erase_if(made, [](const Made& m) { return m.executable.expired(); });
      sweep_at = std::max<size_t>(1024, 2 * made.size());
    }
    made.push_back(std::move(entry));
  }
};
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

std::shared_ptr<pjrt::Executable> load(const pjrt::Client& client, Ticket& ticket) {
  try {
    return client.deserialize(ticket.payload());
  } catch (const pjrt::Error& error) {
    ticket.reject(error.what());
    return nullptr;
  }
}

}  // namespace

std::shared_ptr<pjrt::Executable> obtain_executable(const char* name, const std::string& text,
                                                    const std::string& options) {
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  const pjrt::Client& client = Runtime::get().client();
  Counters& count = counters();

  auto start = Clock::now();
  Ticket ticket(name, text, options);
  if (ticket.found()) {
    const activity::Timer timer(activity::Kind::kLoad, name);
    auto executable = load(client, ticket);
    const int64_t taken = nanoseconds_since(start);
    count.load_ns.fetch_add(taken, std::memory_order_relaxed);
    if (executable != nullptr) {
      const bool remote = ticket.remote();
      (remote ? count.remote_hits : count.disk_hits).fetch_add(1, std::memory_order_relaxed);
      registry().add({name, remote ? "remote" : "disk", seconds(taken), executable});
      return executable;
    }
  }
  if (ticket.asked()) count.disk_misses.fetch_add(1, std::memory_order_relaxed);

  start = Clock::now();
  count.compiles.fetch_add(1, std::memory_order_relaxed);
  std::shared_ptr<pjrt::Executable> executable;
  try {
    const activity::Timer timer(activity::Kind::kCompile, name);
    executable = client.compile(text, "mlir", options);
  } catch (const pjrt::Error& error) {
    raise_compile_error(error, name, text);
  }
  const int64_t taken = nanoseconds_since(start);
  count.compile_ns.fetch_add(taken, std::memory_order_relaxed);
  registry().add({name, "compiled", seconds(taken), executable});
  if (ticket.asked()) {
    start = Clock::now();
    ticket.store(*executable, seconds(taken));
    count.store_ns.fetch_add(nanoseconds_since(start), std::memory_order_relaxed);
  }
  return executable;
}

std::vector<ExecutableRecord> executable_records() {
  std::vector<ExecutableRecord> records;
  Registry& known = registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (const Made& made : known.made) {
    if (const auto executable = made.executable.lock()) {
      records.push_back({made.name, made.source, made.seconds, executable->launches(),
                         executable->last_launch()});
    }
  }
  return records;
}

}  // namespace torch_tpu
