#pragma once

namespace torch_tpu {

// Whether graphs that are traced now get attention as one op; returns what was set before.
bool exchange_one_op_attention(bool wanted);

}  // namespace torch_tpu
