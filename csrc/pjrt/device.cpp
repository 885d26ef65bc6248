#include "device.h"

namespace torch_tpu::pjrt {

DeviceDescription DeviceDescription::read(const Api& api, PJRT_DeviceDescription* raw) {
  DeviceDescription result;
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Id_Args, id);
  id.device_description = raw;
  api.check(api.raw()->PJRT_DeviceDescription_Id(&id));
  result.id = id.id;
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_ProcessIndex_Args, process);
  process.device_description = raw;
  api.check(api.raw()->PJRT_DeviceDescription_ProcessIndex(&process));
  result.process_index = process.process_index;
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Kind_Args, kind);
  kind.device_description = raw;
  api.check(api.raw()->PJRT_DeviceDescription_Kind(&kind));
  result.kind.assign(kind.device_kind, kind.device_kind_size);
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_DebugString_Args, debug);
  debug.device_description = raw;
  api.check(api.raw()->PJRT_DeviceDescription_DebugString(&debug));
  result.debug_string.assign(debug.debug_string, debug.debug_string_size);
  TORCH_TPU_PJRT_ARGS(PJRT_DeviceDescription_Attributes_Args, attributes);
  attributes.device_description = raw;
  api.check(api.raw()->PJRT_DeviceDescription_Attributes(&attributes));
  result.attributes = read_attributes(attributes.attributes, attributes.num_attributes);
  return result;
}

Device::Device(const Api& api, PJRT_Device* raw) : api_(&api), raw_(raw) {
  TORCH_TPU_PJRT_ARGS(PJRT_Device_LocalHardwareId_Args, local);
  local.device = raw;
  api.check(api.raw()->PJRT_Device_LocalHardwareId(&local));
  local_hardware_id_ = local.local_hardware_id;
  TORCH_TPU_PJRT_ARGS(PJRT_Device_GetDescription_Args, description);
  description.device = raw;
  api.check(api.raw()->PJRT_Device_GetDescription(&description));
  description_ = DeviceDescription::read(api, description.device_description);
}

std::optional<DeviceMemoryStats> Device::memory_stats() const {
  if (!api_->has(&PJRT_Api::PJRT_Device_MemoryStats)) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Device_MemoryStats_Args, args);
  args.device = raw_;
  if (PJRT_Error* raw_error = api_->raw()->PJRT_Device_MemoryStats(&args)) {
    const Error error = api_->to_error(raw_error);
    if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return std::nullopt;
    throw error;
  }
  const auto optional = [](int64_t value, bool is_set) {
    return is_set ? std::optional<int64_t>(value) : std::nullopt;
  };
  DeviceMemoryStats stats;
  stats.bytes_in_use = args.bytes_in_use;
  stats.peak_bytes_in_use = optional(args.peak_bytes_in_use, args.peak_bytes_in_use_is_set);
  stats.num_allocs = optional(args.num_allocs, args.num_allocs_is_set);
  stats.largest_alloc_size = optional(args.largest_alloc_size, args.largest_alloc_size_is_set);
  stats.bytes_limit = optional(args.bytes_limit, args.bytes_limit_is_set);
  stats.bytes_reserved = optional(args.bytes_reserved, args.bytes_reserved_is_set);
  stats.peak_bytes_reserved = optional(args.peak_bytes_reserved, args.peak_bytes_reserved_is_set);
  stats.bytes_reservable_limit =
      optional(args.bytes_reservable_limit, args.bytes_reservable_limit_is_set);
  stats.largest_free_block_bytes =
      optional(args.largest_free_block_bytes, args.largest_free_block_bytes_is_set);
  stats.pool_bytes = optional(args.pool_bytes, args.pool_bytes_is_set);
  stats.peak_pool_bytes = optional(args.peak_pool_bytes, args.peak_pool_bytes_is_set);
  return stats;
}

}  // namespace torch_tpu::pjrt
