// Bindings of compiled graphs.

#include "dispatch/compiled.h"
#include "python/bindings.h"

namespace torch_tpu {

void bind_compiled(py::module_& m) {
  py::class_<CompiledGraph> graph(m, "CompiledGraph", py::dynamic_attr());
  graph
      .def(py::init<const std::string&, py::object, py::object, int, std::vector<int>>(),
           py::arg("name"), py::arg("lower"), py::arg("failed"), py::arg("device"),
           py::arg("uploads"))
      .def("__call__", &CompiledGraph::call, py::arg("inputs"))
      .def("prepare", &CompiledGraph::prepare, py::arg("plan"))
      .def_property_readonly("name", &CompiledGraph::name)
      .def_property_readonly("num_programs", &CompiledGraph::num_programs);
}

}  // namespace torch_tpu
