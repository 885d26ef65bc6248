// Bindings of the dispatch core: registration, counters, compile options.

#include <torch/csrc/utils/pybind.h>

#include "core/attention.h"
#include "dispatch/boxed.h"
#include "dispatch/compiled.h"
#include "dispatch/executables.h"
#include "dispatch/fused.h"
#include "dispatch/neutral.h"
#include "dispatch/trace.h"
#include "python/bindings.h"

namespace torch_tpu {

namespace {

py::dict stats() {
  const Counters& c = counters();
  py::dict out;
  out["hits"] = c.hits.load();
  out["misses"] = c.misses.load();
  out["compiles"] = c.compiles.load();
  out["fallbacks"] = c.fallbacks.load();
  out["executions"] = c.executions.load();
  out["recorded"] = c.recorded.load();
  out["fused_runs"] = c.fused_runs.load();
  out["repads"] = c.repads.load();
  out["split_runs"] = c.split_runs.load();
  out["fused_programs"] = num_fused_programs();
  out["lower_seconds"] = static_cast<double>(c.lower_ns.load()) * 1e-9;
  out["compile_seconds"] = static_cast<double>(c.compile_ns.load()) * 1e-9;
  out["disk_hits"] = c.disk_hits.load();
  out["disk_misses"] = c.disk_misses.load();
  out["remote_hits"] = c.remote_hits.load();
  out["load_seconds"] = static_cast<double>(c.load_ns.load()) * 1e-9;
  out["store_seconds"] = static_cast<double>(c.store_ns.load()) * 1e-9;
  out["bytes_to_device"] = c.bytes_to_device.load();
  out["bytes_to_host"] = c.bytes_to_host.load();
  size_t programs = 0;
  for (const OpState* op : OpState::all()) programs += op->size();
  out["programs"] = programs;
  return out;
}

// Programs per op, for reports and tests.
py::dict programs() {
  py::dict out;
  for (const OpState* op : OpState::all()) {
    if (const size_t count = op->size(); count > 0) out[op->name] = count;
  }
  return out;
}

// (name, source, seconds, launches, last launch in seconds since the epoch) of each executable.
py::list executables() {
  py::list out;
  for (const ExecutableRecord& record : executable_records()) {
    out.append(py::make_tuple(record.name, record.source, record.seconds, record.launches,
                              static_cast<double>(record.last_launch) * 1e-9));
  }
  return out;
}

// With `device_assignment`, one program partitioned over those devices by its annotations.
py::bytes compile_options(const std::map<std::string, py::object>& overrides,
                          const std::vector<int64_t>& device_assignment) {
  pjrt::CompileOptions options;
  if (!device_assignment.empty()) {
    options.num_partitions = static_cast<int>(device_assignment.size());
    options.device_assignment = device_assignment;
    options.portable = false;
    options.spmd = true;
  }
  for (const auto& [name, value] : overrides) {
    if (py::isinstance<py::bool_>(value)) {
      options.env_option_overrides[name] = value.cast<bool>();
    } else if (py::isinstance<py::int_>(value)) {
      options.env_option_overrides[name] = value.cast<int64_t>();
    } else if (py::isinstance<py::float_>(value)) {
      options.env_option_overrides[name] = value.cast<double>();
    } else {
      options.env_option_overrides[name] = value.cast<std::string>();
    }
  }
  return py::bytes(pjrt::compile_options_proto(options));
}

void configure(const std::string& path, const std::string& kind, int num_devices) {
  RuntimeConfig config;
  config.plugin_path = path;
  config.plugin_kind = kind;
  config.num_devices = num_devices;
  Runtime::get().configure(std::move(config));
}

}  // namespace

void bind_dispatch(py::module_& m) {
  m.def("configure", &configure, py::arg("path"), py::arg("kind"), py::arg("num_devices"));
  m.def("plugin_kind", [] { return Runtime::get().config().plugin_kind; });
  m.def("register_kernel", &register_kernel, py::arg("name"), py::arg("operands"));
  m.def("register_fallback", &register_fallback);
  m.def("register_neutral_kernel", &register_neutral_kernel, py::arg("name"), py::arg("source"),
        py::arg("target"));
  m.def("stats", &stats);
  m.def("programs", &programs);
  m.def("executables", &executables);
  m.def("clear_programs", [] {
    for (OpState* op : OpState::all()) op->clear();
    clear_fused_programs();
    CompiledGraph::forget_programs();
  });
  // Fused mode: programs, and which of them turned out not to be used again.
  m.def("clear_fused_programs", &clear_fused_programs);
  // Fused mode: run what is recorded, on all devices, without waiting for it.
  m.def("cut_traces", [] {
    const py::gil_scoped_release release;
    if (!Runtime::get().initialized()) return;
    for (int i = 0; i < Runtime::get().device_count(); ++i) cut_trace(i);
  });
  // The base of a tensor's storage, and the sizes of its buffer where that is longer (else 0).
  m.def("storage_base", [](const at::Tensor& tensor) {
    const Storage& storage = storage_of(tensor);
    return std::make_pair(std::vector<int64_t>(storage.dims.begin(), storage.dims.end()),
                          std::vector<int64_t>(storage.padded.begin(), storage.padded.end()));
  });
  m.def(
      "pad_storage",
      [](const at::Tensor& tensor, const std::vector<int64_t>& padded, uint8_t fill) {
        const py::gil_scoped_release release;
        pad_storage(storage_of(tensor), padded, fill);
      },
      py::arg("tensor"), py::arg("padded"), py::arg("fill") = 0);
  m.def("compile_options", &compile_options, py::arg("overrides"),
        py::arg("device_assignment") = std::vector<int64_t>{});
  m.def("index_checks", &index_checks);
  m.def("exchange_one_op_attention", &exchange_one_op_attention, py::arg("wanted"));
  m.def("set_wrapped_number",
        [](const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->set_wrapped_number(true); });
  m.def("raise_pending_checks", [](int device) {
    const py::gil_scoped_release release;
    Runtime::get().raise_pending_checks(device);
  });
}

}  // namespace torch_tpu
