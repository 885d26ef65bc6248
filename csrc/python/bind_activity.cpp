// Bindings of what is observed: spans, totals by line, source lines.

#include <torch/csrc/utils/pybind.h>

#include "core/activity.h"
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
  m.def("current_line", &current_line);
  m.def("source_line", &line_tuple, py::arg("id"));
}

}  // namespace torch_tpu
