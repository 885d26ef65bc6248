#include "dispatch/trace.h"

#include <torch/csrc/autograd/graph_task.h>

#include <mutex>

#include "core/errors.h"
#include "core/generator.h"
#include "dispatch/fused.h"
#include "dispatch/op_state.h"

namespace torch_tpu {

namespace {

// Where a recording is looked at for a loop, and where it is cut in any case: compiling takes time
// in proportion to the number of calls, and more than that when it is very large.
constexpr size_t kLookForLoop = 512;
constexpr size_t kMaxCalls = 4096;

}  // namespace

Trace& Trace::of(int device) {
  static auto* mutex = new std::mutex();
  static auto* traces = new std::vector<std::unique_ptr<Trace>>(64);
  thread_local Trace* recent = nullptr;
  if (recent != nullptr && recent->device_ == device) return *recent;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& slot = traces->at(static_cast<size_t>(device));
  if (slot == nullptr) slot.reset(new Trace(device));
  recent = slot.get();
  return *recent;
}

uint32_t Trace::value_of(const BufferRef& buffer) {
  if (buffer->recording != epoch_) {
    buffer->recording = epoch_;
    buffer->number = static_cast<uint32_t>(now_.values.size());
    now_.values.push_back({buffer, -1, 0, -1});
  }
  return buffer->number;
}

void Trace::record(const ProgramRef& program, Call& call, c10::SmallVectorImpl<BufferRef>& results,
                   c10::SmallVectorImpl<BufferRef>& replaced) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  // The end of a backward pass is where a training step divides: what autograd saved is gone, and
  // the part before repeats whatever happens between steps.
  if (last_in_backward_ && !in_backward && !now_.nodes.empty()) cut();
  last_in_backward_ = in_backward;

  counters().recorded.fetch_add(1, std::memory_order_relaxed);
  Recording& r = now_;
  Recording::Node node;
  node.program = program;
  node.first_argument = static_cast<uint32_t>(r.arguments.size());
  node.first_int = static_cast<uint32_t>(r.ints.size());
  node.first_float = static_cast<uint32_t>(r.floats.size());
  r.key.push_back(program->uid);
  for (const int p : program->parameters) {
    const uint32_t value = value_of(call.storages[static_cast<size_t>(p)]->buffer);
    r.arguments.push_back(value);
    r.key.push_back(value);
  }
  if (program->takes_rng) {
    const RngState rng = next_state(call.generator, call.device, program->draws);
    call.ints.push_back(rng.seed);
    call.ints.push_back(rng.offset);
  }
  call.ints.append(program->dynamic_sizes.begin(), program->dynamic_sizes.end());
  if (program->takes_ints) r.ints.insert(r.ints.end(), call.ints.begin(), call.ints.end());
  if (program->takes_floats) {
    r.floats.insert(r.floats.end(), call.floats.begin(), call.floats.end());
  }
  node.first_value = static_cast<uint32_t>(r.values.size());
  for (size_t i = 0; i < program->outputs.size(); ++i) {
    const Program::Output& output = program->outputs[i];
    auto buffer =
        std::make_shared<Buffer>(call.device, output.nbytes, program->name, output.padded);
    buffer->recording = epoch_;
    buffer->number = static_cast<uint32_t>(r.values.size());
    int origin = -1;
    if (output.donates >= 0) {
      const uint32_t from = r.arguments[node.first_argument + static_cast<size_t>(output.donates)];
      const Recording::Value& value = r.values[from];
      origin = value.node < 0 ? static_cast<int>(from) : value.origin;
    }
    r.values.push_back({buffer, static_cast<int>(r.nodes.size()), static_cast<int>(i), origin});
    if (output.target >= 0) {
      Storage& storage = *call.tensors[static_cast<size_t>(output.target)].storage;
      replaced.push_back(storage.set_buffer(std::move(buffer)));
      if (storage.dtype != output.base_dtype ||
          c10::IntArrayRef(storage.dims) != c10::IntArrayRef(output.base)) {
        storage.set_base(output.base_dtype, output.base);
      }
      results.emplace_back();
    } else {
      results.push_back(std::move(buffer));
    }
  }
  r.nodes.push_back(std::move(node));
  if (wants_cut()) cut();
}

// The smallest number of last calls that repeat the ones before them; 0 if none does.
size_t Trace::period() const {
  const auto& nodes = now_.nodes;
  const size_t count = nodes.size();
  for (size_t p = 1; p <= count / 2; ++p) {
    size_t same = 0;
    while (same < p &&
           nodes[count - 1 - same].program->uid == nodes[count - 1 - same - p].program->uid) {
      ++same;
    }
    if (same == p) return p;
  }
  return 0;
}

// A loop that never asks for a result would grow the trace for ever. Cut at any fixed length, each
// piece would start at another place of the loop's body and be a new program; so the pieces are a
// whole number of bodies long.
bool Trace::wants_cut() {
  const size_t count = now_.nodes.size();
  if (loop_calls_ > 0) {
    if (count == 1 && now_.nodes[0].program->uid != loop_first_) loop_calls_ = 0;
    return count == loop_calls_;
  }
  if (count < kLookForLoop || (count & (count - 1)) != 0) return false;
  const size_t p = period();
  if (p == 0) return count >= kMaxCalls;
  loop_calls_ = std::max<size_t>(1, kLookForLoop / 2 / p) * p;
  loop_first_ = now_.nodes[count - p].program->uid;
  return true;
}

void Trace::cut() {
  if (now_.nodes.empty()) return;
  Recording recording;
  std::swap(recording, now_);
  ++epoch_;
  // The next recording is likely as long as this one.
  now_.nodes.reserve(recording.nodes.size());
  now_.values.reserve(recording.values.size());
  now_.arguments.reserve(recording.arguments.size());
  now_.key.reserve(recording.key.size());
  run_recording(recording, device_);
}

void cut_trace_locked(int device) { Trace::of(device).cut(); }

void cut_trace(int device) {
  Runtime& runtime = Runtime::get();
  if (!runtime.initialized() || runtime.in_bad_fork()) return;
  const LaunchLock lock(runtime.state(device));
  Trace::of(device).cut();
}

void materialise_slow(const Buffer& buffer) {
  if (buffer.pending()) cut_trace(buffer.device());
  buffer.raise_if_failed();
}

}  // namespace torch_tpu
