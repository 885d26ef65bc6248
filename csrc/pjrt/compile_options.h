#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace torch_tpu::pjrt {

struct CompileOptions {
  using Override = std::variant<std::string, bool, int64_t, double>;

  int num_replicas = 1;
  int num_partitions = 1;
  // Device ids, row-major [num_replicas][num_partitions]; empty for the plug-in's choice.
  std::vector<int64_t> device_assignment;
  // Runs on whichever device execute() names. Only for one replica and one partition, and without
  // a device assignment.
  bool portable = true;
  // Partition one program over num_partitions devices by its sharding annotations.
  bool spmd = false;
  // Read the annotations of the Shardy dialect rather than `mhlo.sharding`.
  bool shardy = false;
  // Let the compiler choose the shardings of unannotated parameters and outputs. One value for all,
  // or one for each.
  std::vector<bool> propagate_sharding_to_parameters;
  std::vector<bool> propagate_sharding_to_outputs;
  // XLA debug options by name, such as {"xla_cpu_enable_fast_min_max", false}.
  std::map<std::string, Override> env_option_overrides;
};

// The serialised CompileOptionsProto: equal options give equal bytes, so it may be part of a key.
// Throws std::invalid_argument if the options contradict each other.
std::string compile_options_proto(const CompileOptions& options);

}  // namespace torch_tpu::pjrt
