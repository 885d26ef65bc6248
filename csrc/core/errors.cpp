#include "core/errors.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace torch_tpu {

void raise_execution_error(const pjrt::Error& error, const char* op) {
  const std::string what = c10::str(op, ": execution failed on the tpu device (", error.code_name(),
                                    "): ", error.what());
  if (error.code() == PJRT_Error_Code_RESOURCE_EXHAUSTED) {
    C10_THROW_ERROR(OutOfMemoryError, what);
  }
  TORCH_CHECK(false, what);
}

namespace {

// Writes the program where the user can find it; an unwritable directory only costs the dump.
std::string dump(const std::string& op, const std::string& program) {
  const char* root = std::getenv("TORCH_TPU_DUMP_DIR");
  std::error_code ignored;
  const auto dir = root != nullptr
                       ? std::filesystem::path(root)
                       : std::filesystem::temp_directory_path(ignored) / "torch_tpu-dumps";
  std::filesystem::create_directories(dir, ignored);
  std::string name;
  for (const char c : op) name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  const auto path =
      dir / c10::str(name, "-", getpid(), "-", std::hash<std::string>{}(program) % 100000, ".mlir");
  std::ofstream file(path);
  file << program;
  return file.good() ? path.string() : std::string();
}

}  // namespace

void raise_compile_error(const pjrt::Error& error, const std::string& op,
                         const std::string& program) {
  const std::string path = dump(op, program);
  const std::string what = c10::str(op, ": the program did not compile (", error.code_name(),
                                    "): ", error.what(), path.empty() ? "" : "\nprogram: " + path);
  if (error.code() == PJRT_Error_Code_RESOURCE_EXHAUSTED) {
    C10_THROW_ERROR(OutOfMemoryError, what);
  }
  TORCH_CHECK(false, what);
}

}  // namespace torch_tpu
