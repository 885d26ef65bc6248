#include "compile_options.h"

#include <cstring>
#include <stdexcept>
#include <string_view>

namespace torch_tpu::pjrt {

namespace {

// Appends the fields of one protocol buffer message. Field numbers below are those of
// xla/pjrt/proto/compile_options.proto and xla/xla_data.proto.
class Message {
 public:
  void integer(int field, int64_t value) {
    tag(field, 0);
    varint(static_cast<uint64_t>(value));
  }
  void boolean(int field, bool value) { integer(field, value ? 1 : 0); }
  void real(int field, double value) {
    tag(field, 1);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    for (int shift = 0; shift < 64; shift += 8) {
      bytes_.push_back(static_cast<char>((bits >> shift) & 0xff));
    }
  }
  void text(int field, std::string_view value) {
    tag(field, 2);
    varint(value.size());
    bytes_.append(value);
  }
  void message(int field, const Message& value) { text(field, value.bytes_); }
  template <typename Range>
  void packed(int field, const Range& values) {
    Message inner;
    for (const auto value : values) inner.varint(static_cast<uint64_t>(value));
    message(field, inner);
  }

  const std::string& bytes() const { return bytes_; }

 private:
  void tag(int field, unsigned wire_type) {
    varint((static_cast<uint64_t>(field) << 3) | wire_type);
  }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }

  std::string bytes_;
};

// DeviceAssignmentProto lists, for each partition, the device of each replica.
Message device_assignment(const CompileOptions& options) {
  Message result;
  result.integer(1, options.num_replicas);    // replica_count
  result.integer(2, options.num_partitions);  // computation_count
  for (int partition = 0; partition < options.num_partitions; ++partition) {
    std::vector<int64_t> ids;
    for (int replica = 0; replica < options.num_replicas; ++replica) {
      ids.push_back(options.device_assignment[static_cast<size_t>(replica) *
                                                  static_cast<size_t>(options.num_partitions) +
                                              static_cast<size_t>(partition)]);
    }
    Message computation;
    computation.packed(1, ids);      // replica_device_ids
    result.message(3, computation);  // computation_devices
  }
  return result;
}

void validate(const CompileOptions& options) {
  if (options.num_replicas < 1 || options.num_partitions < 1) {
    throw std::invalid_argument("compile options: counts must be positive; got " +
                                std::to_string(options.num_replicas) + " replicas and " +
                                std::to_string(options.num_partitions) + " partitions");
  }
  const size_t devices =
      static_cast<size_t>(options.num_replicas) * static_cast<size_t>(options.num_partitions);
  const size_t assigned = options.device_assignment.size();
  if (assigned != 0 && assigned != devices) {
    throw std::invalid_argument("compile options: the device assignment has " +
                                std::to_string(assigned) + " entries; expected " +
                                std::to_string(devices));
  }
  if (options.portable && (devices != 1 || assigned != 0)) {
    throw std::invalid_argument(
        "compile options: a portable program has one replica, one partition and no device "
        "assignment; set portable to false");
  }
}

Message build_options(const CompileOptions& options) {
  Message result;
  result.integer(1, -1);  // device_ordinal: not chosen
  result.integer(4, options.num_replicas);
  result.integer(5, options.num_partitions);
  if (options.spmd) result.boolean(6, true);
  if (!options.device_assignment.empty()) result.message(9, device_assignment(options));
  if (!options.propagate_sharding_to_outputs.empty()) {
    result.packed(12, options.propagate_sharding_to_outputs);
  }
  if (!options.propagate_sharding_to_parameters.empty()) {
    result.packed(18, options.propagate_sharding_to_parameters);
  }
  if (options.shardy) result.boolean(19, true);
  return result;
}

// OptionOverrideProto is a oneof, so that a zero is written too.
Message option_override(const CompileOptions::Override& value) {
  Message result;
  if (const auto* text = std::get_if<std::string>(&value)) {
    result.text(1, *text);
  } else if (const auto* flag = std::get_if<bool>(&value)) {
    result.boolean(2, *flag);
  } else if (const auto* integer = std::get_if<int64_t>(&value)) {
    result.integer(3, *integer);
  } else {
    result.real(4, std::get<double>(value));
  }
  return result;
}

}  // namespace

std::string compile_options_proto(const CompileOptions& options) {
  validate(options);
  Message result;
  result.message(3, build_options(options));
  if (options.portable) result.boolean(4, true);
  for (const auto& [name, value] : options.env_option_overrides) {
    Message entry;
    entry.text(1, name);
    entry.message(2, option_override(value));
    result.message(7, entry);
  }
  return result.bytes();
}

}  // namespace torch_tpu::pjrt
