#include "core/source_line.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace torch_tpu {

namespace {

struct Lines {
  std::mutex mutex;
  std::map<std::tuple<std::string, int, std::string, bool>, LineId> ids;
  std::deque<SourceLine> lines{SourceLine{}};  // references stay valid

  static Lines& get() {
    static auto* instance = new Lines();
    return *instance;
  }
  LineId intern(SourceLine line) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto [it, added] =
        ids.try_emplace({line.file, line.line, line.function, line.backward}, lines.size());
    if (added) lines.push_back(std::move(line));
    return it->second;
  }
};

// Forward lines of recent autograd nodes, by the numbers autograd gives them. A ring: a graph of
// more nodes loses its oldest lines.
struct Nodes {
  struct Entry {
    uint64_t sequence = UINT64_MAX;
    uint64_t thread = 0;
    LineId line = kNoLine;
  };
  std::mutex mutex;
  std::array<Entry, 1 << 16> ring;

  static Nodes& get() {
    static auto* instance = new Nodes();
    return *instance;
  }
  Entry& at(uint64_t sequence) { return ring[sequence % ring.size()]; }
};

// Whether a file is the user's. Files are known by their name objects, which are kept.
bool is_user_file(PyObject* filename) {
  static auto* known = new std::unordered_map<PyObject*, bool>();  // guarded by the GIL
  const auto it = known->find(filename);
  if (it != known->end()) return it->second;
  const bool library = py::module_::import("torch_tpu.program.source_lines")
                           .attr("is_library")(py::handle(filename))
                           .cast<bool>();
  Py_INCREF(filename);
  known->emplace(filename, !library);
  return !library;
}

// The innermost user frame from `frame` outwards. Steals the reference.
LineId user_line(PyFrameObject* frame) {
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const auto release = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code));
    if (is_user_file(code->co_filename)) {
      SourceLine line;
      line.file = py::str(code->co_filename);
      line.function = py::str(code->co_name);
      line.line = PyFrame_GetLineNumber(frame);
      Py_DECREF(frame);
      return Lines::get().intern(std::move(line));
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return kNoLine;
}

// The line that waits in autograd's engine for the threads of a backward pass.
LineId backward_call_line() {
  PyThreadState* own = PyThreadState_Get();
  PyInterpreterState* interpreter = PyThreadState_GetInterpreter(own);
  for (PyThreadState* thread = PyInterpreterState_ThreadHead(interpreter); thread != nullptr;
       thread = PyThreadState_Next(thread)) {
    if (thread == own) continue;
    PyFrameObject* frame = PyThreadState_GetFrame(thread);
    if (frame == nullptr) continue;
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    const std::string name = py::str(reinterpret_cast<PyCodeObject*>(code.ptr())->co_name);
    if (name == "_engine_run_backward") return user_line(frame);
    Py_DECREF(frame);
  }
  return kNoLine;
}

LineId node_line() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return kNoLine;
  Nodes& nodes = Nodes::get();
  LineId line = kNoLine;
  {
    const std::lock_guard<std::mutex> lock(nodes.mutex);
    const Nodes::Entry& entry = nodes.at(node->sequence_nr());
    if (entry.sequence == node->sequence_nr() && entry.thread == node->thread_id()) {
      line = entry.line;
    }
  }
  if (line == kNoLine) return kNoLine;
  SourceLine copy = source_line(line);
  copy.backward = true;
  return Lines::get().intern(std::move(copy));
}

}  // namespace

LineId current_line() {
  if (Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0) return kNoLine;
  const py::gil_scoped_acquire gil;
  const py::error_scope keep;  // the caller may be handling an error
  try {
    LineId line = user_line(PyThreadState_GetFrame(PyThreadState_Get()));
    if (line == kNoLine) line = node_line();
    if (line == kNoLine) line = backward_call_line();
    return line;
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_tpu: the line of a call");
    return kNoLine;
  }
}

const SourceLine& source_line(LineId id) {
  Lines& lines = Lines::get();
  const std::lock_guard<std::mutex> lock(lines.mutex);
  return lines.lines.at(id);
}

std::string to_string(LineId id) {
  if (id == kNoLine) return "";
  const SourceLine& line = source_line(id);
  return c10::str(line.file, ":", line.line, " in ", line.function,
                  line.backward ? " (backward of it)" : "");
}

void remember_node(LineId line) {
  if (line == kNoLine) return;
  const uint64_t next = at::sequence_number::peek();
  if (next == 0) return;
  Nodes& nodes = Nodes::get();
  const uint64_t thread = at::RecordFunction::currentThreadId();
  const std::lock_guard<std::mutex> lock(nodes.mutex);
  Nodes::Entry& entry = nodes.at(next - 1);
  if (entry.sequence != next - 1 || entry.thread != thread) entry = {next - 1, thread, line};
}

}  // namespace torch_tpu
