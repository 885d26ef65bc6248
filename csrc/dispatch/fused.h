#pragma once

// Programs of recorded calls: the table of those compiled, and the ways to run a recording.

#include "dispatch/recording.h"

namespace torch_tpu {

// Runs a recording on its device, as one program or call by call, and fills its pending buffers.
// With the launch mutex held. On an error the buffers keep its message, and it is thrown.
void run_recording(Recording& recording, int device);

// How many fused programs are kept; forgets them all.
size_t num_fused_programs();
void clear_fused_programs();

}  // namespace torch_tpu
