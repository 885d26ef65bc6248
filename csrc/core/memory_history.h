#pragma once

// Allocations with the Python code that made them, while somebody records them. Off by default;
// then an allocation costs one relaxed load more.
//
// A device has no addresses to tell. Each buffer gets a range of its own from a counter, so that no
// two buffers ever have the same.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/source_line.h"

namespace torch {
struct CapturedTraceback;
}

namespace torch_tpu::memory_history {

struct Event {
  bool alloc;
  int device;
  uint64_t address;
  size_t nbytes;
  int64_t time_us;       // since the epoch
  const char* producer;  // the op, or what else made the buffer; lives forever
  LineId line;
  std::shared_ptr<torch::CapturedTraceback> stack;  // null if unknown
};

// A buffer that exists now; its event may have been made before recording began, without a stack.
using Block = Event;

bool enabled();
// Starts to record, forgetting what was recorded before; `max_entries` bounds the list of events.
void start(size_t max_entries, bool stacks);
void stop();
std::vector<Event> events();

uint64_t next_address(size_t nbytes);
void allocated(int device, uint64_t address, size_t nbytes, const char* producer);
void freed(int device, uint64_t address, size_t nbytes, const char* producer);
// The buffers of a device.
std::vector<Block> blocks(int device);

}  // namespace torch_tpu::memory_history
