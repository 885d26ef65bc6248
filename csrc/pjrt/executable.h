#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api.h"

namespace torch_tpu::pjrt {

// Bytes per device, as planned by the compiler.
struct CompiledMemoryStats {
  int64_t generated_code = 0;
  int64_t argument = 0;
  int64_t output = 0;
  int64_t alias = 0;  // the part of `argument` that is reused for outputs
  int64_t temp = 0;
  int64_t peak = 0;  // 0 if the plug-in does not tell
  int64_t host_generated_code = 0;
  int64_t host_argument = 0;
  int64_t host_output = 0;
  int64_t host_alias = 0;
  int64_t host_temp = 0;
};

struct OptimizedProgram {
  std::string format;  // "hlo", "hlo_with_config" or "mlir"
  std::string bytes;
};

struct OutputSpec {
  PJRT_Buffer_Type type = PJRT_Buffer_Type_INVALID;
  std::vector<int64_t> dims;
};

// A compiled program that is not bound to a client: what ahead-of-time compilation gives.
class CompiledProgram {
 public:
  // Takes ownership of `raw`.
  CompiledProgram(const Api& api, PJRT_Executable* raw);
  CompiledProgram(const CompiledProgram&) = delete;
  CompiledProgram& operator=(const CompiledProgram&) = delete;
  ~CompiledProgram();

  const Api& api() const noexcept { return *api_; }
  // Outputs per device.
  size_t num_outputs() const noexcept { return num_outputs_; }
  size_t num_replicas() const;
  size_t num_partitions() const;
  std::string name() const;
  // These three give nothing if the plug-in does not implement them. A fingerprint may be binary.
  std::optional<std::string> fingerprint() const;
  std::optional<CompiledMemoryStats> memory_stats() const;
  std::optional<Attributes> cost_analysis() const;
  // Sizes and types per device.
  std::vector<OutputSpec> outputs() const;
  int64_t code_size() const;
  OptimizedProgram optimized_program() const;
  // Bytes for Client::deserialize by the same version of the same plug-in.
  std::string serialize() const;

 protected:
  const Api* api_;
  PJRT_Executable* raw_;
  size_t num_outputs_;
};

// A compiled program loaded on a client's devices.
class Executable : public CompiledProgram {
 public:
  // Takes ownership of `loaded`.
  Executable(const Api& api, PJRT_LoadedExecutable* loaded);
  ~Executable();

  PJRT_LoadedExecutable* raw() const noexcept { return loaded_; }
  std::vector<PJRT_Device*> addressable_devices() const;

  // Enqueues the program on one device and fills `outs`, an array of num_outputs() pointers that
  // the caller then owns (wrap them in Buffer). May return before the program is done; XLA:CPU runs
  // a small one on the calling thread. Arguments that the program aliases to an output are donated
  // unless their index stands in `non_donatable`.
  // `device`: required for a portable executable; null for the device it was compiled for.
  // `done`: if not null, receives an event to own (wrap it in Event).
  // `launch_id`: to launch a program of several devices one device at a time, give the launches
  // that belong together the same number, other than 0 and unlike that of any other launch. On
  // XLA:CPU each of them needs its own thread: a collective blocks the caller until all have
  // joined, and the plug-in ends the process if they do not within 40 s. Throws Error; `outs` then
  // holds nothing to destroy.
  void execute(PJRT_Buffer* const* args, size_t nargs, PJRT_Buffer** outs,
               const int64_t* non_donatable = nullptr, size_t n_non_donatable = 0,
               PJRT_Device* device = nullptr, PJRT_Event** done = nullptr, int launch_id = 0) const;

  // The same on all addressable devices at once: args[num_devices][nargs] and
  // outs[num_devices][num_outputs()], in the order of addressable_devices(); `done` has
  // `num_devices` places. `launch_id` lets plug-ins of several processes detect a mismatch.
  void execute_sharded(PJRT_Buffer* const* const* args, size_t num_devices, size_t nargs,
                       PJRT_Buffer** const* outs, const int64_t* non_donatable = nullptr,
                       size_t n_non_donatable = 0, PJRT_Event** done = nullptr,
                       int launch_id = 0) const;

  // How often it was launched, and when last: nanoseconds since the epoch to the clock's tick of a
  // few milliseconds, 0 for never.
  int64_t launches() const noexcept { return launches_.load(std::memory_order_relaxed); }
  int64_t last_launch() const noexcept { return last_launch_.load(std::memory_order_relaxed); }

 private:
  void note_launch() const noexcept;

  PJRT_LoadedExecutable* loaded_;
  mutable std::atomic<int64_t> launches_{0}, last_launch_{0};
};

}  // namespace torch_tpu::pjrt
