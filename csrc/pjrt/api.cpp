#include "api.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include <memory>
#include <mutex>
#include <sstream>
#include <type_traits>

namespace torch_tpu::pjrt {

const char* Error::code_name() const noexcept {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code_);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

std::string to_text(const Attribute& value) {
  std::ostringstream out;
  std::visit(
      [&out](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
          out << '[';
          for (size_t i = 0; i < v.size(); ++i) out << (i == 0 ? "" : ", ") << v[i];
          out << ']';
        } else if constexpr (std::is_same_v<T, bool>) {
          out << (v ? "true" : "false");
        } else {
          out << v;
        }
      },
      value);
  return out.str();
}

Attributes read_attributes(const PJRT_NamedValue* values, size_t count) {
  Attributes result;
  for (size_t i = 0; i < count; ++i) {
    const PJRT_NamedValue& value = values[i];
    Attribute& slot = result[std::string(value.name, value.name_size)];
    switch (value.type) {
      case PJRT_NamedValue_kString:
        slot = std::string(value.string_value, value.value_size);
        break;
      case PJRT_NamedValue_kInt64:
        slot = value.int64_value;
        break;
      case PJRT_NamedValue_kInt64List:
        slot = std::vector<int64_t>(value.int64_array_value,
                                    value.int64_array_value + value.value_size);
        break;
      case PJRT_NamedValue_kFloat:
        slot = static_cast<double>(value.float_value);
        break;
      case PJRT_NamedValue_kBool:
        slot = value.bool_value;
        break;
    }
  }
  return result;
}

std::vector<PJRT_NamedValue> write_attributes(const Attributes& options) {
  std::vector<PJRT_NamedValue> result;
  result.reserve(options.size());
  for (const auto& [name, option] : options) {
    TORCH_TPU_PJRT_ARGS(PJRT_NamedValue, value);
    value.name = name.data();
    value.name_size = name.size();
    value.value_size = 1;
    if (const auto* text = std::get_if<std::string>(&option)) {
      value.type = PJRT_NamedValue_kString;
      value.string_value = text->data();
      value.value_size = text->size();
    } else if (const auto* integer = std::get_if<int64_t>(&option)) {
      value.type = PJRT_NamedValue_kInt64;
      value.int64_value = *integer;
    } else if (const auto* real = std::get_if<double>(&option)) {
      value.type = PJRT_NamedValue_kFloat;
      value.float_value = static_cast<float>(*real);
    } else if (const auto* flag = std::get_if<bool>(&option)) {
      value.type = PJRT_NamedValue_kBool;
      value.bool_value = *flag;
    } else {
      const auto& list = std::get<std::vector<int64_t>>(option);
      value.type = PJRT_NamedValue_kInt64List;
      value.int64_array_value = list.data();
      value.value_size = list.size();
    }
    result.push_back(value);
  }
  return result;
}

namespace {

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> resolved(::realpath(path.c_str(), nullptr),
                                                          &::free);
  // A bare name is left for the dynamic loader to find.
  return resolved ? std::string(resolved.get()) : path;
}

// The first function we cannot work without that the plug-in lacks, or null.
const char* first_missing(const Api& api) {
#define TORCH_TPU_PJRT_NEED(entry) \
  if (!api.has(&PJRT_Api::entry)) return #entry
  TORCH_TPU_PJRT_NEED(PJRT_Error_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_Error_Message);
  TORCH_TPU_PJRT_NEED(PJRT_Error_GetCode);
  TORCH_TPU_PJRT_NEED(PJRT_Plugin_Initialize);
  TORCH_TPU_PJRT_NEED(PJRT_Event_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_Event_IsReady);
  TORCH_TPU_PJRT_NEED(PJRT_Event_Error);
  TORCH_TPU_PJRT_NEED(PJRT_Event_Await);
  TORCH_TPU_PJRT_NEED(PJRT_Event_OnReady);
  TORCH_TPU_PJRT_NEED(PJRT_Client_Create);
  TORCH_TPU_PJRT_NEED(PJRT_Client_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_Client_PlatformName);
  TORCH_TPU_PJRT_NEED(PJRT_Client_PlatformVersion);
  TORCH_TPU_PJRT_NEED(PJRT_Client_ProcessIndex);
  TORCH_TPU_PJRT_NEED(PJRT_Client_Devices);
  TORCH_TPU_PJRT_NEED(PJRT_Client_AddressableDevices);
  TORCH_TPU_PJRT_NEED(PJRT_Client_Compile);
  TORCH_TPU_PJRT_NEED(PJRT_Client_BufferFromHostBuffer);
  TORCH_TPU_PJRT_NEED(PJRT_DeviceDescription_Id);
  TORCH_TPU_PJRT_NEED(PJRT_DeviceDescription_ProcessIndex);
  TORCH_TPU_PJRT_NEED(PJRT_DeviceDescription_Attributes);
  TORCH_TPU_PJRT_NEED(PJRT_DeviceDescription_Kind);
  TORCH_TPU_PJRT_NEED(PJRT_DeviceDescription_DebugString);
  TORCH_TPU_PJRT_NEED(PJRT_Device_GetDescription);
  TORCH_TPU_PJRT_NEED(PJRT_Device_LocalHardwareId);
  TORCH_TPU_PJRT_NEED(PJRT_Executable_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_Executable_Name);
  TORCH_TPU_PJRT_NEED(PJRT_Executable_NumReplicas);
  TORCH_TPU_PJRT_NEED(PJRT_Executable_NumPartitions);
  TORCH_TPU_PJRT_NEED(PJRT_Executable_NumOutputs);
  TORCH_TPU_PJRT_NEED(PJRT_LoadedExecutable_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_LoadedExecutable_GetExecutable);
  TORCH_TPU_PJRT_NEED(PJRT_LoadedExecutable_AddressableDevices);
  TORCH_TPU_PJRT_NEED(PJRT_LoadedExecutable_Execute);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_Destroy);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_ElementType);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_Dimensions);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_OnDeviceSizeInBytes);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_Device);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_Delete);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_IsDeleted);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_CopyToDevice);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_ToHostBuffer);
  TORCH_TPU_PJRT_NEED(PJRT_Buffer_ReadyEvent);
#undef TORCH_TPU_PJRT_NEED
  return nullptr;
}

}  // namespace

Api::Api(const PJRT_Api* raw, std::string path)
    : raw_(raw), minor_(raw->pjrt_api_version.minor_version), path_(std::move(path)) {}

const Api* Api::open(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    throw Error(PJRT_Error_Code_NOT_FOUND, "cannot load the PJRT plug-in " + path + ": " +
                                               (reason != nullptr ? reason : "unknown reason"));
  }
  using GetApi = const PJRT_Api* (*)();
  const auto get_api = reinterpret_cast<GetApi>(::dlsym(library, "GetPjrtApi"));
  const PJRT_Api* raw = get_api != nullptr ? get_api() : nullptr;
  if (raw == nullptr) {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION, "not a PJRT plug-in (no GetPjrtApi): " + path);
  }
  const PJRT_Api_Version& version = raw->pjrt_api_version;
  if (version.major_version != PJRT_API_MAJOR) {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "the PJRT plug-in " + path + " has API version " +
                    std::to_string(version.major_version) + "." +
                    std::to_string(version.minor_version) + "; expected major version " +
                    std::to_string(PJRT_API_MAJOR));
  }
  std::unique_ptr<Api> api(new Api(raw, path));
  if (const char* missing = first_missing(*api)) {
    throw Error(PJRT_Error_Code_UNIMPLEMENTED,
                "the PJRT plug-in " + path + " does not provide " + missing);
  }
  TORCH_TPU_PJRT_ARGS(PJRT_Plugin_Initialize_Args, args);
  if (PJRT_Error* error = raw->PJRT_Plugin_Initialize(&args)) {
    const Error cause = api->to_error(error);
    throw Error(cause.code(), "cannot initialise the PJRT plug-in " + path + ": " + cause.what());
  }
  return api.release();
}

const Api& Api::load(const std::string& path) {
  // Leaked on purpose: plug-in threads may outlive static destructors.
  static auto* const mutex = new std::mutex;
  static auto* const loaded = new std::map<std::string, const Api*>;
  const std::string key = real_path(path);
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = loaded->find(key);
  if (found != loaded->end()) return *found->second;
  const Api* api = open(key);
  loaded->emplace(key, api);
  return *api;
}

void Api::discard(PJRT_Error* error) const noexcept {
  TORCH_TPU_PJRT_ARGS(PJRT_Error_Destroy_Args, args);
  args.error = error;
  raw_->PJRT_Error_Destroy(&args);
}

Error Api::to_error(PJRT_Error* error) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Error_Message_Args, message);
  message.error = error;
  raw_->PJRT_Error_Message(&message);
  TORCH_TPU_PJRT_ARGS(PJRT_Error_GetCode_Args, code);
  code.error = error;
  code.code = PJRT_Error_Code_UNKNOWN;
  if (PJRT_Error* nested = raw_->PJRT_Error_GetCode(&code)) discard(nested);
  Error result(code.code, std::string(message.message, message.message_size));
  discard(error);
  return result;
}

void Api::raise(PJRT_Error* error) const { throw to_error(error); }

void Api::raise_missing(const char* name) const {
  throw Error(PJRT_Error_Code_UNIMPLEMENTED, "the PJRT plug-in " + path_ + " (API 0." +
                                                 std::to_string(minor_) + ") does not provide " +
                                                 name);
}

PJRT_Extension_Base* Api::extension(PJRT_Extension_Type type) const noexcept {
  for (PJRT_Extension_Base* it = raw_->extension_start; it != nullptr; it = it->next) {
    if (it->type == type) return it;
  }
  return nullptr;
}

std::map<std::string, std::string> Api::attributes() const {
  std::map<std::string, std::string> result;
  if (!has(&PJRT_Api::PJRT_Plugin_Attributes)) return result;
  TORCH_TPU_PJRT_ARGS(PJRT_Plugin_Attributes_Args, args);
  check(raw_->PJRT_Plugin_Attributes(&args));
  for (const auto& [name, value] : read_attributes(args.attributes, args.num_attributes)) {
    result.emplace(name, to_text(value));
  }
  return result;
}

}  // namespace torch_tpu::pjrt
