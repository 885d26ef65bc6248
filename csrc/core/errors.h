#pragma once

#include <string>

#include "pjrt/pjrt.h"

namespace torch_tpu {

// Raises what PyTorch raises for a failed program: OutOfMemoryError for exhausted memory, else
// RuntimeError; the message names the op and the PJRT code.
[[noreturn]] void raise_execution_error(const pjrt::Error& error, const char* op);
// The same for a program that did not compile.
[[noreturn]] void raise_compile_error(const pjrt::Error& error, const std::string& op,
                                      const std::string& program);

}  // namespace torch_tpu
