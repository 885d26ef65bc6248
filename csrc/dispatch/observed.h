#pragma once

// Calls with somebody looking on: spans for the profiler and `explain`, and Debug mode, where an
// error tells the line, the op and its arguments, and results may be checked for NaN and Inf.

#include <ATen/core/stack.h>

#include "dispatch/op_state.h"

namespace torch_tpu {

// run_boxed where activity flags are set or Debug mode holds.
void run_observed(OpState& op, torch::jit::Stack* stack);

// Notes one execution that began at `start` and makes `result`.
void observe_execution(const char* name, const pjrt::Executable& executable, int64_t start,
                       int device, PJRT_Buffer* result);

}  // namespace torch_tpu
