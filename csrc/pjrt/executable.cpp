#include "executable.h"

#include <ctime>

namespace torch_tpu::pjrt {

namespace {

void destroy(const Api& api, PJRT_Executable* raw) noexcept {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Destroy_Args, args);
  args.executable = raw;
  if (PJRT_Error* error = api.raw()->PJRT_Executable_Destroy(&args)) api.discard(error);
}

void destroy(const Api& api, PJRT_LoadedExecutable* raw) noexcept {
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Destroy_Args, args);
  args.executable = raw;
  if (PJRT_Error* error = api.raw()->PJRT_LoadedExecutable_Destroy(&args)) api.discard(error);
}

size_t count_outputs(const Api& api, PJRT_Executable* raw) {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_NumOutputs_Args, args);
  args.executable = raw;
  api.check(api.raw()->PJRT_Executable_NumOutputs(&args));
  return args.num_outputs;
}

PJRT_Executable* executable_of(const Api& api, PJRT_LoadedExecutable* loaded) {
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_GetExecutable_Args, args);
  args.loaded_executable = loaded;
  api.check(api.raw()->PJRT_LoadedExecutable_GetExecutable(&args));
  return args.executable;
}

// Whether a call that a plug-in may leave out succeeded; throws on any other failure.
bool implemented(const Api& api, PJRT_Error* raw_error) {
  if (raw_error == nullptr) return true;
  const Error error = api.to_error(raw_error);
  if (error.code() == PJRT_Error_Code_UNIMPLEMENTED) return false;
  throw error;
}

}  // namespace

CompiledProgram::CompiledProgram(const Api& api, PJRT_Executable* raw) : api_(&api), raw_(raw) {
  try {
    num_outputs_ = count_outputs(api, raw);
  } catch (...) {
    destroy(api, raw);
    throw;
  }
}

CompiledProgram::~CompiledProgram() { destroy(*api_, raw_); }

size_t CompiledProgram::num_replicas() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_NumReplicas_Args, args);
  args.executable = raw_;
  api_->check(api_->raw()->PJRT_Executable_NumReplicas(&args));
  return args.num_replicas;
}

size_t CompiledProgram::num_partitions() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_NumPartitions_Args, args);
  args.executable = raw_;
  api_->check(api_->raw()->PJRT_Executable_NumPartitions(&args));
  return args.num_partitions;
}

std::string CompiledProgram::name() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Name_Args, args);
  args.executable = raw_;
  api_->check(api_->raw()->PJRT_Executable_Name(&args));
  return std::string(args.executable_name, args.executable_name_size);
}

std::optional<std::string> CompiledProgram::fingerprint() const {
  if (!api_->has(&PJRT_Api::PJRT_Executable_Fingerprint)) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Fingerprint_Args, args);
  args.executable = raw_;
  if (!implemented(*api_, api_->raw()->PJRT_Executable_Fingerprint(&args))) return std::nullopt;
  return std::string(args.executable_fingerprint, args.executable_fingerprint_size);
}

std::optional<CompiledMemoryStats> CompiledProgram::memory_stats() const {
  if (!api_->has(&PJRT_Api::PJRT_Executable_GetCompiledMemoryStats)) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_GetCompiledMemoryStats_Args, args);
  args.executable = raw_;
  if (!implemented(*api_, api_->raw()->PJRT_Executable_GetCompiledMemoryStats(&args))) {
    return std::nullopt;
  }
  CompiledMemoryStats stats;
  stats.generated_code = args.generated_code_size_in_bytes;
  stats.argument = args.argument_size_in_bytes;
  stats.output = args.output_size_in_bytes;
  stats.alias = args.alias_size_in_bytes;
  stats.temp = args.temp_size_in_bytes;
  stats.peak = args.peak_memory_in_bytes;
  stats.host_generated_code = args.host_generated_code_size_in_bytes;
  stats.host_argument = args.host_argument_size_in_bytes;
  stats.host_output = args.host_output_size_in_bytes;
  stats.host_alias = args.host_alias_size_in_bytes;
  stats.host_temp = args.host_temp_size_in_bytes;
  return stats;
}

std::optional<Attributes> CompiledProgram::cost_analysis() const {
  if (!api_->has(&PJRT_Api::PJRT_Executable_GetCostAnalysis)) return std::nullopt;
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_GetCostAnalysis_Args, args);
  args.executable = raw_;
  if (!implemented(*api_, api_->raw()->PJRT_Executable_GetCostAnalysis(&args))) {
    return std::nullopt;
  }
  return read_attributes(args.properties, args.num_properties);
}

std::vector<OutputSpec> CompiledProgram::outputs() const {
  const auto get_types = api_->require(&PJRT_Api::PJRT_Executable_OutputElementTypes,
                                       "PJRT_Executable_OutputElementTypes");
  const auto get_dims = api_->require(&PJRT_Api::PJRT_Executable_OutputDimensions,
                                      "PJRT_Executable_OutputDimensions");
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_OutputElementTypes_Args, types);
  types.executable = raw_;
  api_->check(get_types(&types));
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_OutputDimensions_Args, dims);
  dims.executable = raw_;
  api_->check(get_dims(&dims));
  if (types.num_output_types != dims.num_outputs) {
    throw Error(PJRT_Error_Code_INTERNAL, "the plug-in disagrees with itself about the outputs");
  }
  std::vector<OutputSpec> result(dims.num_outputs);
  const int64_t* next = dims.dims;
  for (size_t i = 0; i < result.size(); ++i) {
    result[i].type = types.output_types[i];
    result[i].dims.assign(next, next + dims.dim_sizes[i]);
    next += dims.dim_sizes[i];
  }
  return result;
}

int64_t CompiledProgram::code_size() const {
  const auto code_size = api_->require(&PJRT_Api::PJRT_Executable_SizeOfGeneratedCodeInBytes,
                                       "PJRT_Executable_SizeOfGeneratedCodeInBytes");
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args, args);
  args.executable = raw_;
  api_->check(code_size(&args));
  return args.size_in_bytes;
}

OptimizedProgram CompiledProgram::optimized_program() const {
  const auto get_program = api_->require(&PJRT_Api::PJRT_Executable_OptimizedProgram,
                                         "PJRT_Executable_OptimizedProgram");
  TORCH_TPU_PJRT_ARGS(PJRT_Program, program);
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_OptimizedProgram_Args, args);
  args.executable = raw_;
  args.program = &program;
  api_->check(get_program(&args));  // the size
  OptimizedProgram result;
  result.bytes.resize(program.code_size);
  program.code = result.bytes.data();
  api_->check(get_program(&args));  // the contents
  result.bytes.resize(program.code_size);
  result.format.assign(program.format, program.format_size);
  return result;
}

std::string CompiledProgram::serialize() const {
  const auto serialize =
      api_->require(&PJRT_Api::PJRT_Executable_Serialize, "PJRT_Executable_Serialize");
  TORCH_TPU_PJRT_ARGS(PJRT_Executable_Serialize_Args, args);
  args.executable = raw_;
  api_->check(serialize(&args));
  struct Backing {
    PJRT_Executable_Serialize_Args& args;
    ~Backing() { args.serialized_executable_deleter(args.serialized_executable); }
  } const backing{args};
  return std::string(args.serialized_bytes, args.serialized_bytes_size);
}

Executable::Executable(const Api& api, PJRT_LoadedExecutable* loaded)
    : CompiledProgram(api,
                      [&] {
                        try {
                          return executable_of(api, loaded);
                        } catch (...) {
                          destroy(api, loaded);
                          throw;
                        }
                      }()),
      loaded_(loaded) {}

Executable::~Executable() { destroy(*api_, loaded_); }

std::vector<PJRT_Device*> Executable::addressable_devices() const {
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_AddressableDevices_Args, args);
  args.executable = loaded_;
  api_->check(api_->raw()->PJRT_LoadedExecutable_AddressableDevices(&args));
  return std::vector<PJRT_Device*>(args.addressable_devices,
                                   args.addressable_devices + args.num_addressable_devices);
}

void Executable::note_launch() const noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);  // a few nanoseconds
  launches_.fetch_add(1, std::memory_order_relaxed);
  last_launch_.store(int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec, std::memory_order_relaxed);
}

void Executable::execute(PJRT_Buffer* const* args, size_t nargs, PJRT_Buffer** outs,
                         const int64_t* non_donatable, size_t n_non_donatable, PJRT_Device* device,
                         PJRT_Event** done, int launch_id) const {
  TORCH_TPU_PJRT_ARGS(PJRT_ExecuteOptions, options);
  options.launch_id = launch_id;
  options.non_donatable_input_indices = non_donatable;
  options.num_non_donatable_input_indices = n_non_donatable;
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Execute_Args, call);
  call.executable = loaded_;
  call.options = &options;
  call.argument_lists = &args;
  call.num_devices = 1;
  call.num_args = nargs;
  call.output_lists = &outs;
  call.device_complete_events = done;
  call.execute_device = device;
  note_launch();
  api_->check(api_->raw()->PJRT_LoadedExecutable_Execute(&call));
}

void Executable::execute_sharded(PJRT_Buffer* const* const* args, size_t num_devices, size_t nargs,
                                 PJRT_Buffer** const* outs, const int64_t* non_donatable,
                                 size_t n_non_donatable, PJRT_Event** done, int launch_id) const {
  TORCH_TPU_PJRT_ARGS(PJRT_ExecuteOptions, options);
  options.launch_id = launch_id;
  options.non_donatable_input_indices = non_donatable;
  options.num_non_donatable_input_indices = n_non_donatable;
  TORCH_TPU_PJRT_ARGS(PJRT_LoadedExecutable_Execute_Args, call);
  call.executable = loaded_;
  call.options = &options;
  call.argument_lists = args;
  call.num_devices = num_devices;
  call.num_args = nargs;
  call.output_lists = outs;
  call.device_complete_events = done;
  note_launch();
  api_->check(api_->raw()->PJRT_LoadedExecutable_Execute(&call));
}

}  // namespace torch_tpu::pjrt
