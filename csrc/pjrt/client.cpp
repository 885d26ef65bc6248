#include "client.h"

#include <stdexcept>
#include <utility>

namespace torch_tpu::pjrt {

std::unique_ptr<Client> Client::create(const Api& api, const Attributes& create_options) {
  const std::vector<PJRT_NamedValue> options = write_attributes(create_options);
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Create_Args, args);
  args.create_options = options.data();
  args.num_options = options.size();
  api.check(api.raw()->PJRT_Client_Create(&args));
  std::unique_ptr<Client> client(new Client(api, args.client));
  client->describe();
  return client;
}

Client::Client(const Api& api, PJRT_Client* raw) : api_(&api), raw_(raw) {}

Client::~Client() {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Destroy_Args, args);
  args.client = raw_;
  if (PJRT_Error* error = api_->raw()->PJRT_Client_Destroy(&args)) api_->discard(error);
}

void Client::describe() {
  TORCH_TPU_PJRT_ARGS(PJRT_Client_PlatformName_Args, name);
  name.client = raw_;
  api_->check(api_->raw()->PJRT_Client_PlatformName(&name));
  platform_name_.assign(name.platform_name, name.platform_name_size);
  TORCH_TPU_PJRT_ARGS(PJRT_Client_PlatformVersion_Args, version);
  version.client = raw_;
  api_->check(api_->raw()->PJRT_Client_PlatformVersion(&version));
  platform_version_.assign(version.platform_version, version.platform_version_size);
  TORCH_TPU_PJRT_ARGS(PJRT_Client_ProcessIndex_Args, process);
  process.client = raw_;
  api_->check(api_->raw()->PJRT_Client_ProcessIndex(&process));
  process_index_ = process.process_index;
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Devices_Args, global);
  global.client = raw_;
  api_->check(api_->raw()->PJRT_Client_Devices(&global));
  global_device_count_ = global.num_devices;
  TORCH_TPU_PJRT_ARGS(PJRT_Client_AddressableDevices_Args, local);
  local.client = raw_;
  api_->check(api_->raw()->PJRT_Client_AddressableDevices(&local));
  if (local.num_addressable_devices == 0) {
    throw Error(PJRT_Error_Code_NOT_FOUND,
                "the PJRT plug-in " + api_->path() + " found no device in this process");
  }
  devices_.reserve(local.num_addressable_devices);
  for (size_t i = 0; i < local.num_addressable_devices; ++i) {
    devices_.emplace_back(*api_, local.addressable_devices[i]);
  }
}

std::vector<int64_t> Client::default_device_assignment(int num_replicas, int num_partitions) const {
  if (num_replicas < 1 || num_partitions < 1) {
    throw std::invalid_argument("default_device_assignment: counts must be positive; got " +
                                std::to_string(num_replicas) + " replicas and " +
                                std::to_string(num_partitions) + " partitions");
  }
  const auto assign = api_->require(&PJRT_Api::PJRT_Client_DefaultDeviceAssignment,
                                    "PJRT_Client_DefaultDeviceAssignment");
  std::vector<int> ids(static_cast<size_t>(num_replicas) * static_cast<size_t>(num_partitions));
  TORCH_TPU_PJRT_ARGS(PJRT_Client_DefaultDeviceAssignment_Args, args);
  args.client = raw_;
  args.num_replicas = num_replicas;
  args.num_partitions = num_partitions;
  args.default_assignment_size = ids.size();
  args.default_assignment = ids.data();
  api_->check(assign(&args));
  return std::vector<int64_t>(ids.begin(), ids.end());
}

std::shared_ptr<Executable> Client::compile(std::string_view program_text, std::string_view format,
                                            std::string_view compile_options_proto) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Program, program);
  program.code = const_cast<char*>(program_text.data());  // the compiler only reads it
  program.code_size = program_text.size();
  program.format = format.data();
  program.format_size = format.size();
  TORCH_TPU_PJRT_ARGS(PJRT_Client_Compile_Args, args);
  args.client = raw_;
  args.program = &program;
  args.compile_options = compile_options_proto.data();
  args.compile_options_size = compile_options_proto.size();
  api_->check(api_->raw()->PJRT_Client_Compile(&args));
  return std::make_shared<Executable>(*api_, args.executable);
}

std::shared_ptr<Executable> Client::deserialize(std::string_view bytes,
                                                std::string_view compile_options_proto) const {
  const auto load = api_->require(&PJRT_Api::PJRT_Executable_DeserializeAndLoad,
                                  "PJRT_Executable_DeserializeAndLoad");
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_DeserializeAndLoad_Args, args);
  args.client = raw_;
  args.serialized_executable = bytes.data();
  args.serialized_executable_size = bytes.size();
  if (!compile_options_proto.empty()) {
    args.overridden_serialized_compile_options = compile_options_proto.data();
    args.overridden_serialized_compile_options_size = compile_options_proto.size();
  }
  api_->check(load(&args));
  return std::make_shared<Executable>(*api_, args.loaded_executable);
}

Buffer Client::from_host(const void* data, PJRT_Buffer_Type type, const int64_t* dims, size_t ndims,
                         const Device& device, PJRT_HostBufferSemantics semantics, Event* done,
                         const int64_t* byte_strides) const {
  if (done == nullptr && semantics != PJRT_HostBufferSemantics_kImmutableOnlyDuringCall) {
    throw std::invalid_argument(
        "from_host: semantics that keep reading `data` after the call need a `done` event");
  }
  TORCH_TPU_PJRT_ARGS(PJRT_Client_BufferFromHostBuffer_Args, args);
  args.client = raw_;
  args.data = data;
  args.type = type;
  args.dims = dims;
  args.num_dims = ndims;
  args.byte_strides = byte_strides;
  args.num_byte_strides = byte_strides != nullptr ? ndims : 0;
  args.host_buffer_semantics = semantics;
  args.device = device.raw();
  api_->check(api_->raw()->PJRT_Client_BufferFromHostBuffer(&args));
  Event event(*api_, args.done_with_host_buffer);
  if (done != nullptr) *done = std::move(event);
  return Buffer(*api_, args.buffer);
}

std::optional<Buffer> Client::uninitialized(PJRT_Buffer_Type type, const int64_t* dims,
                                            size_t ndims, const Device& device) const {
  if (!api_->has(&PJRT_Api::PJRT_Client_CreateUninitializedBuffer)) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Client_CreateUninitializedBuffer_Args, args);
  args.client = raw_;
  args.shape_dims = dims;
  args.shape_num_dims = ndims;
  args.shape_element_type = type;
  args.device = device.raw();
  if (PJRT_Error* raw_error = api_->raw()->PJRT_Client_CreateUninitializedBuffer(&args)) {
    const Error error = api_->to_error(raw_error);
    if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return std::nullopt;
    throw error;
  }
  return Buffer(*api_, args.buffer);
}

}  // namespace torch_tpu::pjrt
