// Kernels of PyTorch's CPU that touch no element themselves and so serve any device.

#pragma once

#include <string>

namespace torch_tpu {

// Registers for `target` what PyTorch registers for `source`, both names of dispatch keys
// ("SparseCPU", "SparsePrivateUse1"). Only for kernels written in terms of other ops.
void register_neutral_kernel(const std::string& name, const std::string& source,
                             const std::string& target);

}  // namespace torch_tpu
