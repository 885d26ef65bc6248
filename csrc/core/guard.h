#pragma once

// Devices, streams and events of this backend.
//
// PJRT orders execution by data: a program starts when the values it reads are there, and a device
// runs what it is given in the order given. A stream adds no order of its own: it is a name (a
// number, with a priority that is kept but steers nothing) that belongs to a thread. So
//  * work issued under two streams of a device is ordered like work issued under one, and waiting
//    on an event from a stream is always satisfied: what depends on its data waits for its data;
//  * Stream.query() and Stream.synchronize() speak of all work of the stream's device;
//  * an event is real: it captures the work in flight when it is recorded and is complete when all
//    of that work is, at a time taken then.

#include <c10/core/Device.h>

#include <cstdint>

namespace torch_tpu {

// Throws c10::Error unless there is such a device.
void check_device_index(int index);
// Make a device the calling thread's current one, return the one before. Do not touch the device.
int checked_exchange_device(int index);

// Throws c10::Error if there is no such device or if its work failed; nothing to do before the
// first use of the device.
void synchronize_device(int index);

// 0, or -1 for a stream of high priority.
int stream_priority(int64_t stream_id);

}  // namespace torch_tpu
