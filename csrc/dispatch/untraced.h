#pragma once

// Keeps TorchDynamo away from Python of ours that runs below an op. Where a compiled function falls
// back to single calls, Dynamo looks at each frame that is entered, a lowering's too: traced, one
// op would take seconds to compile, and its graph would mean nothing. Needs the GIL; in a thread
// that Dynamo does not watch it costs a look-up.

#include <pybind11/pybind11.h>

namespace torch_tpu {

class Untraced {
 public:
  Untraced() : previous_(exchange(pybind11::none())) {}
  ~Untraced() {
    if (previous_.is_none()) return;
    const pybind11::error_scope pending;  // an exception may be on its way
    try {
      exchange(previous_);
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("torch_tpu: giving Dynamo its callback back");
    }
  }
  Untraced(const Untraced&) = delete;
  Untraced& operator=(const Untraced&) = delete;

 private:
  static pybind11::object exchange(const pybind11::object& callback) {
    return pybind11::module_::import("torch._C")
        .attr("_dynamo")
        .attr("eval_frame")
        .attr("set_eval_frame")(callback);
  }

  pybind11::object previous_;
};

}  // namespace torch_tpu
