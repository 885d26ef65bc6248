#include "dispatch/program.h"

#include <c10/util/hash.h>

#include <mutex>
#include <unordered_map>

#include "dispatch/executables.h"

namespace torch_tpu {

void Program::finish() {
  static auto* mutex = new std::mutex();
  static auto* numbers = new std::unordered_map<std::string, uint64_t>();
  const std::string digest = c10::sha1(options + text).str();
  const std::lock_guard<std::mutex> lock(*mutex);
  uid = numbers->emplace(digest, numbers->size() + 1).first->second;
}

const pjrt::Executable& Program::compile() const {
  // Compiling runs without any lock: it may need the GIL, which a waiting thread may hold.
  auto executable = obtain_executable(name, text, options);
  static auto* mutex = new std::mutex();
  const std::lock_guard<std::mutex> lock(*mutex);
  if (executable_ == nullptr) {
    executable_ = std::move(executable);
    compiled_.store(executable_.get(), std::memory_order_release);
  }
  return *executable_;
}

}  // namespace torch_tpu
