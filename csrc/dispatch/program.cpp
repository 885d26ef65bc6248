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
  // Calls whose programs have the same text share one executable while any of them is kept: what
  // differs is outside of it (sizes that are operands, who returns what).
  static auto* mutex = new std::mutex();
  static auto* shared = new std::unordered_map<uint64_t, std::weak_ptr<pjrt::Executable>>();
  const auto known = [this] {
    const auto found = shared->find(uid);
    return found == shared->end() ? nullptr : found->second.lock();
  };
  std::shared_ptr<pjrt::Executable> executable;
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    executable = known();
  }
  // Compiling runs without any lock: it may need the GIL, which a waiting thread may hold.
  if (executable == nullptr) executable = obtain_executable(name, text, options);
  const std::lock_guard<std::mutex> lock(*mutex);
  if (auto other = known()) {
    executable = std::move(other);
  } else {
    (*shared)[uid] = executable;
  }
  if (executable_ == nullptr) {
    executable_ = std::move(executable);
    compiled_.store(executable_.get(), std::memory_order_release);
  }
  return *executable_;
}

}  // namespace torch_tpu
