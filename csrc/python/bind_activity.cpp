// Bindings of what is observed: spans, totals by line, source lines.

#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include "core/activity.h"
#include "core/memory_history.h"
#include "python/bindings.h"

namespace torch_tpu {

namespace {

py::object line_tuple(LineId id) {
  if (id == kNoLine) return py::none();
  const SourceLine& line = source_line(id);
  return py::make_tuple(line.file, line.line, line.function, line.backward);
}

// (kind, name, start ns, end ns, bytes, device, thread, line number)
py::list take_spans() {
  std::vector<activity::Span> spans;
  {
    const py::gil_scoped_release nogil;
    spans = activity::take_spans();
  }
  py::list out;
  for (const activity::Span& s : spans) {
    out.append(py::make_tuple(activity::kind_name(s.kind), s.name, s.start, s.end, s.bytes,
                              s.device, s.thread, s.line));
  }
  return out;
}

// (line number, kind, name, count, ns, bytes)
py::list totals() {
  std::vector<activity::Total> sums;
  {
    const py::gil_scoped_release nogil;
    sums = activity::totals();
  }
  py::list out;
  for (const activity::Total& t : sums) {
    out.append(py::make_tuple(t.line, activity::kind_name(t.kind), t.name, t.count, t.nanoseconds,
                              t.bytes));
  }
  return out;
}

// One dict per event: action, device, addr, size, time_us, producer, line, frames.
py::list event_dicts(const std::vector<memory_history::Event>& events) {
  std::vector<torch::CapturedTraceback*> stacks;
  for (const auto& event : events) {
    if (event.stack != nullptr) stacks.push_back(event.stack.get());
  }
  const torch::SymbolizedTracebacks symbols = torch::symbolize(stacks);
  std::vector<py::dict> frames;
  for (const auto& frame : symbols.all_frames) {
    py::dict d;
    d["name"] = frame.funcname;
    d["filename"] = frame.filename;
    d["line"] = frame.lineno;
    frames.push_back(std::move(d));
  }
  py::list out;
  size_t next = 0;
  for (const auto& event : events) {
    py::dict d;
    d["action"] = event.alloc ? "alloc" : "free_completed";
    d["device"] = event.device;
    d["addr"] = event.address;
    d["size"] = event.nbytes;
    d["stream"] = 0;
    d["time_us"] = event.time_us;
    d["producer"] = event.producer;
    d["line"] = line_tuple(event.line);
    py::list stack;
    if (event.stack != nullptr) {
      for (const uint64_t frame : symbols.tracebacks.at(next++)) stack.append(frames.at(frame));
    }
    d["frames"] = std::move(stack);
    out.append(std::move(d));
  }
  return out;
}

}  // namespace

void bind_activity(py::module_& m) {
  m.attr("ACTIVITY_TRACE") = static_cast<int>(activity::kTrace);
  m.attr("ACTIVITY_TOTALS") = static_cast<int>(activity::kTotals);
  m.attr("ACTIVITY_LINES") = static_cast<int>(activity::kLines);
  m.def("activity_enable", &activity::enable, py::arg("flags"));
  m.def("activity_disable", &activity::disable, py::arg("flags"));
  m.def("activity_flags", &activity::flags);
  m.def("activity_take_spans", &take_spans);
  m.def("activity_totals", &totals);
  m.def("activity_programs_per_line", &activity::programs_per_line);
  m.def("activity_clear_totals", &activity::clear_totals);
  m.def("memory_history_start", &memory_history::start, py::arg("max_entries"), py::arg("stacks"));
  m.def("memory_history_stop", &memory_history::stop);
  m.def("memory_history_enabled", &memory_history::enabled);
  m.def("memory_history", [] { return event_dicts(memory_history::events()); });
  m.def(
      "memory_blocks", [](int device) { return event_dicts(memory_history::blocks(device)); },
      py::arg("device"));
  m.def("current_line", &current_line);
  m.def("source_line", &line_tuple, py::arg("id"));
}

}  // namespace torch_tpu
