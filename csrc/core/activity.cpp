#include "core/activity.h"

#include <sys/syscall.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_set>

namespace torch_tpu::activity {

std::atomic<uint32_t> current_flags{0};

namespace {

constexpr size_t kMaxSpans = size_t{1} << 21;  // 150 MB
constexpr int kNumFlags = 4;

struct Recorder {
  std::mutex mutex;
  std::array<int, kNumFlags> users{};
  std::vector<Span> spans;
  int64_t dropped = 0;
  std::map<std::tuple<LineId, Kind, const char*>, Total> totals;
  std::map<LineId, std::unordered_set<const void*>> programs;
  std::map<int, int64_t> last_end;  // of executions, by device
  int64_t open = 0;                 // executions whose end is not known yet
  std::condition_variable closed;

  static Recorder& get() {
    static auto* instance = new Recorder();  // the plug-in's threads outlive static destructors
    return *instance;
  }

  // With the mutex held.
  void add(const Span& span) {
    const uint32_t wanted = flags();
    if ((wanted & kTrace) != 0) {
      if (spans.size() < kMaxSpans) {
        spans.push_back(span);
      } else {
        ++dropped;
      }
    }
    if ((wanted & kTotals) != 0) {
      auto [it, added] = totals.try_emplace({span.line, span.kind, span.name},
                                            Total{span.line, span.kind, span.name, 0, 0, 0});
      Total& total = it->second;
      ++total.count;
      total.nanoseconds += span.end - span.start;
      total.bytes += span.bytes;
    }
  }
};

struct ThreadSite {
  int depth = 0;
  LineId line = kNoLine;
  std::shared_ptr<torch::CapturedTraceback> stack;
};
thread_local ThreadSite site;
thread_local std::vector<uint64_t> correlations;

int32_t thread_number() {
  thread_local const auto number = static_cast<int32_t>(syscall(SYS_gettid));
  return number;
}

Span make_span(Kind kind, const char* name, int64_t start, int64_t end, int64_t bytes, int device) {
  return {kind,
          name,
          start,
          end,
          bytes,
          device,
          thread_number(),
          site.line,
          correlations.empty() ? 0 : correlations.back()};
}

}  // namespace

void enable(uint32_t wanted) {
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  for (int i = 0; i < kNumFlags; ++i) {
    if ((wanted >> i & 1) != 0 && recorder.users[static_cast<size_t>(i)]++ == 0) {
      current_flags.fetch_or(1U << i);
    }
  }
}

void disable(uint32_t wanted) {
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  for (int i = 0; i < kNumFlags; ++i) {
    int& users = recorder.users[static_cast<size_t>(i)];
    if ((wanted >> i & 1) != 0 && users > 0 && --users == 0) current_flags.fetch_and(~(1U << i));
  }
}

const char* kind_name(Kind kind) {
  constexpr std::array<const char*, static_cast<size_t>(Kind::kCount)> names = {
      "lower",   "compile", "load", "launch",   "execute", "to_device",
      "to_host", "across",  "wait", "fallback", "hit"};
  return names[static_cast<size_t>(kind)];
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void record(Kind kind, const char* name, int64_t start, int64_t end, int64_t bytes, int device) {
  const Span span = make_span(kind, name, start, end, bytes, device);
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.add(span);
}

void count(Kind kind, const char* name) {
  if (!spans_wanted()) return;
  const int64_t time = now();
  record(kind, name, time, time, 0, 0);
}

void record_execution(const char* name, const void* program, int64_t start, int device,
                      const pjrt::Event& done) {
  Recorder& recorder = Recorder::get();
  const Span span = make_span(Kind::kExecute, name, start, start, 0, device);
  {
    const std::lock_guard<std::mutex> lock(recorder.mutex);
    ++recorder.open;
    if ((flags() & kTotals) != 0) recorder.programs[span.line].insert(program);
  }
  const auto finish = [span](const pjrt::Error* /*error*/) {
    Recorder& r = Recorder::get();
    const std::lock_guard<std::mutex> lock(r.mutex);
    Span closed = span;
    closed.end = now();
    int64_t& last = r.last_end[closed.device];
    // Programs of a device run one after the other.
    closed.start = std::min(std::max(closed.start, last), closed.end);
    last = closed.end;
    r.add(closed);
    if (--r.open == 0) r.closed.notify_all();
  };
  try {
    done.on_ready(finish);
  } catch (const pjrt::Error& error) {
    finish(&error);  // observing must not make an op fail
  }
}

namespace {

void await_open(Recorder& recorder, std::unique_lock<std::mutex>& lock) {
  recorder.closed.wait_for(lock, std::chrono::seconds(1), [&] { return recorder.open == 0; });
}

}  // namespace

std::vector<Span> take_spans() {
  Recorder& recorder = Recorder::get();
  std::unique_lock<std::mutex> lock(recorder.mutex);
  await_open(recorder, lock);
  recorder.dropped = 0;
  return std::exchange(recorder.spans, {});
}

int64_t dropped_spans() {
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  return recorder.dropped;
}

std::vector<Total> totals() {
  Recorder& recorder = Recorder::get();
  std::unique_lock<std::mutex> lock(recorder.mutex);
  await_open(recorder, lock);
  std::vector<Total> out;
  for (const auto& [key, total] : recorder.totals) out.push_back(total);
  return out;
}

std::vector<std::pair<LineId, size_t>> programs_per_line() {
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  std::vector<std::pair<LineId, size_t>> out;
  for (const auto& [line, programs] : recorder.programs) out.emplace_back(line, programs.size());
  return out;
}

void clear_totals() {
  Recorder& recorder = Recorder::get();
  const std::lock_guard<std::mutex> lock(recorder.mutex);
  recorder.totals.clear();
  recorder.programs.clear();
}

void push_correlation(uint64_t id) { correlations.push_back(id); }

void pop_correlation() {
  if (!correlations.empty()) correlations.pop_back();
}

void Scope::enter(bool line_wanted) {
  entered_ = true;
  if (site.depth++ > 0) return;
  const uint32_t wanted = flags();
  if (line_wanted || (wanted & (kLines | kStacks)) != 0) site.line = current_line();
  if ((wanted & kStacks) != 0) {
    site.stack = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  }
}

void Scope::leave() {
  if (--site.depth > 0) return;
  site.line = kNoLine;
  site.stack = nullptr;
}

LineId scope_line() { return site.line; }

std::shared_ptr<torch::CapturedTraceback> scope_stack() { return site.stack; }

}  // namespace torch_tpu::activity
