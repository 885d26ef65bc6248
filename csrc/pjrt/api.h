#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "pjrt_c_api.h"

namespace torch_tpu::pjrt {

// A failure reported by a plug-in, or by loading one. `what()` is the plug-in's own message.
class Error : public std::runtime_error {
 public:
  Error(int code, const std::string& message) : std::runtime_error(message), code_(code) {}

  // A PJRT_Error_Code.
  int code() const noexcept { return code_; }
  // The canonical spelling of `code()`, such as "INVALID_ARGUMENT".
  const char* code_name() const noexcept;

 private:
  int code_;
};

// A named value of the C API: options in, attributes and cost properties out.
using Attribute = std::variant<std::string, int64_t, double, bool, std::vector<int64_t>>;
using Attributes = std::map<std::string, Attribute>;

std::string to_text(const Attribute& value);

// One loaded plug-in. Never unloaded, so references stay valid for the life of the process.
class Api {
 public:
  // Loads the plug-in at `path` and initialises it, once per real path. Throws Error naming `path`
  // if it cannot be opened, speaks another major version, or lacks a function we need.
  static const Api& load(const std::string& path);

  const PJRT_Api* raw() const noexcept { return raw_; }
  int minor() const noexcept { return minor_; }
  const std::string& path() const noexcept { return path_; }

  // Throws Error and frees `error` unless it is null.
  void check(PJRT_Error* error) const {
    if (__builtin_expect(error != nullptr, 0)) raise(error);
  }
  // Frees `error`: for destructors, which have nobody to tell.
  void discard(PJRT_Error* error) const noexcept;
  // Takes `error` apart and frees it. `error` must not be null.
  Error to_error(PJRT_Error* error) const;

  // Whether this plug-in provides an entry: api.has(&PJRT_Api::PJRT_Client_DmaMap).
  template <typename Fn>
  bool has(Fn* PJRT_Api::* entry) const noexcept {
    const auto* field = reinterpret_cast<const char*>(&(raw_->*entry));
    const auto end = static_cast<size_t>(field - reinterpret_cast<const char*>(raw_)) + sizeof(Fn*);
    return end <= raw_->struct_size && raw_->*entry != nullptr;
  }
  // The entry, or Error(UNIMPLEMENTED) naming it.
  template <typename Fn>
  Fn* require(Fn* PJRT_Api::* entry, const char* name) const {
    if (!has(entry)) raise_missing(name);
    return raw_->*entry;
  }

  // The extension of this type, or null. Cast it to the type's own struct.
  PJRT_Extension_Base* extension(PJRT_Extension_Type type) const noexcept;
  // PJRT_Plugin_Attributes as text, such as "stablehlo_current_version" -> "[1, 13, 0]".
  std::map<std::string, std::string> attributes() const;

  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;

 private:
  Api(const PJRT_Api* raw, std::string path);
  static const Api* open(const std::string& path);
  [[noreturn]] void raise(PJRT_Error* error) const;
  [[noreturn]] void raise_missing(const char* name) const;

  const PJRT_Api* raw_;
  int minor_;
  std::string path_;
};

// Declares `name`, an argument struct of the C API, zeroed and with its size filled in.
#define TORCH_TPU_PJRT_ARGS(type, name) \
  type name{};                          \
  name.struct_size = type##_STRUCT_SIZE

Attributes read_attributes(const PJRT_NamedValue* values, size_t count);
// Points into `options`, which must outlive the result.
std::vector<PJRT_NamedValue> write_attributes(const Attributes& options);

}  // namespace torch_tpu::pjrt
