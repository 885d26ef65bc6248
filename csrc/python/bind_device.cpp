// torch_tpu._C: devices, random state, memory figures and modes. Python's checks and wording stand
// in torch_tpu/tpu; nothing here is public.

#include <torch/csrc/Event.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "core/generator.h"
#include "core/guard.h"
#include "core/memory_stats.h"
#include "core/modes.h"
#include "core/runtime.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace torch_tpu {

namespace {

// With PyTorch's translation of exceptions; `nogil` where a function may wait or load the plug-in.
using torch::wrap_pybind_function;
using torch::wrap_pybind_function_no_gil;

py::object generator(int device) {
  return py::reinterpret_steal<py::object>(
      THPGenerator_Wrap(default_generator(static_cast<c10::DeviceIndex>(device))));
}

// torch.Event.elapsed_time takes no instance of a subclass.
double elapsed_time(const py::object& start, const py::object& end) {
  for (const py::object& event : {start, end}) {
    TORCH_CHECK_TYPE(THPEvent_Check(event.ptr()), "expected a torch.Event; got ",
                     Py_TYPE(event.ptr())->tp_name);
  }
  return reinterpret_cast<THPEvent*>(start.ptr())
      ->event.elapsedTime(reinterpret_cast<THPEvent*>(end.ptr())->event);
}

// What is known of the plug-in; `create` loads it and makes its client if that has not been done.
py::dict plugin_info(bool create) {
  Runtime& runtime = Runtime::get();
  if (create) {
    const py::gil_scoped_release nogil;
    runtime.client();
  }
  py::dict info;
  info["path"] = runtime.config().plugin_path;
  info["kind"] = runtime.config().plugin_kind;
  info["num_devices"] = runtime.config().num_devices;
  if (!runtime.initialized()) return info;
  const pjrt::Client& client = runtime.client();
  info["platform_name"] = client.platform_name();
  info["platform_version"] = client.platform_version();
  info["api_version"] = py::make_tuple(PJRT_API_MAJOR, client.api().minor());
  info["attributes"] = client.api().attributes();
  py::list kinds;
  for (int i = 0; i < runtime.config().num_devices; ++i) kinds.append(runtime.device(i).kind());
  info["device_kinds"] = kinds;
  info["devices_offered"] = client.devices().size();
  return info;
}

py::dict device_info(int index) {
  const pjrt::Device* device = nullptr;
  std::pair<size_t, size_t> memory;
  {
    const py::gil_scoped_release nogil;
    device = &Runtime::get().device(index);
    memory = memory_info(index);
  }
  py::dict info;
  info["kind"] = device->kind();
  info["platform"] = Runtime::get().client().platform_name();
  info["description"] = device->debug_string();
  info["id"] = device->id();
  info["local_hardware_id"] = device->local_hardware_id();
  info["process_index"] = device->process_index();
  info["total_memory"] = memory.second;
  return info;
}

// `peak`: whether a maximum is kept of this figure.
py::dict stat_dict(const c10::CachingAllocator::StatArray& stats, bool peak = true) {
  const auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  py::dict values;
  values["current"] = all.current;
  if (peak) values["peak"] = all.peak;
  values["allocated"] = all.allocated;
  values["freed"] = all.freed;
  py::dict pools;
  pools["all"] = values;
  return pools;
}

py::dict stats_dict(int device) {
  check_device_index(device);
  const auto stats = device_stats(device);
  py::dict result;
  result["allocation"] = stat_dict(stats.allocation, /*peak=*/false);
  result["active"] = stat_dict(stats.active, /*peak=*/false);
  result["allocated_bytes"] = stat_dict(stats.allocated_bytes);
  result["reserved_bytes"] = stat_dict(stats.reserved_bytes);
  result["active_bytes"] = stat_dict(stats.active_bytes);
  result["requested_bytes"] = stat_dict(stats.requested_bytes);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  return result;
}

}  // namespace

void bind_device(py::module_& m) {
  const auto def = [&m](const char* name, auto function, auto... extra) {
    m.def(name, wrap_pybind_function(function), extra...);
  };
  const auto def_nogil = [&m](const char* name, auto function, auto... extra) {
    m.def(name, wrap_pybind_function_no_gil(function), extra...);
  };

  def_nogil("device_count", [] { return Runtime::get().device_count(); });
  def("current_device", &current_device);
  def_nogil("exchange_device", &checked_exchange_device, py::arg("index"));
  def_nogil("check_device_index", &check_device_index, py::arg("index"));
  def_nogil("init", [] { Runtime::get().client(); });
  def("is_initialized", [] { return Runtime::get().initialized(); });
  def("in_bad_fork", [] { return Runtime::get().in_bad_fork(); });
  def_nogil("synchronize", &synchronize_device, py::arg("index"));
  def("stream_priority", &stream_priority, py::arg("stream_id"));
  def("elapsed_time", &elapsed_time, py::arg("start"), py::arg("end"));
  def("plugin_info", &plugin_info, py::arg("create") = true);
  def("device_info", &device_info, py::arg("index"));

  def("default_generator", &generator, py::arg("index"));
  def("manual_seed_all", &manual_seed_all, py::arg("seed"));

  def("device_stats", &stats_dict, py::arg("index"));
  def_nogil("memory_info", &memory_info, py::arg("index"));
  def("reset_peak_stats", &reset_peak_stats, py::arg("index"));
  def("reset_accumulated_stats", &reset_accumulated_stats, py::arg("index"));

  m.attr("NO_OVERRIDE") = kNoOverride;
  def("eager_mode", [] { return static_cast<int>(eager_mode()); });
  def("set_eager_mode", &set_eager_mode, py::arg("mode"));
  def("exchange_eager_mode_override", &exchange_eager_mode_override, py::arg("mode"));
  def("exchange_number_checks", &exchange_number_checks, py::arg("checks"));
  def("matmul_precision", &matmul_passes);
  def("exchange_matmul_precision_override", &exchange_matmul_passes_override, py::arg("passes"));
  def("compiler_options", &compiler_options);
  def("exchange_compiler_options", &exchange_compiler_options, py::arg("set"));
  def("allow_excess_precision", &allow_excess_precision);
  def("set_allow_excess_precision", &set_allow_excess_precision, py::arg("allow"));
}

}  // namespace torch_tpu
