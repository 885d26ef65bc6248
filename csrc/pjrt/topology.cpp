#include "topology.h"

namespace torch_tpu::pjrt {

std::unique_ptr<Topology> Topology::create(const Api& api, std::string_view name,
                                           const Attributes& options) {
  const auto create_topology =
      api.require(&PJRT_Api::PJRT_TopologyDescription_Create, "PJRT_TopologyDescription_Create");
  api.require(&PJRT_Api::PJRT_TopologyDescription_Destroy, "PJRT_TopologyDescription_Destroy");
  const std::vector<PJRT_NamedValue> values = write_attributes(options);
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Create_Args, args);
  args.topology_name = name.data();
  args.topology_name_size = name.size();
  args.create_options = values.data();
  args.num_options = values.size();
  api.check(create_topology(&args));
  return std::unique_ptr<Topology>(new Topology(api, args.topology));
}

Topology::~Topology() {
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Destroy_Args, args);
  args.topology = raw_;
  if (PJRT_Error* error = api_->raw()->PJRT_TopologyDescription_Destroy(&args)) {
    api_->discard(error);
  }
}

std::string Topology::platform_name() const {
  const auto get_name = api_->require(&PJRT_Api::PJRT_TopologyDescription_PlatformName,
                                      "PJRT_TopologyDescription_PlatformName");
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_PlatformName_Args, args);
  args.topology = raw_;
  api_->check(get_name(&args));
  return std::string(args.platform_name, args.platform_name_size);
}

std::string Topology::platform_version() const {
  const auto get_version = api_->require(&PJRT_Api::PJRT_TopologyDescription_PlatformVersion,
                                         "PJRT_TopologyDescription_PlatformVersion");
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_PlatformVersion_Args, args);
  args.topology = raw_;
  api_->check(get_version(&args));
  return std::string(args.platform_version, args.platform_version_size);
}

Attributes Topology::attributes() const {
  const auto get_attributes = api_->require(&PJRT_Api::PJRT_TopologyDescription_Attributes,
                                            "PJRT_TopologyDescription_Attributes");
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Attributes_Args, args);
  args.topology = raw_;
  api_->check(get_attributes(&args));
  return read_attributes(args.attributes, args.num_attributes);
}

namespace {

PJRT_TopologyDescription_GetDeviceDescriptions_Args device_descriptions(
    const Api& api, const PJRT_TopologyDescription* topology) {
  const auto get = api.require(&PJRT_Api::PJRT_TopologyDescription_GetDeviceDescriptions,
                               "PJRT_TopologyDescription_GetDeviceDescriptions");
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_GetDeviceDescriptions_Args, args);
  args.topology = topology;
  api.check(get(&args));
  return args;
}

}  // namespace

size_t Topology::device_count() const { return device_descriptions(*api_, raw_).num_descriptions; }

std::vector<DeviceDescription> Topology::devices() const {
  const auto found = device_descriptions(*api_, raw_);
  std::vector<DeviceDescription> result;
  result.reserve(found.num_descriptions);
  for (size_t i = 0; i < found.num_descriptions; ++i) {
    result.push_back(DeviceDescription::read(*api_, found.descriptions[i]));
  }
  return result;
}

std::string Topology::serialize() const {
  const auto serialize = api_->require(&PJRT_Api::PJRT_TopologyDescription_Serialize,
                                       "PJRT_TopologyDescription_Serialize");
  TORCH_TPU_PJRT_ARGS(PJRT_TopologyDescription_Serialize_Args, args);
  args.topology = raw_;
  api_->check(serialize(&args));
  struct Backing {
    PJRT_TopologyDescription_Serialize_Args& args;
    ~Backing() { args.serialized_topology_deleter(args.serialized_topology); }
  } const backing{args};
  return std::string(args.serialized_bytes, args.serialized_bytes_size);
}

std::shared_ptr<CompiledProgram> Topology::compile(std::string_view program_text,
                                                   std::string_view format,
                                                   std::string_view compile_options_proto) const {
  const auto compile = api_->require(&PJRT_Api::PJRT_Compile, "PJRT_Compile");
  TORCH_TPU_PJRT_ARGS(PJRT_Program, program);
  program.code = const_cast<char*>(program_text.data());  // the compiler only reads it
  program.code_size = program_text.size();
  program.format = format.data();
  program.format_size = format.size();
  TORCH_TPU_PJRT_ARGS(PJRT_Compile_Args, args);
  args.topology = raw_;
  args.program = &program;
  args.compile_options = compile_options_proto.data();
  args.compile_options_size = compile_options_proto.size();
  api_->check(compile(&args));
  return std::make_shared<CompiledProgram>(*api_, args.executable);
}

}  // namespace torch_tpu::pjrt
