#include "dispatch/compiled.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/activity.h"
#include "core/modes.h"
#include "dispatch/boxed.h"
#include "dispatch/describe.h"
#include "dispatch/untraced.h"

namespace torch_tpu {

namespace {

// Counts the times that all programs were forgotten; part of every key.
std::atomic<uint64_t> epoch{0};

// Programs kept of one graph; the least recently used goes first.
constexpr size_t kMaxVariants = 256;

bool on_device(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->device_type() == c10::DeviceType::PrivateUse1;
}

}  // namespace

// One value that the graph returns.
struct CompiledGraph::Value {
  enum Kind : uint8_t { kNew, kArgument, kView, kViewOfNew, kObject };
  Kind kind = kObject;
  size_t index = 0;  // output or input
  bool to_cpu = false;
  Dims sizes, strides;
  int64_t offset = 0;
  py::object object;  // a number or None
};

struct CompiledGraph::Variant {
  std::vector<uint64_t> key;
  std::shared_ptr<Program> program = std::make_shared<Program>();
  std::vector<Value> values;
  std::vector<at::Tensor> constants;  // storages that follow the inputs'
  py::object fallback;                // runs the graph instead, if not null
};

struct CompiledGraph::Inputs {
  Call call;
  std::vector<int> tensor_of;  // place among call.tensors, -1 for what is no tensor
  std::vector<std::pair<size_t, size_t>> uploaded;  // input, place in call.held
};

CompiledGraph::CompiledGraph(const std::string& name, py::object lower, py::object failed,
                             int device, std::vector<int> uploads)
    : name_(intern(name)),
      lower_(std::move(lower)),
      failed_(std::move(failed)),
      device_(device),
      uploads_(std::move(uploads)) {}

void CompiledGraph::parse(const py::list& inputs, Inputs& parsed) const {
  Call& call = parsed.call;
  call.key.push_back(environment_word());
  call.key.push_back(epoch.load(std::memory_order_relaxed));
  const size_t count = inputs.size();
  parsed.tensor_of.reserve(count);
  // The device has to be known before CPU tensors are moved to it.
  int device = -1;
  for (size_t i = 0; i < count && device < 0; ++i) {
    PyObject* item = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
    if (THPVariable_Check(item) && on_device(THPVariable_Unpack(item))) {
      device = THPVariable_Unpack(item).device().index();
    }
  }
  call.device = device >= 0 ? device : device_ >= 0 ? device_ : current_device();
  const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(call.device));
  const auto hold = [&call](at::Tensor tensor) -> const at::Tensor& {
    call.held.push_back(std::make_unique<at::Tensor>(std::move(tensor)));
    return *call.held.back();
  };
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(i));
    if (!THPVariable_Check(item)) {
      parsed.tensor_of.push_back(-1);
      if (item == Py_None) {
        call.add_static(c10::IValue());
      } else if (PyBool_Check(item)) {
        call.add_static(item == Py_True);
      } else if (PyFloat_Check(item)) {
        call.add_scalar(PyFloat_AS_DOUBLE(item));
      } else {
        call.add_static(py::handle(item).cast<int64_t>());
      }
      continue;
    }
    parsed.tensor_of.push_back(static_cast<int>(call.tensors.size()));
    const at::Tensor* tensor = &THPVariable_Unpack(item);
    if (C10_UNLIKELY(!on_device(*tensor))) {
      TORCH_CHECK(tensor->is_cpu(), name_, ": input ", i, " is on ", tensor->device(),
                  "; expected it on ", where);
      const bool moved = tensor->dim() > 0 || std::find(uploads_.begin(), uploads_.end(),
                                                        static_cast<int>(i)) != uploads_.end();
      if (!moved) {
        call.add_cpu_scalar(*tensor);
        continue;
      }
      const py::gil_scoped_release release;
      parsed.uploaded.emplace_back(i, call.held.size());
      tensor = &hold(tensor->to(where));
    }
    const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
    if (C10_UNLIKELY(impl->is_conj() || impl->is_neg())) {
      const py::gil_scoped_release release;
      tensor = &hold(tensor->resolve_conj().resolve_neg());
    }
    TORCH_CHECK(has_storage_of_ours(*tensor), name_, ": input ", i,
                " has no storage on the device");
    const Storage& storage = storage_of(*tensor);
    TORCH_CHECK(storage.device == call.device, name_, ": input ", i, " is on tpu:", storage.device,
                "; expected it on ", where);
    if (C10_UNLIKELY(storage.raw_bytes && tensor->scalar_type() != c10::ScalarType::Byte)) {
      OpState::retype(*tensor);
    }
    call.add_device_tensor(*tensor);
  }
}

std::shared_ptr<const CompiledGraph::Variant> CompiledGraph::find(c10::ArrayRef<uint64_t> key) {
  for (size_t i = 0; i < variants_.size(); ++i) {
    if (c10::ArrayRef<uint64_t>(variants_[i]->key) != key) continue;
    auto found = variants_[i];
    if (i > 0) {
      std::rotate(variants_.begin(), variants_.begin() + static_cast<std::ptrdiff_t>(i),
                  variants_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
    return found;
  }
  return nullptr;
}

std::shared_ptr<const CompiledGraph::Variant> CompiledGraph::compile(const py::list& inputs,
                                                                     const Inputs& parsed) {
  const auto start = std::chrono::steady_clock::now();
  const Call& call = parsed.call;
  auto variant = std::make_shared<Variant>();
  variant->key.assign(call.key.begin(), call.key.end());
  Program& program = *variant->program;
  program.name = name_;
  try {
    const Untraced untraced;
    const activity::Timer timer(activity::Kind::kLower, name_, call.device);
    const py::object scalar = py::module_::import("torch_tpu.program.plan").attr("ScalarArg");
    py::list arguments;
    int floats = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const py::object item = inputs[i];
      if (const int place = parsed.tensor_of[i]; place >= 0) {
        const TensorRef& ref = call.tensors[static_cast<size_t>(place)];
        arguments.append(describe_tensor(ref, static_cast<size_t>(place)));
        if (ref.view == View::kScalar) {
          const auto dtype = ref.tensor->scalar_type();
          floats += c10::isComplexType(dtype) ? 2 : c10::isFloatingType(dtype) ? 1 : 0;
        }
      } else if (PyFloat_Check(item.ptr())) {
        arguments.append(scalar("float", floats++, item));
      } else if (item.is_none() || PyBool_Check(item.ptr())) {
        arguments.append(item);
      } else {
        arguments.append(py::int_(item));  // a SymInt has a value by now
      }
    }
    const py::object plan = lower_(arguments, describe_storages(call), call.device,
                                   call.ints.size(), call.floats.size());
    if (PyCallable_Check(plan.ptr()) != 0) {
      variant->fallback = plan;
    } else {
      read_plan(plan, program);
      program.draws = plan.attr("draws").cast<int64_t>();
      for (const py::handle item : plan.attr("values")) {
        Value value;
        const auto kind = item.attr("kind").cast<std::string>();
        value.kind = kind == "new"        ? Value::kNew
                     : kind == "argument" ? Value::kArgument
                     : kind == "view"     ? Value::kView
                     : kind == "view_new" ? Value::kViewOfNew
                                          : Value::kObject;
        value.index = item.attr("index").cast<size_t>();
        value.to_cpu = item.attr("to_cpu").cast<bool>();
        value.sizes = to_dims(item.attr("sizes"));
        value.strides = to_dims(item.attr("strides"));
        value.offset = item.attr("offset").cast<int64_t>();
        value.object = item.attr("value");
        variant->values.push_back(std::move(value));
      }
      for (const py::handle item : plan.attr("constants")) {
        const c10::Device where(c10::DeviceType::PrivateUse1,
                                static_cast<c10::DeviceIndex>(call.device));
        variant->constants.push_back(THPVariable_Unpack(item.ptr()).detach().to(where));
      }
    }
  } catch (py::error_already_set& error) {
    rethrow(error);
  }
  counters().lower_ns.fetch_add(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
          .count(),
      std::memory_order_relaxed);
  if (!program.text.empty()) {
    std::string failure;
    try {
      if (prepared_ != nullptr && prepared_->uid == program.uid) {
        const py::gil_scoped_release release;
        preparing_.wait();
        variant->program = prepared_;
      }
      variant->program->executable();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
    try {
      if (!failure.empty()) variant->fallback = failed_(failure);
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
  }
  variants_.insert(variants_.begin(), variant);
  if (variants_.size() > kMaxVariants) variants_.pop_back();
  return variant;
}

void CompiledGraph::forget_programs() { epoch.fetch_add(1, std::memory_order_relaxed); }

void CompiledGraph::prepare(const py::object& plan) {
  auto program = std::make_shared<Program>();
  program->name = name_;
  read_plan(plan, *program);
  program->draws = plan.attr("draws").cast<int64_t>();
  if (program->text.empty()) return;
  prepared_ = program;
  preparing_ = std::async(std::launch::async, [program] {
                 try {
                   program->executable();
                 } catch (const std::exception&) {
                   // The first call compiles again and reports.
                 }
               }).share();
}

py::object CompiledGraph::results(const Variant& variant, const py::list& inputs, Inputs& parsed,
                                  c10::SmallVectorImpl<BufferRef>& buffers) {
  const Program& program = *variant.program;
  c10::SmallVector<at::Tensor, 8> fresh(program.outputs.size());
  const auto output = [&](size_t i) -> const at::Tensor& {
    at::Tensor& t = fresh[i];
    if (!t.defined()) {
      const Program::Output& o = program.outputs[i];
      t = make_tensor(parsed.call.device, o.dtype, o.sizes, o.strides, o.base,
                      std::move(buffers[i]));
    }
    return t;
  };
  // A tensor of its own over the same storage, as a program's results are: autograd, which wraps
  // the whole graph, knows nothing of it.
  const auto view = [](const at::Tensor& base, const Value& value) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        base.dtype());
    tensor.unsafeGetTensorImpl()->set_storage_offset(base.storage_offset() + value.offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes, value.strides);
    return tensor;
  };
  py::tuple out(variant.values.size());
  for (size_t i = 0; i < variant.values.size(); ++i) {
    const Value& value = variant.values[i];
    at::Tensor tensor;
    switch (value.kind) {
      case Value::kNew:
        tensor = output(value.index);
        break;
      case Value::kArgument:
        out[i] = inputs[value.index];
        continue;
      case Value::kView: {
        const auto place = static_cast<size_t>(parsed.tensor_of[value.index]);
        tensor = view(*parsed.call.tensors[place].tensor, value);
        break;
      }
      case Value::kViewOfNew:
        tensor = view(output(value.index), value);
        break;
      case Value::kObject:
        out[i] = value.object;
        continue;
    }
    if (C10_UNLIKELY(value.to_cpu)) {
      const py::gil_scoped_release release;
      tensor = tensor.to(c10::kCPU);
    }
    out[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }
  return out;
}

py::object CompiledGraph::call(const py::list& inputs) {
  const activity::Scope scope(eager_mode() == EagerMode::kDebug);
  Inputs parsed;
  std::shared_ptr<const Variant> variant;
  for (int attempt = 0;; ++attempt) {
    parse(inputs, parsed);
    variant = find(parsed.call.key);
    if (C10_LIKELY(variant != nullptr)) {
      counters().hits.fetch_add(1, std::memory_order_relaxed);
      activity::count(activity::Kind::kHit, name_);
    } else {
      counters().misses.fetch_add(1, std::memory_order_relaxed);
      variant = compile(inputs, parsed);
    }
    if (C10_LIKELY(variant->program->repads.empty())) break;
    TORCH_CHECK(attempt < 3, name_, ": an input did not take its padding");
    const py::gil_scoped_release release;
    for (const Program::Repad& repad : variant->program->repads) {
      pad_storage(*parsed.call.storages[static_cast<size_t>(repad.storage)], repad.padded);
    }
    parsed = Inputs();
  }
  Call& call = parsed.call;
  if (C10_UNLIKELY(static_cast<bool>(variant->fallback))) return variant->fallback(*inputs);
  for (const at::Tensor& constant : variant->constants) {
    call.storages.push_back(&storage_of(constant));
  }
  const Program& program = *variant->program;
  c10::SmallVector<BufferRef, 8> buffers;
  {
    const py::gil_scoped_release release;
    execute_program(program, call, buffers);
    for (const auto& [input, place] : parsed.uploaded) {
      const auto index = parsed.tensor_of[input];
      const bool written = std::any_of(program.outputs.begin(), program.outputs.end(),
                                       [&](const Program::Output& o) { return o.target == index; });
      if (!written) continue;
      PyObject* item = PyList_GET_ITEM(inputs.ptr(), static_cast<Py_ssize_t>(input));
      THPVariable_Unpack(item).copy_(*call.held[place]);
    }
  }
  py::object out = results(*variant, inputs, parsed, buffers);
  if (C10_UNLIKELY(eager_mode() == EagerMode::kDebug)) {
    const py::gil_scoped_release release;
    Runtime::get().synchronize(call.device);
  }
  // Drops the list's references; `parsed` points into tensors that go with them.
  PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr);
  return out;
}

}  // namespace torch_tpu
