#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torch_tpu {

void bind_device(py::module_& m);    // devices, streams, random state, memory, modes
void bind_dispatch(py::module_& m);  // registration, counters, compile options
void bind_activity(py::module_& m);  // spans, totals, source lines, memory history
void bind_compiled(py::module_& m);  // graphs of torch.compile
void bind_topology(py::module_& m);  // compiling for absent devices

}  // namespace torch_tpu
