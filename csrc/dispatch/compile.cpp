// The way into Python on a miss: describe the call, get StableHLO text and a plan, compile.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>

#include "core/activity.h"
#include "dispatch/boxed.h"
#include "dispatch/describe.h"
#include "dispatch/untraced.h"

namespace torch_tpu {

py::tuple to_tuple(c10::IntArrayRef values) {
  py::tuple out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = py::int_(values[i]);
  return out;
}

Dims to_dims(const py::handle& values) {
  Dims out;
  for (const py::handle value : values) out.push_back(value.cast<int64_t>());
  return out;
}

py::object describe_tensor(const TensorRef& ref, size_t index) {
  const at::Tensor& t = *ref.tensor;
  return py::module_::import("torch_tpu.program.plan")
      .attr("TensorArg")(index, ref.storage_index, to_tuple(t.sizes()), to_tuple(t.strides()),
                         py::cast(t.scalar_type()), static_cast<int>(ref.view), ref.first_operand,
                         ref.num_operands, t.unsafeGetTensorImpl()->is_wrapped_number());
}

py::list describe_storages(const Call& call) {
  const py::object spec = py::module_::import("torch_tpu.program.plan").attr("StorageSpec");
  py::list out;
  for (const Storage* storage : call.storages) {
    // What is undefined is about to be written, and what this call has made it makes again.
    const bool can_pad = storage->buffer != nullptr &&
                         std::none_of(call.held.begin(), call.held.end(), [&](const auto& tensor) {
                           return has_storage_of_ours(*tensor) && &storage_of(*tensor) == storage;
                         });
    const py::object padded =
        storage->padded.empty() ? py::object(py::none()) : to_tuple(storage->padded);
    out.append(
        spec(to_tuple(storage->dims), py::cast(storage->dtype), padded, storage->token, can_pad));
  }
  return out;
}

namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// Describes the arguments in Python; counts through tensors and operands in parse order.
class Describer {
 public:
  Describer(const OpState& op, const Call& call)
      : op_(op), call_(call), module_(py::module_::import("torch_tpu.program.call")) {}

  py::list arguments(c10::ArrayRef<c10::IValue> args) {
    py::list out;
    for (size_t i = 0; i < args.size(); ++i) out.append(argument(args[i], i));
    return out;
  }

 private:
  py::object argument(const c10::IValue& value, size_t i) {
    switch (op_.kinds[i]) {
      case ArgKind::kTensor:
        return value.isNone() ? py::none() : tensor(value.toTensor());
      case ArgKind::kTensorList: {
        if (value.isNone()) return py::none();
        py::list out;
        for (const c10::IValue& item : value.toListRef()) {
          out.append(item.isNone() ? py::object(py::none()) : tensor(item.toTensor()));
        }
        return out;
      }
      case ArgKind::kScalar: {
        const auto& fallback = op_.schema().arguments()[i].default_value();
        if (fallback.has_value() && value.tagKind() == fallback->tagKind() && value == *fallback) {
          return plain(value, i);
        }
        return number(value);
      }
      case ArgKind::kScalarList: {
        if (value.isNone()) return py::none();
        py::list out;
        if (value.isDoubleList()) {
          for (const double x : value.toDoubleVector()) out.append(operand("float", py::float_(x)));
        } else {
          for (const c10::IValue& item : value.toListRef()) out.append(number(item));
        }
        return out;
      }
      case ArgKind::kGenerator:
        return py::none();
      default:
        return plain(value, i);
    }
  }

  py::object plain(const c10::IValue& value, size_t i) {
    const auto kind = op_.schema().arguments()[i].real_type()->str();
    if (value.isInt() && kind.find("ScalarType") != std::string::npos) {
      return py::cast(value.toScalarType());
    }
    if (value.isInt() && kind.find("MemoryFormat") != std::string::npos) {
      return py::cast(value.toMemoryFormat());
    }
    if (value.isInt() && kind.find("Layout") != std::string::npos) {
      return py::cast(value.toLayout());
    }
    return torch::jit::toPyObject(value);
  }

  py::object tensor(const at::Tensor& given) {
    if (!given.defined()) return py::none();
    const TensorRef& ref = call_.tensors[next_tensor_];
    return describe_tensor(ref, next_tensor_++);
  }

  // Slots are found again by counting, as Call::parse did.
  py::object operand(const char* kind, const py::object& value) {
    return module_.attr("ScalarArg")(kind, -1, value);
  }

  py::object number(const c10::IValue& value) {
    if (value.isNone()) return py::none();
    const py::object known = torch::jit::toPyObject(value);
    if (value.isBool()) return operand("bool", known);
    if (value.isComplexDouble()) return operand("complex", known);
    if (value.isDouble()) return operand("float", known);
    return operand("int", known);
  }

  const OpState& op_;
  const Call& call_;
  py::module_ module_;
  size_t next_tensor_ = 0;
};

}  // namespace

static void read_checks(const py::handle& labels, Program& program) {
  Checks checks;
  for (const py::handle label : labels) {
    const auto [kind, text] = label.cast<std::pair<std::string, std::string>>();
    Check check;
    check.kind = kind == "index"    ? Check::kIndex
                 : kind == "linalg" ? Check::kLinalg
                                    : Check::kAssertion;
    check.text = text.empty() && check.kind == Check::kIndex ? program.name : text;
    checks.push_back(std::move(check));
  }
  if (!checks.empty()) program.checks = std::make_shared<const Checks>(std::move(checks));
}

void read_plan(const py::handle& plan, Program& program) {
  program.text = plan.attr("text").cast<std::string>();
  program.options = plan.attr("options").cast<std::string>();
  program.parameters = plan.attr("parameters").cast<std::vector<int>>();
  program.takes_ints = plan.attr("takes_ints").cast<bool>();
  program.takes_floats = plan.attr("takes_floats").cast<bool>();
  program.takes_rng = plan.attr("takes_rng").cast<bool>();
  read_checks(plan.attr("checks"), program);
  for (const py::handle item : plan.attr("outputs")) {
    Program::Output output;
    output.target = item.attr("target").cast<int>();
    output.donates = item.attr("donates").cast<int>();
    output.dtype = item.attr("dtype").cast<c10::ScalarType>();
    output.sizes = to_dims(item.attr("sizes"));
    output.strides = to_dims(item.attr("strides"));
    output.base_dtype = item.attr("base_dtype").cast<c10::ScalarType>();
    output.base = to_dims(item.attr("base"));
    const py::object padded = item.attr("padded");
    if (!padded.is_none()) output.padded = to_dims(padded);
    const Dims shape = buffer_dims(output.base, output.padded);
    output.nbytes =
        static_cast<size_t>(c10::multiply_integers(shape)) * c10::elementSize(output.base_dtype);
    program.outputs.push_back(std::move(output));
  }
  for (const py::handle item : plan.attr("returns")) {
    Program::Return r;
    const auto kind = item.attr("kind").cast<std::string>();
    if (kind == "new") {
      r.kind = Program::Return::kNew;
      r.index = item.attr("index").cast<int>();
    } else if (kind == "argument") {
      r.kind = Program::Return::kArgument;
      r.index = item.attr("index").cast<int>();
    } else if (kind == "list") {
      r.kind = Program::Return::kList;
      r.list = item.attr("items").cast<std::vector<int>>();
    }
    program.returns.push_back(std::move(r));
  }
  for (const py::handle item : plan.attr("resizes")) {
    const auto pair = item.cast<py::tuple>();
    program.resizes.push_back({pair[0].cast<int>(), to_dims(pair[1])});
  }
  for (const py::handle item : plan.attr("repads")) {
    const auto pair = item.cast<py::tuple>();
    program.repads.push_back({pair[0].cast<int>(), to_dims(pair[1])});
  }
  program.dynamic_sizes = plan.attr("dynamic_sizes").cast<std::vector<int64_t>>();
  program.finish();
}

void rethrow(py::error_already_set& error) {
  error.restore();
  python_error persisted;
  persisted.persist();
  throw persisted;  // NOLINT: the class autograd and the bindings expect
}

void check_arguments(const OpState& op, const Call& call, c10::ArrayRef<c10::IValue> args) {
  const py::gil_scoped_acquire gil;
  try {
    const Untraced untraced;
    Describer describe(op, call);
    py::module_::import("torch_tpu.program.call")
        .attr("check_call")(op.name, describe.arguments(args));
  } catch (py::error_already_set& error) {
    rethrow(error);
  }
}

ProgramRef compile_program(OpState& op, const Call& call, c10::ArrayRef<c10::IValue> args) {
  auto program = std::make_shared<Program>();
  program->name = op.name;
  {
    const auto start = Clock::now();
    const activity::Timer timer(activity::Kind::kLower, op.name, call.device);
    const py::gil_scoped_acquire gil;
    try {
      const Untraced untraced;
      Describer describe(op, call);
      const py::object compile = py::module_::import("torch_tpu.program.call").attr("compile_call");
      op.has_check =
          py::module_::import("torch_tpu.program.call").attr("has_check")(op.name).cast<bool>();
      const py::object plan = compile(op.name, describe.arguments(args), describe_storages(call),
                                      call.device, call.ints.size(), call.floats.size());
      if (plan.is_none()) {
        program->cpu_fallback = true;
        return program;
      }
      read_plan(plan, *program);
    } catch (py::error_already_set& error) {
      rethrow(error);
    }
    counters().lower_ns.fetch_add(nanoseconds_since(start), std::memory_order_relaxed);
  }
  return program;
}

}  // namespace torch_tpu
