#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "api.h"

namespace torch_tpu::pjrt {

// Bytes and counts as the plug-in's allocator sees them; what it does not track is absent.
struct DeviceMemoryStats {
  int64_t bytes_in_use = 0;
  std::optional<int64_t> peak_bytes_in_use;
  std::optional<int64_t> num_allocs;
  std::optional<int64_t> largest_alloc_size;
  std::optional<int64_t> bytes_limit;
  std::optional<int64_t> bytes_reserved;
  std::optional<int64_t> peak_bytes_reserved;
  std::optional<int64_t> bytes_reservable_limit;
  std::optional<int64_t> largest_free_block_bytes;
  std::optional<int64_t> pool_bytes;
  std::optional<int64_t> peak_pool_bytes;
};

// What a device is, whether or not it is present.
struct DeviceDescription {
  int id = -1;
  int process_index = 0;
  std::string kind;
  std::string debug_string;
  Attributes attributes;

  static DeviceDescription read(const Api& api, PJRT_DeviceDescription* raw);
};

// An addressable device of a Client, valid as long as the client.
class Device {
 public:
  Device(const Api& api, PJRT_Device* raw);

  PJRT_Device* raw() const noexcept { return raw_; }
  int id() const noexcept { return description_.id; }
  int local_hardware_id() const noexcept { return local_hardware_id_; }
  int process_index() const noexcept { return description_.process_index; }
  const std::string& kind() const noexcept { return description_.kind; }
  const std::string& debug_string() const noexcept { return description_.debug_string; }
  const DeviceDescription& description() const noexcept { return description_; }

  // Nothing if the plug-in does not keep statistics.
  std::optional<DeviceMemoryStats> memory_stats() const;

 private:
  const Api* api_;
  PJRT_Device* raw_;
  int local_hardware_id_;
  DeviceDescription description_;
};

}  // namespace torch_tpu::pjrt
