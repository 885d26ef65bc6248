#pragma once

// Calls and programs between the native core and Python. All with the GIL.

#include <torch/csrc/utils/pybind.h>

#include "dispatch/call.h"
#include "dispatch/program.h"

namespace torch_tpu {

py::tuple to_tuple(c10::IntArrayRef values);
Dims to_dims(const py::handle& values);

// A torch_tpu.program.plan.TensorArg of the tensor at place `index` of its call.
py::object describe_tensor(const TensorRef& ref, size_t index);
// The StorageSpecs of a call.
py::list describe_storages(const Call& call);

// Reads a torch_tpu.program.plan.Plan; the program is compiled when it is first run.
void read_plan(const py::handle& plan, Program& program);

// Throws a Python exception so that it keeps its class through C++ and autograd threads.
[[noreturn]] void rethrow(py::error_already_set& error);

}  // namespace torch_tpu
