#pragma once

// Settings that change how ops are run: eager mode, f32 matmul precision, excess precision.
//
// Eager mode and precision have a process-wide value and an override set by a context manager. An
// override belongs to the calling thread and travels with at::ThreadLocalState, so that a backward
// pass started inside the context manager runs under it on autograd's own thread.

#include <cstdint>

namespace torch_tpu {

enum class EagerMode : int8_t {
  kStrict = 0,  // every op is a program of its own, enqueued at once
  kDebug = 1,   // as kStrict, and waits for the result
  kFused = 2,   // ops are recorded and run in groups
};

// What holds for the calling thread.
EagerMode eager_mode();
// bf16 passes an f32 matmul takes: 1, 3 or 6. Without an override it follows
// torch.set_float32_matmul_precision: medium, high, highest.
int matmul_passes();
// What Debug mode looks for in results: bit 1 NaN, bit 2 Inf.
int number_checks();
// Whether XLA may keep intermediates in a wider type than the program says.
bool allow_excess_precision();

// Process-wide. Throw c10::ValueError for a value that does not exist.
void set_eager_mode(int mode);
void set_allow_excess_precision(bool allow);

constexpr int kNoOverride = -1;
// Replace the calling thread's override and return the one before; kNoOverride is none.
int exchange_eager_mode_override(int mode);
int exchange_matmul_passes_override(int passes);
// Which set of compiler options holds for the calling thread: a number that Python gives
// (torch_tpu/program/options.py), kNoOverride for none. Part of every program's key.
int compiler_options();
int exchange_compiler_options(int set);
int exchange_number_checks(int checks);

}  // namespace torch_tpu
