#pragma once

// The boxed kernel: every ATen overload we compute ends here.

#include <ATen/core/stack.h>

#include "dispatch/op_state.h"

namespace torch_tpu {

// Runs one call: takes the arguments from the stack, leaves the results there.
void run_boxed(OpState& op, torch::jit::Stack* stack);
// The same without regard to observers and Debug mode, see observed.h.
void run_call(OpState& op, torch::jit::Stack* stack);

// Runs a program on the bases and operands of `call`. Written storages get their new buffers; the
// buffers of new tensors are left in `results`, in the order of Program::outputs.
void execute_program(const Program& program, Call& call, c10::SmallVectorImpl<BufferRef>& results);

// Turns boolean masks among an index op's arguments into integer indices and runs the call; false
// if there are none.
bool expand_masks(OpState& op, torch::jit::Stack* stack);

// Makes a storage's buffer longer, to what a program for many sizes takes (see Storage::padded).
// Goes through the host: no program that takes the shorter buffer is compiled for it. `fill` is
// what the bytes beyond the contents become; nothing depends on it.
void pad_storage(Storage& storage, c10::IntArrayRef padded, uint8_t fill = 0);

// Fills a storage whose contents are undefined with zeros.
void define_contents(Storage& storage);

// Registers the boxed kernel by name ("aten::add.Tensor") for the device.
void register_kernel(const std::string& name, const std::vector<std::string>& operands);
// Registers the catch-all for everything without a kernel of its own.
void register_fallback();

// Makes a program on a miss (in Python), see compile.cpp.
ProgramRef compile_program(OpState& op, const Call& call, c10::ArrayRef<c10::IValue> args);

// Raises what PyTorch's CPU kernel raises for these values (in Python), see compile.cpp.
void check_arguments(const OpState& op, const Call& call, c10::ArrayRef<c10::IValue> args);

// Runs the op on the CPU, counted.
void run_on_cpu(OpState& op, torch::jit::Stack* stack);

// Whether programs note out-of-range indices (TORCH_TPU_CHECK_INDEX=0 turns it off).
bool index_checks();

}  // namespace torch_tpu
