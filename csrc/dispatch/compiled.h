#pragma once

// A compiled graph: what torch.compile calls. Native from its entry to its exit: inputs are keyed
// as an op's are (dtypes, base shapes, view geometry), the program is looked up among this graph's
// own, executed, and its results become tensors. Python is entered for a key not seen before.

#include <torch/csrc/utils/pybind.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/program.h"

namespace torch_tpu {

class CompiledGraph {
 public:
  // `lower(arguments, storages, device, n_ints, n_floats)` gives a program
  // (torch_tpu.program.graph.GraphProgram) or a function that runs the graph without us.
  // `failed(message)` gives such a function too, or raises, for a program that does not compile.
  // `device`: where it runs if no input tells. `uploads`: inputs that are moved to the device even
  // if they are 0-d CPU tensors, because the graph writes to them.
  CompiledGraph(const std::string& name, py::object lower, py::object failed, int device,
                std::vector<int> uploads);

  // Runs the graph. Takes the inputs out of the list, so that their memory can be used again.
  // Inputs: tensors of one device, CPU tensors (copied over; 0-d ones travel as operands), Python
  // numbers (an int is part of the key, a float an operand), None. Throws c10::Error for a tensor
  // of another device.
  py::object call(const py::list& inputs);

  // Compiles a program in the background for the first call that needs it.
  void prepare(const py::object& plan);

  // Makes all graphs compile anew.
  static void forget_programs();

  const char* name() const noexcept { return name_; }
  size_t num_programs() const noexcept { return variants_.size(); }

 private:
  struct Value;
  struct Variant;
  struct Inputs;

  void parse(const py::list& inputs, Inputs& parsed) const;
  std::shared_ptr<const Variant> find(c10::ArrayRef<uint64_t> key);
  std::shared_ptr<const Variant> compile(const py::list& inputs, const Inputs& parsed);
  static py::object results(const Variant& variant, const py::list& inputs, Inputs& parsed,
                            c10::SmallVectorImpl<BufferRef>& buffers);

  const char* name_;
  py::object lower_;
  py::object failed_;
  int device_;
  std::vector<int> uploads_;
  // Being compiled in the background.
  std::shared_ptr<Program> prepared_;
  std::shared_future<void> preparing_;
  // Last used first. Guarded by the GIL.
  std::vector<std::shared_ptr<const Variant>> variants_;
};

}  // namespace torch_tpu
