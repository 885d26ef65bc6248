#pragma once

// What the core does, observed: spans of lowering, compiling, executing, copying and waiting, each
// with the Python line that asked for it. Off by default; then every hook below costs one relaxed
// load.
//
// Two sinks: a list of spans (for torch.profiler, see kineto.cpp) and totals per line and name (for
// `python -m torch_tpu explain`). Names are strings that live forever.

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/source_line.h"
#include "pjrt/pjrt.h"

namespace torch {
struct CapturedTraceback;
}

namespace torch_tpu::activity {

enum Flag : uint32_t {
  kTrace = 1,   // keep every span
  kTotals = 2,  // add spans up by line, kind and name
  kLines = 4,   // spans carry Python lines
  kStacks = 8,  // sites carry whole Python stacks, see memory_history.h
};

extern std::atomic<uint32_t> current_flags;
inline uint32_t flags() { return current_flags.load(std::memory_order_relaxed); }
inline bool spans_wanted() { return C10_UNLIKELY((flags() & (kTrace | kTotals)) != 0); }

// Nests: a flag is on while it was enabled more often than disabled.
void enable(uint32_t flags);
void disable(uint32_t flags);

enum class Kind : uint8_t {
  kLower,    // Python makes the program's text (host)
  kCompile,  // the plug-in compiles it (host)
  kLoad,     // or it is loaded from the cache on disk (host)
  kLaunch,   // the program is handed over (host)
  kExecute,  // from its hand-over, or the end of the program before it, until its results are ready
  kToDevice,  // copies
  kToHost,
  kAcross,
  kWait,      // the host waits for results
  kFallback,  // an op runs on the CPU, its copies included
  kHit,       // a cached program was found; no duration
  kCount,
};
const char* kind_name(Kind kind);

struct Span {
  Kind kind;
  const char* name;
  int64_t start;  // nanoseconds since the epoch
  int64_t end;
  int64_t bytes;
  int32_t device;
  int32_t thread;  // the host thread that asked, as the kernel numbers it
  LineId line;
  uint64_t correlation;  // the profiler's number of the op around it; 0 if none
};

struct Total {
  LineId line;
  Kind kind;
  const char* name;
  int64_t count;
  int64_t nanoseconds;
  int64_t bytes;
};

int64_t now();
void record(Kind kind, const char* name, int64_t start, int64_t end, int64_t bytes, int device);
// A span of no duration.
void count(Kind kind, const char* name);
// A span of the device that ends when `done` is; also notes that this line ran `program`.
void record_execution(const char* name, const void* program, int64_t start, int device,
                      const pjrt::Event& done);

// Waits for spans whose end is still open (a second at most), then hands the list over.
std::vector<Span> take_spans();
int64_t dropped_spans();  // since the list was taken last; it is bounded
std::vector<Total> totals();
std::vector<std::pair<LineId, size_t>> programs_per_line();
void clear_totals();

// The host thread's stack of op numbers, kept by the profiler.
void push_correlation(uint64_t id);
void pop_correlation();

// Times a piece of host work. Costs one load if nobody wants spans.
class Timer {
 public:
  Timer(Kind kind, const char* name, int device = 0, int64_t bytes = 0)
      : kind_(kind), name_(name), device_(device), bytes_(bytes) {
    if (spans_wanted()) start_ = now();
  }
  ~Timer() {
    if (C10_UNLIKELY(start_ != 0)) record(kind_, name_, start_, now(), bytes_, device_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  Kind kind_;
  const char* name_;
  int device_;
  int64_t bytes_;
  int64_t start_ = 0;
};

// The thread is carrying out one call from Python. Finds the call's line if anybody wants it; this
// takes the GIL, so no lock of ours may be held. The outermost scope counts.
class Scope {
 public:
  explicit Scope(bool line_wanted = false) {
    if (C10_UNLIKELY(flags() != 0 || line_wanted)) enter(line_wanted);
  }
  ~Scope() {
    if (C10_UNLIKELY(entered_)) leave();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  void enter(bool line_wanted);
  void leave();
  bool entered_ = false;
};

// Of the scope the thread is in: its line, kNoLine if unknown; and its stack, if kStacks.
LineId scope_line();
std::shared_ptr<torch::CapturedTraceback> scope_stack();

}  // namespace torch_tpu::activity
