#pragma once

// A device's memory in the figures PyTorch's allocators report.

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <utility>

namespace torch_tpu {

// What tensors hold (allocated, active, requested) as counted here, and what the plug-in holds
// (reserved) as it reports; where it reports nothing, the same again. Only the totals are filled:
// there are no pools. Zeros before the first use of the device.
c10::CachingDeviceAllocator::DeviceStats device_stats(int device);

void reset_peak_stats(int device);  // of what is counted here
void reset_accumulated_stats(int device);

// Free and total bytes of the device; of the machine where the device is its processor.
std::pair<size_t, size_t> memory_info(int device);

}  // namespace torch_tpu
