#pragma once

// Host memory for transfers: what Tensor.pin_memory() and DataLoader(pin_memory=True) allocate.
//
// PJRT has no call to pin memory a program can rely on everywhere, so "pinned" means here: ours,
// aligned as the plug-ins want it to take an array without another copy, and recognised again.

#include <ATen/core/CachingHostAllocator.h>

namespace torch_tpu {

at::HostAllocator* pinned_allocator();
// Whether `data` lies in memory that pinned_allocator() gave out.
bool is_pinned(const void* data);

}  // namespace torch_tpu
