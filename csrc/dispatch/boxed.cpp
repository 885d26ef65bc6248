#include "dispatch/boxed.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "core/activity.h"
#include "core/errors.h"
#include "core/generator.h"
#include "core/modes.h"
#include "dispatch/observed.h"
#include "dispatch/packs.h"
#include "dispatch/trace.h"

namespace torch_tpu {

Packs& Packs::of(int device) {
  static auto* packs = new std::vector<std::unique_ptr<Packs>>(64);
  auto& slot = (*packs)[static_cast<size_t>(device)];
  if (slot == nullptr) slot = std::make_unique<Packs>();
  return *slot;
}

void define_contents(Storage& storage) {
  if (storage.buffer != nullptr) return;
  const at::Tensor zeros = at::zeros(
      storage.dims,
      at::TensorOptions()
          .dtype(storage.dtype)
          .device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(storage.device)));
  storage.set_buffer(storage_of(zeros).buffer);
}

namespace {

bool checks_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("TORCH_TPU_CHECK_INDEX");
    return value == nullptr || std::string(value) != "0";
  }();
  return enabled;
}

}  // namespace

bool index_checks() { return checks_enabled(); }

uint64_t environment_word() {
  return static_cast<uint64_t>(matmul_passes()) | (checks_enabled() ? 256U : 0U) |
         (allow_excess_precision() ? 512U : 0U) |
         static_cast<uint64_t>(compiler_options() + 1) << 16;
}

namespace {

constexpr size_t kMaxInline = 24;

// Bounds the flags that nobody has asked for yet.
void bound_checks(int device) {
  constexpr size_t kMaxPending = 256;
  DeviceState& state = Runtime::get().state(device);
  bool full = false;
  {
    const std::lock_guard<std::mutex> lock(state.live);
    full = state.checks.size() >= kMaxPending;
  }
  if (full) Runtime::get().compact_checks(device);
}

void define_parameters(const Program& program, const Call& call) {
  for (const int p : program.parameters) {
    Storage& storage = *call.storages[static_cast<size_t>(p)];
    if (C10_UNLIKELY(storage.buffer == nullptr)) define_contents(storage);
  }
}

// Records the call for Fused mode; pending buffers of new results are left in `results`.
void record(const ProgramRef& program, Call& call, c10::SmallVectorImpl<BufferRef>& results) {
  define_parameters(*program, call);
  c10::SmallVector<BufferRef, 4> replaced;  // destroyed after the lock is gone
  const LaunchLock lock(Runtime::get().state(call.device));
  Trace::of(call.device).record(program, call, results, replaced);
}

// Executes and installs the results of writes; new buffers are left in `results`.
void execute(const Program& program, Call& call, c10::SmallVectorImpl<BufferRef>& results) {
  Runtime& runtime = Runtime::get();
  DeviceState& state = runtime.state(call.device);
  const pjrt::Executable& executable = program.executable();
  define_parameters(program, call);
  if (program.takes_rng) {
    const RngState rng = next_state(call.generator, call.device, program.draws);
    call.ints.push_back(rng.seed);
    call.ints.push_back(rng.offset);
  }
  call.ints.append(program.dynamic_sizes.begin(), program.dynamic_sizes.end());
  // What the writes replace is destroyed after the lock is gone.
  c10::SmallVector<BufferRef, 4> replaced;
  const LaunchLock lock(state);
  c10::SmallVector<PJRT_Buffer*, kMaxInline> args;
  for (const int p : program.parameters) {
    const Buffer& buffer = *call.storages[static_cast<size_t>(p)]->buffer;
    if (C10_UNLIKELY(!buffer.ready())) {  // recorded in Fused mode
      if (buffer.pending()) cut_trace_locked(call.device);
      buffer.raise_if_failed();
    }
    args.push_back(buffer.raw());
  }
  Packs& packs = Packs::of(call.device);
  if (program.takes_ints) {
    args.push_back(packs.get(call.ints.data(), call.ints.size(), call.device));
  }
  if (program.takes_floats) {
    args.push_back(packs.get(call.floats.data(), call.floats.size(), call.device));
  }
  c10::SmallVector<int64_t, 4> kept;
  for (const Program::Output& output : program.outputs) {
    if (output.donates < 0) continue;
    const int p = program.parameters[static_cast<size_t>(output.donates)];
    if (call.storages[static_cast<size_t>(p)]->buffer.use_count() > 1) {
      kept.push_back(output.donates);
    }
  }
  const size_t count = program.outputs.size() + (program.checks != nullptr ? 1 : 0);
  c10::SmallVector<PJRT_Buffer*, kMaxInline> outs(count, nullptr);
  counters().executions.fetch_add(1, std::memory_order_relaxed);
  const int64_t start = activity::spans_wanted() ? activity::now() : 0;
  try {
    executable.execute(args.data(), args.size(), outs.data(), kept.data(), kept.size(),
                       runtime.device(call.device).raw());
  } catch (const pjrt::Error& error) {
    if (error.code() == PJRT_Error_Code_RESOURCE_EXHAUSTED) {
      state.num_ooms.fetch_add(1, std::memory_order_relaxed);
    }
    raise_execution_error(error, program.name);
  }
  const pjrt::Api& api = runtime.client().api();
  if (C10_UNLIKELY(start != 0)) {
    observe_execution(program.name, executable, start, call.device, outs[0]);
  }
  for (size_t i = 0; i < program.outputs.size(); ++i) {
    const Program::Output& output = program.outputs[i];
    if (output.donates >= 0) {
      const int p = program.parameters[static_cast<size_t>(output.donates)];
      BufferRef& old = call.storages[static_cast<size_t>(p)]->buffer;
      if (old.use_count() == 1) old->donated();
    }
    auto buffer = std::make_shared<Buffer>(pjrt::Buffer(api, outs[i]), call.device, output.nbytes,
                                           program.name, output.padded);
    if (output.target >= 0) {
      const TensorRef& target = call.tensors[static_cast<size_t>(output.target)];
      Storage& storage = *target.storage;
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
  if (program.checks != nullptr) {
    auto code = std::make_shared<Buffer>(pjrt::Buffer(api, outs[count - 1]), call.device,
                                         sizeof(int64_t), program.name);
    const std::lock_guard<std::mutex> live(state.live);
    state.checks.push_back({std::move(code), {program.checks}});
  }
}

}  // namespace

void execute_program(const Program& program, Call& call, c10::SmallVectorImpl<BufferRef>& results) {
  if (program.text.empty()) {
    results.resize(program.outputs.size());
    return;
  }
  execute(program, call, results);
  if (C10_UNLIKELY(program.checks != nullptr)) bound_checks(call.device);
}

namespace {

void finish(const Program& program, Call& call, c10::SmallVectorImpl<BufferRef>& results,
            torch::jit::Stack* stack, size_t num_args) {
  c10::SmallVector<at::Tensor, 8> fresh(program.outputs.size());
  const auto tensor = [&](int i) -> at::Tensor& {
    at::Tensor& t = fresh[static_cast<size_t>(i)];
    if (!t.defined()) {
      const Program::Output& output = program.outputs[static_cast<size_t>(i)];
      t = make_tensor(call.device, output.dtype, output.sizes, output.strides, output.base,
                      std::move(results[static_cast<size_t>(i)]));
    }
    return t;
  };
  c10::SmallVector<c10::IValue, 4> returned;
  for (const Program::Return& r : program.returns) {
    switch (r.kind) {
      case Program::Return::kNew:
        returned.emplace_back(tensor(r.index));
        break;
      case Program::Return::kArgument:
        returned.push_back((*stack)[stack->size() - num_args + static_cast<size_t>(r.index)]);
        break;
      case Program::Return::kNone:
        returned.emplace_back(at::Tensor());
        break;
      case Program::Return::kList: {
        c10::List<at::Tensor> list;
        list.reserve(r.list.size());
        for (const int i : r.list) list.push_back(tensor(i));
        returned.emplace_back(std::move(list));
        break;
      }
    }
  }
  if (eager_mode() == EagerMode::kDebug) {
    for (const at::Tensor& t : fresh) {
      if (t.defined()) storage_of(t).buffer->await();
    }
    for (const Program::Output& output : program.outputs) {
      if (output.target < 0) continue;
      call.tensors[static_cast<size_t>(output.target)].storage->buffer->await();
    }
    if (program.checks != nullptr) Runtime::get().raise_pending_checks(call.device);
  }
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(num_args), stack->end());
  for (c10::IValue& value : returned) stack->push_back(std::move(value));
}

// The device a call without tensor operands runs on: its device argument or the current one.
int device_from_arguments(const OpState& op, c10::ArrayRef<c10::IValue> args) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (op.kinds[i] == ArgKind::kPlacement && args[i].isDevice()) {
      const c10::Device device = args[i].toDevice();
      if (device.type() == c10::DeviceType::PrivateUse1 && device.has_index()) {
        return device.index();
      }
    }
  }
  return current_device();
}

}  // namespace

void run_call(OpState& op, torch::jit::Stack* stack) {
  const size_t num_args = op.kinds.size();
  if (op.moves_cpu_tensors && expand_masks(op, stack)) return;
  Call call;
  for (int attempt = 0;; ++attempt) {
    const c10::ArrayRef<c10::IValue> args(stack->data() + (stack->size() - num_args), num_args);
    call.clear();
    call.key.push_back(environment_word());
    call.parse(op, args);
    if (call.device < 0) call.device = device_from_arguments(op, args);
    ProgramRef program = op.find(call.key);
    if (C10_LIKELY(program != nullptr)) {
      counters().hits.fetch_add(1, std::memory_order_relaxed);
      activity::count(activity::Kind::kHit, op.name);
      if (C10_UNLIKELY(op.has_check.load(std::memory_order_relaxed)) && !op.same_operands(call)) {
        check_arguments(op, call, args);
        op.remember_operands(call);
      }
    } else {
      counters().misses.fetch_add(1, std::memory_order_relaxed);
      program = compile_program(op, call, args);
      op.insert(call.key, program);
    }
    if (C10_UNLIKELY(program->cpu_fallback)) {
      run_on_cpu(op, stack);
      return;
    }
    if (C10_UNLIKELY(!program->repads.empty())) {
      TORCH_CHECK(attempt < 3, op.name, ": an operand did not take its padding");
      for (const Program::Repad& repad : program->repads) {
        pad_storage(*call.storages[static_cast<size_t>(repad.storage)], repad.padded);
      }
      continue;
    }
    if (C10_UNLIKELY(!program->resizes.empty())) {
      TORCH_CHECK(attempt < 2, op.name, ": an out= argument did not take the result's shape");
      for (const Program::Resize& resize : program->resizes) {
        const TensorRef& target = call.tensors[static_cast<size_t>(resize.tensor)];
        at::native::resize_output(*target.tensor, resize.sizes);
      }
      continue;
    }
    c10::SmallVector<BufferRef, 8> results;
    if (eager_mode() == EagerMode::kFused && !program->text.empty()) {
      record(program, call, results);
    } else {
      execute_program(*program, call, results);
    }
    finish(*program, call, results, stack, num_args);
    return;
  }
}

void run_boxed(OpState& op, torch::jit::Stack* stack) {
  if (C10_LIKELY(activity::flags() == 0 && eager_mode() != EagerMode::kDebug)) {
    run_call(op, stack);
  } else {
    run_observed(op, stack);
  }
}

void run_on_cpu(OpState& op, torch::jit::Stack* stack) {
  const activity::Timer timer(activity::Kind::kFallback, op.name);
  counters().fallbacks.fetch_add(1, std::memory_order_relaxed);
  at::native::cpu_fallback(op.handle, stack);
}

namespace {

struct BoxedKernel final : public c10::OperatorKernel {
  explicit BoxedKernel(OpState& state) : state_(&state) {}
  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/,
                  torch::jit::Stack* stack) {
    run_boxed(*state_, stack);
  }

 private:
  OpState* state_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_boxed(OpState::of(op), stack);
}

torch::Library& library(const std::string& ns) {
  static auto* libraries = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  auto& lib = (*libraries)[ns];
  if (lib == nullptr) {
    lib = std::make_unique<torch::Library>(torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse1,
                                           __FILE__, __LINE__);
  }
  return *lib;
}

}  // namespace

void register_kernel(const std::string& name, const std::vector<std::string>& operands) {
  const size_t colons = name.find("::");
  TORCH_CHECK(colons != std::string::npos, "register_kernel: expected namespace::op, got ", name);
  const size_t dot = name.find('.', colons);
  const std::string base = name.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(base.c_str(), overload.c_str());
  OpState& state = OpState::of(handle);
  state.set_operands(operands);
  library(name.substr(0, colons))
      .impl(name.substr(colons + 2).c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(state)));
}

void register_fallback() {
  static auto* lib = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1,
                                        __FILE__, __LINE__);
  lib->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace torch_tpu
