#include "dispatch/fused.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "core/activity.h"
#include "core/errors.h"
#include "dispatch/executables.h"
#include "dispatch/link.h"
#include "dispatch/observed.h"
#include "dispatch/op_state.h"
#include "dispatch/packs.h"

namespace torch_tpu {

namespace {

// One compiled form of a recording: which of its values it hands out.
struct FusedProgram {
  Linked linked;  // its text is dropped once compiled
  std::vector<bool> live;
  std::shared_ptr<pjrt::Executable> executable;
  const char* name = "";
  std::atomic<bool> used_again{false};
};

// What is known of recordings with one key.
struct Entry {
  std::vector<uint64_t> key;
  std::vector<std::shared_ptr<FusedProgram>> programs;
  int seen = 0;
  uint64_t last_use = 0;
};

struct Table {
  std::mutex mutex;
  std::unordered_multimap<uint64_t, std::shared_ptr<Entry>> entries;
  uint64_t tick = 0;
  std::deque<std::shared_ptr<FusedProgram>> latest;  // compiled most recently
};

Table& table() {
  static auto* instance = new Table();
  return *instance;
}

constexpr size_t kMaxEntries = 1024;

uint64_t hash(const std::vector<uint64_t>& words) {
  uint64_t h = 0x9E3779B97F4A7C15ULL ^ words.size();
  for (const uint64_t word : words) {
    h = (h ^ word) * 0xBF58476D1CE4E5B9ULL;
    h ^= h >> 29;
  }
  return h;
}

// With the table's mutex held.
void bound_entries(Table& t) {
  if (t.entries.size() <= kMaxEntries) return;
  std::vector<uint64_t> ticks;
  for (const auto& [h, entry] : t.entries) ticks.push_back(entry->last_use);
  const auto middle = ticks.begin() + static_cast<std::ptrdiff_t>(ticks.size() / 2);
  std::nth_element(ticks.begin(), middle, ticks.end());
  std::erase_if(t.entries, [&](const auto& item) { return item.second->last_use < *middle; });
}

std::shared_ptr<Entry> entry_for(const std::vector<uint64_t>& key) {
  Table& t = table();
  const uint64_t h = hash(key);
  const std::lock_guard<std::mutex> lock(t.mutex);
  const auto [begin, end] = t.entries.equal_range(h);
  for (auto it = begin; it != end; ++it) {
    if (it->second->key != key) continue;
    it->second->last_use = ++t.tick;
    return it->second;
  }
  auto entry = std::make_shared<Entry>();
  entry->key = key;
  entry->last_use = ++t.tick;
  t.entries.emplace(h, entry);
  bound_entries(t);
  return entry;
}

// The values somebody besides the recording holds.
std::vector<bool> live_values(const Recording& r) {
  std::vector<bool> live(r.values.size(), false);
  for (size_t v = 0; v < r.values.size(); ++v) {
    live[v] = r.values[v].node >= 0 && r.values[v].buffer.use_count() > 1;
  }
  return live;
}

bool covers(const std::vector<bool>& have, const std::vector<bool>& wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] && !have[i]) return false;
  }
  return true;
}

// Compiling a program costs about this many seconds, and this many more for each call in it.
constexpr double kCompile = 25e-3;
constexpr double kCompileCall = 3e-3;
// Smaller recordings are compiled at once, unless programs turn out not to be used again.
constexpr size_t kLarge = 64;
constexpr size_t kLatest = 16;

// Whether programs compiled lately were compiled in vain: shapes or the order of calls change all
// the time.
bool mostly_in_vain() {
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  const auto in_vain = std::count_if(t.latest.begin(), t.latest.end(), [](const auto& program) {
    return !program->used_again.load(std::memory_order_relaxed);
  });
  return static_cast<size_t>(in_vain) > kLatest * 3 / 4;
}

// Whether a recording that is new had better be run call by call: its calls are mostly compiled
// already, and nobody knows whether it comes again.
bool better_one_by_one(const Recording& r) {
  if (r.nodes.size() < kLarge && !mostly_in_vain()) return false;
  std::unordered_set<uint64_t> missing;
  for (const Recording::Node& node : r.nodes) {
    if (!node.program->compiled()) missing.insert(node.program->uid);
  }
  const double apart = kCompile * static_cast<double>(missing.size());
  return apart < kCompile + kCompileCall * static_cast<double>(r.nodes.size());
}

// Tells torch_tpu/program/recompiles.py what is about to be compiled: each call and its results.
void report(const Recording& r) {
  const py::gil_scoped_acquire gil;
  try {
    py::dict description;
    for (size_t n = 0; n < r.nodes.size(); ++n) {
      const Program& program = *r.nodes[n].program;
      std::string call = program.name;
      for (const Program::Output& output : program.outputs) {
        call += std::string(" ") + c10::toString(output.base_dtype) + "[";
        for (size_t d = 0; d < output.base.size(); ++d) {
          call += (d > 0 ? ", " : "") + std::to_string(output.base[d]);
        }
        call += "]";
      }
      description[py::str("call " + std::to_string(n))] = call;
    }
    py::module_::import("torch_tpu.program.recompiles")
        .attr("report_compile")("fused calls", description, py::arg("exact") = false);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_tpu compile report");
  }
}

std::shared_ptr<FusedProgram> compile(const Recording& r, std::vector<bool> live) {
  report(r);
  auto program = std::make_shared<FusedProgram>();
  program->linked = link(r, live);
  program->live = std::move(live);
  const std::string name = "fused program of " + std::to_string(program->linked.num_nodes) +
                           " ops, ending in " + r.nodes.back().program->name;
  program->name = intern(name);
  program->executable =
      obtain_executable(program->name, program->linked.text, r.nodes.back().program->options);
  program->linked.text.clear();
  program->linked.text.shrink_to_fit();
  return program;
}

// The program for a recording, or null if it is to be run call by call.
std::shared_ptr<FusedProgram> program_for(const Recording& r, const std::vector<bool>& live) {
  const std::shared_ptr<Entry> entry = entry_for(r.key);
  std::vector<bool> wanted = live;
  for (const auto& program : entry->programs) {
    if (!covers(program->live, live)) continue;
    counters().hits.fetch_add(1, std::memory_order_relaxed);
    program->used_again.store(true, std::memory_order_relaxed);
    return program;
  }
  if (entry->seen++ == 0 && better_one_by_one(r)) return nullptr;
  counters().misses.fetch_add(1, std::memory_order_relaxed);
  // Which results are still held may vary from run to run (a loss that is logged now and then). One
  // program that hands out all that was ever wanted serves every case.
  for (const auto& program : entry->programs) {
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = wanted[i] || program->live[i];
  }
  entry->programs.push_back(compile(r, std::move(wanted)));
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.latest.push_back(entry->programs.back());
  if (t.latest.size() > kLatest) t.latest.pop_front();
  return entry->programs.back();
}

struct Launch {
  c10::SmallVector<PJRT_Buffer*, 64> arguments;
  c10::SmallVector<int64_t, 8> kept;
  c10::SmallVector<PJRT_Buffer*, 64> results;
};

void launch(Launch& l, const pjrt::Executable& executable, int device, const char* name) {
  Runtime& runtime = Runtime::get();
  counters().executions.fetch_add(1, std::memory_order_relaxed);
  const int64_t start = activity::spans_wanted() ? activity::now() : 0;
  try {
    executable.execute(l.arguments.data(), l.arguments.size(), l.results.data(), l.kept.data(),
                       l.kept.size(), runtime.device(device).raw());
  } catch (const pjrt::Error& error) {
    if (error.code() == PJRT_Error_Code_RESOURCE_EXHAUSTED) {
      runtime.state(device).num_ooms.fetch_add(1, std::memory_order_relaxed);
    }
    raise_execution_error(error, name);
  }
  if (C10_UNLIKELY(start != 0)) observe_execution(name, executable, start, device, l.results[0]);
}

void add_check(int device, PJRT_Buffer* codes, std::vector<ChecksRef> programs, const char* name) {
  Runtime& runtime = Runtime::get();
  auto buffer = std::make_shared<Buffer>(pjrt::Buffer(runtime.client().api(), codes), device,
                                         programs.size() * sizeof(int64_t), name);
  DeviceState& state = runtime.state(device);
  const std::lock_guard<std::mutex> lock(state.live);
  state.checks.push_back({std::move(buffer), std::move(programs)});
}

void run_fused(Recording& r, const FusedProgram& program, int device) {
  const Linked& linked = program.linked;
  const pjrt::Api& api = Runtime::get().client().api();
  Launch l;
  for (const uint32_t v : linked.inputs) l.arguments.push_back(r.values[v].buffer->raw());
  Packs& packs = Packs::of(device);
  if (linked.takes_ints) l.arguments.push_back(packs.get(r.ints.data(), r.ints.size(), device));
  if (linked.takes_floats) {
    l.arguments.push_back(packs.get(r.floats.data(), r.floats.size(), device));
  }
  const auto donated = [&](size_t o) {
    return linked.donors[o] >= 0 &&
           r.values[linked.inputs[static_cast<size_t>(linked.donors[o])]].buffer.use_count() == 1;
  };
  c10::SmallVector<uint32_t, 16> taken;
  for (size_t o = 0; o < linked.outputs.size(); ++o) {
    if (linked.donors[o] < 0) continue;
    if (donated(o)) {
      taken.push_back(linked.inputs[static_cast<size_t>(linked.donors[o])]);
    } else {
      l.kept.push_back(linked.donors[o]);
    }
  }
  l.results.resize(linked.outputs.size() + (linked.checks.empty() ? 0 : 1), nullptr);
  launch(l, *program.executable, device, program.name);
  for (const uint32_t v : taken) r.values[v].buffer->donated();
  for (size_t o = 0; o < linked.outputs.size(); ++o) {
    r.values[linked.outputs[o]].buffer->fill(pjrt::Buffer(api, l.results[o]));
  }
  if (!linked.checks.empty()) add_check(device, l.results.back(), linked.checks, "checks");
}

// Each call by its own program, as in Strict mode.
void run_one_by_one(Recording& r, int device) {
  const pjrt::Api& api = Runtime::get().client().api();
  std::vector<uint32_t> last_use(r.values.size(), 0);
  for (uint32_t n = 0; n < r.nodes.size(); ++n) {
    for (size_t i = 0; i < r.num_arguments(r.nodes[n]); ++i) {
      last_use[r.arguments[r.nodes[n].first_argument + i]] = n;
    }
  }
  Packs& packs = Packs::of(device);
  for (uint32_t n = 0; n < r.nodes.size(); ++n) {
    const Recording::Node& node = r.nodes[n];
    const Program& program = *node.program;
    const pjrt::Executable& executable = program.executable();
    const size_t end = n + 1;
    const bool last = end == r.nodes.size();
    Launch l;
    for (size_t i = 0; i < r.num_arguments(node); ++i) {
      l.arguments.push_back(r.values[r.arguments[node.first_argument + i]].buffer->raw());
    }
    if (program.takes_ints) {
      const size_t stop = last ? r.ints.size() : r.nodes[end].first_int;
      l.arguments.push_back(
          packs.get(r.ints.data() + node.first_int, stop - node.first_int, device));
    }
    if (program.takes_floats) {
      const size_t stop = last ? r.floats.size() : r.nodes[end].first_float;
      l.arguments.push_back(
          packs.get(r.floats.data() + node.first_float, stop - node.first_float, device));
    }
    c10::SmallVector<uint32_t, 8> taken;
    for (const Program::Output& output : program.outputs) {
      if (output.donates < 0) continue;
      const uint32_t v = r.arguments[node.first_argument + static_cast<size_t>(output.donates)];
      if (r.values[v].buffer.use_count() == 1 && last_use[v] == n) {
        taken.push_back(v);
      } else {
        l.kept.push_back(output.donates);
      }
    }
    l.results.resize(program.outputs.size() + (program.checks != nullptr ? 1 : 0), nullptr);
    launch(l, executable, device, program.name);
    for (const uint32_t v : taken) r.values[v].buffer->donated();
    for (size_t i = 0; i < program.outputs.size(); ++i) {
      r.values[node.first_value + i].buffer->fill(pjrt::Buffer(api, l.results[i]));
    }
    if (program.checks != nullptr) {
      add_check(device, l.results.back(), {program.checks}, program.name);
    }
    for (size_t i = 0; i < r.num_arguments(node); ++i) {
      const uint32_t v = r.arguments[node.first_argument + i];
      if (last_use[v] == n && r.values[v].node >= 0) r.values[v].buffer.reset();
    }
  }
}

void fail(const Recording& r, const std::string& message) {
  for (const Recording::Value& value : r.values) {
    if (value.buffer != nullptr && value.buffer->pending()) value.buffer->fail(message);
  }
}

}  // namespace

void run_recording(Recording& r, int device) {
  const std::vector<bool> live = live_values(r);
  const auto checks = [](const Recording::Node& node) { return node.program->checks != nullptr; };
  if (std::find(live.begin(), live.end(), true) == live.end() &&
      std::none_of(r.nodes.begin(), r.nodes.end(), checks)) {
    return;  // nobody wants any of it
  }
  try {
    const std::shared_ptr<FusedProgram> program = program_for(r, live);
    if (program != nullptr) {
      counters().fused_runs.fetch_add(1, std::memory_order_relaxed);
      run_fused(r, *program, device);
    } else {
      counters().split_runs.fetch_add(1, std::memory_order_relaxed);
      run_one_by_one(r, device);
    }
  } catch (const std::exception& error) {
    fail(r, error.what());
    throw;
  }
}

size_t num_fused_programs() {
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  size_t count = 0;
  for (const auto& [h, entry] : t.entries) count += entry->programs.size();
  return count;
}

void clear_fused_programs() {
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.entries.clear();
  t.latest.clear();
}

}  // namespace torch_tpu
