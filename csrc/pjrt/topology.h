#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api.h"
#include "device.h"
#include "executable.h"

namespace torch_tpu::pjrt {

// A set of devices to compile for that need not be present: no client is made.
class Topology {
 public:
  // `name` is the plug-in's own spelling, such as "v6e:2x2" for libtpu. Throws Error.
  static std::unique_ptr<Topology> create(const Api& api, std::string_view name,
                                          const Attributes& options = {});

  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;
  ~Topology();

  const Api& api() const noexcept { return *api_; }
  std::string platform_name() const;
  std::string platform_version() const;
  Attributes attributes() const;
  size_t device_count() const;
  // In an order that is stable within the process.
  std::vector<DeviceDescription> devices() const;
  // Bytes that identify the topology in a cache key.
  std::string serialize() const;

  // Throws Error, for one with RESOURCE_EXHAUSTED if the program does not fit in device memory.
  std::shared_ptr<CompiledProgram> compile(std::string_view program_text, std::string_view format,
                                           std::string_view compile_options_proto) const;

 private:
  Topology(const Api& api, PJRT_TopologyDescription* raw) : api_(&api), raw_(raw) {}

  const Api* api_;
  PJRT_TopologyDescription* raw_;
};

}  // namespace torch_tpu::pjrt
