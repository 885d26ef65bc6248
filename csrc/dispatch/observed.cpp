#include "dispatch/observed.h"

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <sstream>

#include "core/activity.h"
#include "core/modes.h"
#include "dispatch/boxed.h"

namespace torch_tpu {

void observe_execution(const char* name, const pjrt::Executable& executable, int64_t start,
                       int device, PJRT_Buffer* result) {
  activity::record(activity::Kind::kLaunch, name, start, activity::now(), 0, device);
  pjrt::Buffer buffer(Runtime::get().client().api(), result);
  try {
    activity::record_execution(name, &executable, start, device, buffer.ready_event());
  } catch (...) {
    buffer.release();
    throw;
  }
  buffer.release();  // the caller's
}

namespace {

constexpr size_t kMaxListed = 8;  // items of a list in a message

void describe(std::ostream& out, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    out << "None";
    return;
  }
  std::string dtype = c10::toString(tensor.scalar_type());
  static const std::unordered_map<std::string, std::string> names = {
      {"Float", "float32"},
      {"Double", "float64"},
      {"Half", "float16"},
      {"BFloat16", "bfloat16"},
      {"Long", "int64"},
      {"Int", "int32"},
      {"Short", "int16"},
      {"Char", "int8"},
      {"Byte", "uint8"},
      {"Bool", "bool"},
      {"ComplexFloat", "complex64"},
      {"ComplexDouble", "complex128"},
  };
  const auto known = names.find(dtype);
  out << (known != names.end() ? known->second : dtype) << tensor.sizes();
  if (!tensor.is_privateuseone()) out << " on " << tensor.device();
  if (!tensor.is_contiguous()) out << " strides " << tensor.strides();
}

void describe(std::ostream& out, const c10::IValue& value) {
  if (value.isTensor()) {
    describe(out, value.toTensor());
  } else if (value.isList() && !value.isIntList() && !value.isDoubleList()) {
    const auto items = value.toListRef();
    out << "[";
    for (size_t i = 0; i < std::min(items.size(), kMaxListed); ++i) {
      if (i > 0) out << ", ";
      describe(out, items[i]);
    }
    if (items.size() > kMaxListed) out << ", … " << items.size() << " items";
    out << "]";
  } else if (value.isNone()) {
    out << "None";
  } else {
    out << value;
  }
}

// "self=float32[2, 3], dim=1": the call's arguments that are not left at their defaults.
std::string describe_arguments(const OpState& op, c10::ArrayRef<c10::IValue> args) {
  std::ostringstream out;
  const auto& arguments = op.schema().arguments();
  bool first = true;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isNone() || op.kinds[i] == ArgKind::kPlacement) continue;
    const auto& fallback = arguments[i].default_value();
    if (fallback.has_value() && !args[i].isTensor() && fallback->tagKind() == args[i].tagKind() &&
        *fallback == args[i]) {
      continue;
    }
    if (!first) out << ", ";
    first = false;
    out << arguments[i].name() << "=";
    describe(out, args[i]);
  }
  return out.str();
}

// Where a call stands and what it is, for errors.
struct Place {
  std::string line, call;

  Place(const OpState& op, c10::ArrayRef<c10::IValue> args)
      : line(to_string(activity::scope_line())),
        call(c10::str("in ", op.name, "(", describe_arguments(op, args), ")")) {
    line = "at " + (line.empty() ? "a line that is not known" : line);
  }
};

void add_note(python_error& error, const std::string& note) {
  const py::gil_scoped_acquire gil;
  if (error.value == nullptr) return;
  try {
    py::handle(error.value).attr("add_note")(note);
  } catch (py::error_already_set& failure) {
    failure.discard_as_unraisable("torch_tpu: the note of an error");
  }
}

// ---- NaN and Inf ----

constexpr int kCheckNan = 1;  // the bits of number_checks()
constexpr int kCheckInf = 2;

thread_local bool checking = false;

bool is_checked(const at::Tensor& t) {
  if (!t.defined() || !t.is_privateuseone() || t.numel() == 0 || t.is_sparse()) return false;
  switch (t.scalar_type()) {
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
      return true;
    default:
      return false;
  }
}

template <typename F>
void for_each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList() || (value.isList() && !value.isIntList())) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) f(item.toTensor());
    }
  }
}

// "NaN", "Inf", or null if the tensor has neither of what is looked for.
const char* bad_number(const at::Tensor& given, int checks) {
  const at::Tensor t = at::_unsafe_view(given, given.sizes());
  if ((checks & kCheckNan) != 0 && at::isnan(t).any().item<bool>()) return "NaN";
  if ((checks & kCheckInf) != 0 && at::isinf(t).any().item<bool>()) return "Inf";
  return nullptr;
}

// The contents a tensor has now, whatever is written to it later: buffers are values.
at::Tensor snapshot(const at::Tensor& t) {
  Storage& storage = storage_of(t);
  if (storage.buffer == nullptr || storage.dtype != t.scalar_type()) return at::Tensor();
  const at::Tensor base = make_tensor(storage.device, storage.dtype, {storage.numel}, {1},
                                      storage.dims, storage.buffer);
  return base.as_strided(t.sizes(), t.strides(), t.storage_offset());
}

// What an op was given, and whether it was bad already.
class Inputs {
 public:
  Inputs(const OpState& op, c10::ArrayRef<c10::IValue> args) {
    for (size_t i = 0; i < args.size(); ++i) {
      for_each_tensor(args[i], [&](const at::Tensor& t) {
        if (op.is_written(i) && is_checked(t)) written_.push_back(t);
        if (t.defined() && t.is_cpu() && t.dim() == 0 && at::isFloatingType(t.scalar_type())) {
          known_bad_ |= !std::isfinite(t.item<double>());
        }
        if (!is_checked(t)) return;
        if (at::Tensor held = snapshot(t); held.defined()) held_.push_back(std::move(held));
      });
      if (args[i].isDouble()) known_bad_ |= !std::isfinite(args[i].toDouble());
    }
  }
  bool bad(int checks) const {
    if (known_bad_) return true;
    return std::any_of(held_.begin(), held_.end(),
                       [&](const at::Tensor& t) { return bad_number(t, checks) != nullptr; });
  }
  const std::vector<at::Tensor>& written() const { return written_; }

 private:
  std::vector<at::Tensor> held_, written_;
  bool known_bad_ = false;  // a number passed by the caller
};

void check_results(const OpState& op, const Inputs& inputs, const torch::jit::Stack& stack,
                   size_t first_result, int checks) {
  std::vector<std::pair<std::string, at::Tensor>> results;
  for (size_t i = first_result; i < stack.size(); ++i) {
    for_each_tensor(stack[i], [&](const at::Tensor& t) {
      results.emplace_back(c10::str("result ", results.size()), t);
    });
  }
  for (const at::Tensor& t : inputs.written()) results.emplace_back("what it has written", t);
  for (const auto& [what, t] : results) {
    if (!is_checked(t)) continue;
    const char* bad = bad_number(t, checks);
    if (bad == nullptr || inputs.bad(checks)) continue;
    std::ostringstream description;
    describe(description, t);
    TORCH_CHECK(false, op.name, ": made ", bad, " in ", what, " (", description.str(),
                ") from arguments without any");
  }
}

void run_checked(OpState& op, torch::jit::Stack* stack, int checks) {
  const size_t first = stack->size() - op.kinds.size();
  checking = true;
  struct Reset {
    ~Reset() { checking = false; }
  } const reset;
  const at::NoGradGuard no_grad;
  const Inputs inputs(op, c10::ArrayRef<c10::IValue>(stack->data() + first, op.kinds.size()));
  run_call(op, stack);
  check_results(op, inputs, *stack, first, checks);
}

bool needs_grad(c10::ArrayRef<c10::IValue> args) {
  bool any = false;
  for (const c10::IValue& value : args) {
    for_each_tensor(value, [&](const at::Tensor& t) { any |= t.defined() && t.requires_grad(); });
  }
  return any;
}

}  // namespace

void run_observed(OpState& op, torch::jit::Stack* stack) {
  const bool debug = eager_mode() == EagerMode::kDebug;
  const activity::Scope scope(debug);
  const size_t first = stack->size() - op.kinds.size();
  const c10::ArrayRef<c10::IValue> args(stack->data() + first, op.kinds.size());
  if (activity::scope_line() != kNoLine && at::GradMode::is_enabled() && needs_grad(args)) {
    remember_node(activity::scope_line());
  }
  if (!debug || checking) return run_call(op, stack);
  // Made beforehand where the arguments are gone by the time of the error.
  const int checks = number_checks();
  std::optional<Place> known;
  if (checks != 0) known.emplace(op, args);
  const auto place = [&]() -> const Place& {
    if (!known) {
      known.emplace(op, c10::ArrayRef<c10::IValue>(stack->data() + first, op.kinds.size()));
    }
    return *known;
  };
  try {
    if (checks != 0) {
      run_checked(op, stack, checks);
    } else {
      run_call(op, stack);
    }
  } catch (c10::Error& error) {
    error.add_context(place().line);
    error.add_context(place().call);
    throw;
  } catch (python_error& error) {
    add_note(error, place().line + "\n" + place().call);
    throw;
  }
}

}  // namespace torch_tpu
