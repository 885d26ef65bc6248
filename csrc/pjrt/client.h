#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "device.h"
#include "event.h"
#include "executable.h"

namespace torch_tpu::pjrt {

class Client {
 public:
  // Throws Error if the plug-in finds no device. Options that a plug-in does not know are refused
  // or ignored, as it likes.
  static std::unique_ptr<Client> create(const Api& api, const Attributes& create_options = {});

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();

  const Api& api() const noexcept { return *api_; }
  PJRT_Client* raw() const noexcept { return raw_; }
  const std::string& platform_name() const noexcept { return platform_name_; }
  const std::string& platform_version() const noexcept { return platform_version_; }
  int process_index() const noexcept { return process_index_; }
  // Devices of all processes.
  size_t global_device_count() const noexcept { return global_device_count_; }
  // Devices of this process, in the plug-in's order.
  const std::vector<Device>& devices() const noexcept { return devices_; }
  // Device ids as the plug-in would place them: row-major [replica][partition].
  std::vector<int64_t> default_device_assignment(int num_replicas, int num_partitions) const;

  // `compile_options_proto`: see compile_options.h. Throws Error.
  std::shared_ptr<Executable> compile(std::string_view program_text, std::string_view format,
                                      std::string_view compile_options_proto) const;
  // Loads what CompiledProgram::serialize gave. Empty options mean those it was compiled with.
  std::shared_ptr<Executable> deserialize(std::string_view bytes,
                                          std::string_view compile_options_proto = {}) const;

  // Copies a host array to `device`. `byte_strides` has `ndims` entries, or is null for dense
  // row-major. With kImmutableOnlyDuringCall `data` may be freed when this returns. Any other
  // semantics requires `done`, which becomes ready when the plug-in no longer needs `data`.
  Buffer from_host(
      const void* data, PJRT_Buffer_Type type, const int64_t* dims, size_t ndims,
      const Device& device,
      PJRT_HostBufferSemantics semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall,
      Event* done = nullptr, const int64_t* byte_strides = nullptr) const;
  // A buffer with arbitrary contents, or nothing if the plug-in cannot make one.
  std::optional<Buffer> uninitialized(PJRT_Buffer_Type type, const int64_t* dims, size_t ndims,
                                      const Device& device) const;

 private:
  Client(const Api& api, PJRT_Client* raw);
  void describe();

  const Api* api_;
  PJRT_Client* raw_;
  std::string platform_name_;
  std::string platform_version_;
  int process_index_ = 0;
  size_t global_device_count_ = 0;
  std::vector<Device> devices_;
};

}  // namespace torch_tpu::pjrt
