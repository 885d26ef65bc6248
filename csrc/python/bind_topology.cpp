// torch_tpu._C.Topology and CompiledProgram: compiling for devices that need not be present.
// torch_tpu/aot is the public side.

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "pjrt/pjrt.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace torch_tpu {

namespace {

using pjrt::CompiledProgram;
using pjrt::Topology;

// Calls `fn` without the GIL: loading a plug-in and compiling take from milliseconds to minutes.
template <typename Fn>
auto without_gil(Fn&& fn) {
  const py::gil_scoped_release release;
  return std::forward<Fn>(fn)();
}

py::object optional_bytes(const std::optional<std::string>& value) {
  return value ? py::object(py::bytes(*value)) : py::none();
}

py::dict device_dict(const pjrt::DeviceDescription& device) {
  py::dict out;
  out["id"] = device.id;
  out["process_index"] = device.process_index;
  out["kind"] = device.kind;
  out["attributes"] = device.attributes;
  return out;
}

// Bytes per device; None if the compiler does not tell.
py::object memory_stats(const CompiledProgram& program) {
  const auto stats = without_gil([&] { return program.memory_stats(); });
  if (!stats) return py::none();
  py::dict out;
  out["generated_code"] = stats->generated_code;
  out["argument"] = stats->argument;
  out["output"] = stats->output;
  out["alias"] = stats->alias;
  out["temp"] = stats->temp;
  out["peak"] = stats->peak;
  out["host_generated_code"] = stats->host_generated_code;
  out["host_argument"] = stats->host_argument;
  out["host_output"] = stats->host_output;
  out["host_alias"] = stats->host_alias;
  out["host_temp"] = stats->host_temp;
  return out;
}

// (format, bytes), such as ("hlo_with_config", an HloModuleProtoWithConfig).
py::tuple optimized_program(const CompiledProgram& program) {
  const auto optimized = without_gil([&] { return program.optimized_program(); });
  return py::make_tuple(optimized.format, py::bytes(optimized.bytes));
}

void bind_program(py::module_& m) {
  py::class_<CompiledProgram, std::shared_ptr<CompiledProgram>>(m, "CompiledProgram")
      .def_property_readonly("name", &CompiledProgram::name)
      .def_property_readonly("num_outputs", &CompiledProgram::num_outputs)
      .def_property_readonly("num_replicas", &CompiledProgram::num_replicas)
      .def_property_readonly("num_partitions", &CompiledProgram::num_partitions)
      .def("memory_stats", &memory_stats)
      .def("cost_analysis", &CompiledProgram::cost_analysis,
           py::call_guard<py::gil_scoped_release>())
      .def("optimized_program", &optimized_program)
      .def("code_size", &CompiledProgram::code_size)
      .def("serialize",
           [](const CompiledProgram& program) {
             return py::bytes(without_gil([&] { return program.serialize(); }));
           })
      .def("fingerprint",
           [](const CompiledProgram& program) { return optional_bytes(program.fingerprint()); });
}

}  // namespace

void bind_topology(py::module_& m) {
  // A RuntimeError with the PJRT code's name in `code`, such as "RESOURCE_EXHAUSTED".
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> error_type;
  error_type.call_once_and_store_result(
      [&] { return py::object(py::exception<pjrt::Error>(m, "PjrtError", PyExc_RuntimeError)); });
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const pjrt::Error& error) {
      const py::object& type = error_type.get_stored();
      const py::object value = type(error.what());
      value.attr("code") = error.code_name();
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });

  bind_program(m);
  py::class_<Topology>(m, "Topology")
      .def_static(
          "create",
          [](const std::string& plugin_path, const std::string& name) {
            return without_gil(
                [&] { return Topology::create(pjrt::Api::load(plugin_path), name); });
          },
          py::arg("plugin_path"), py::arg("name"))
      .def_property_readonly("platform_name", &Topology::platform_name)
      .def_property_readonly("platform_version", &Topology::platform_version)
      .def_property_readonly("attributes", &Topology::attributes)
      .def_property_readonly("device_count", &Topology::device_count)
      .def_property_readonly("devices",
                             [](const Topology& topology) {
                               py::list out;
                               for (const auto& device : topology.devices()) {
                                 out.append(device_dict(device));
                               }
                               return out;
                             })
      .def("serialize", [](const Topology& topology) { return py::bytes(topology.serialize()); })
      // `text` is StableHLO; `options` a serialised CompileOptionsProto (see compile_options).
      .def(
          "compile",
          [](const Topology& topology, const std::string& text, const py::bytes& options) {
            const std::string proto = options;
            return without_gil([&] { return topology.compile(text, "mlir", proto); });
          },
          py::arg("text"), py::arg("options"));
}

}  // namespace torch_tpu
