#pragma once

// What the native core knows about one ATen overload, and its programs.

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "dispatch/call.h"
#include "dispatch/program.h"

namespace torch_tpu {

struct OpState {
  explicit OpState(c10::OperatorHandle op);

  const c10::OperatorHandle handle;
  const char* const name;  // "aten::add.Tensor", interned
  std::vector<ArgKind> kinds;
  uint64_t written = 0;                // arguments the schema marks as written, by bit
  bool moves_cpu_tensors = false;      // index ops take CPU index tensors
  std::atomic<bool> has_check{false};  // its operands' values are checked when they are new

  // The operand values that passed the check last.
  bool same_operands(const Call& call) const;
  void remember_operands(const Call& call);

  const c10::FunctionSchema& schema() const { return handle.schema(); }
  bool is_written(size_t arg) const { return arg < 64 && (written >> arg & 1) != 0; }

  // Which numbers travel as operands; the rest is static. Set by Python at registration.
  void set_operands(const std::vector<std::string>& operands);

  ProgramRef find(c10::ArrayRef<uint64_t> key) const;
  void insert(c10::ArrayRef<uint64_t> key, ProgramRef program);
  void clear();
  size_t size() const;

  [[noreturn]] void raise_wrong_device(const at::Tensor& tensor, size_t arg, int device) const;
  [[noreturn]] void raise_no_storage(const at::Tensor& tensor, size_t arg) const;
  // Gives a storage of raw bytes (from torch.load, UntypedStorage) the dtype it is used with.
  static void retype(const at::Tensor& tensor);

  // The state of an overload; made at first use, lives forever.
  static OpState& of(const c10::OperatorHandle& op);
  static std::vector<OpState*> all();

 private:
  static size_t hash(c10::ArrayRef<uint64_t> key);

  struct Slot {
    std::vector<uint64_t> key;
    ProgramRef program;
    mutable uint64_t last_use = 0;
  };
  size_t evict_older_than(uint64_t tick);
  static void bound_programs();
  mutable std::mutex mutex_;
  std::vector<int64_t> checked_ints_;
  std::vector<double> checked_floats_;
  std::unordered_multimap<size_t, Slot> slots_;
};

struct Counters {
  std::atomic<int64_t> hits{0}, misses{0}, compiles{0}, fallbacks{0}, executions{0};
  // Fused mode: calls recorded, recordings run as one program, and call by call.
  std::atomic<int64_t> recorded{0}, fused_runs{0}, split_runs{0};
  // A program new to the process is compiled, or found in the host's directory or the remote root.
  // Buffers that were made longer for a program for many sizes.
  std::atomic<int64_t> repads{0};
  std::atomic<int64_t> disk_hits{0}, disk_misses{0}, remote_hits{0};
  std::atomic<int64_t> lower_ns{0}, compile_ns{0}, load_ns{0}, store_ns{0};
  std::atomic<int64_t> bytes_to_device{0}, bytes_to_host{0};
};
Counters& counters();

// What changes every program: matmul precision, index checks, excess precision.
uint64_t environment_word();

}  // namespace torch_tpu
