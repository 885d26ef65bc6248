#pragma once

// Fused mode: calls are recorded and run together, as one program, when somebody needs a result.
//
// A device has one trace, whichever threads record into it (backward runs on autograd's own). What
// a recorded call computes is a pending Buffer; storages hold and share pending buffers as they
// hold finished ones, so views, aliases and clones need nothing special. Cutting the trace turns it
// into one program whose outputs are the buffers that somebody besides the trace still holds.
//
// Where it is cut, and why: docs/adr/0009-fused-mode.md.

#include <memory>

#include "dispatch/call.h"
#include "dispatch/recording.h"

namespace torch_tpu {

class Trace {
 public:
  static Trace& of(int device);

  // All of the following with the device's launch mutex held (LaunchLock).

  // Records one call. Pending buffers of new results go to `results`; those of writes into their
  // storages, and what these held before into `replaced`, to be dropped after the lock is gone.
  void record(const ProgramRef& program, Call& call, c10::SmallVectorImpl<BufferRef>& results,
              c10::SmallVectorImpl<BufferRef>& replaced);
  // Runs what is recorded and fills the pending buffers. On an error they keep its message for
  // later users, the trace is empty, and the error is thrown.
  void cut();

 private:
  explicit Trace(int device) : device_(device) {}

  bool wants_cut();
  size_t period() const;
  uint32_t value_of(const BufferRef& buffer);

  const int device_;
  uint64_t epoch_ = 1;  // marks the buffers that have a number in this recording
  Recording now_;
  bool last_in_backward_ = false;
  // A loop without materialisation points: it is cut after this many calls, a multiple of its body.
  size_t loop_calls_ = 0;
  uint64_t loop_first_ = 0;  // and starts with this program
};

// Runs what is recorded on a device, if anything.
void cut_trace(int device);
// The same with the device's launch mutex held.
void cut_trace_locked(int device);

// Makes a buffer's contents exist (they may still be being computed). Raises the error of the
// program that should have made them. Without the launch mutex.
void materialise_slow(const Buffer& buffer);
inline void materialise(const Buffer& buffer) {
  if (C10_UNLIKELY(!buffer.ready())) materialise_slow(buffer);
}

}  // namespace torch_tpu
