#pragma once

// A compiled program and how to run it: which operands it takes, what becomes of its results.

#include <c10/util/ArrayRef.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/storage.h"

namespace torch_tpu {

struct Program {
  // One result of the executable.
  struct Output {
    int target = -1;          // index of the written tensor, or -1 for a new tensor
    int donates = -1;         // parameter whose memory it may take over, or -1
    c10::ScalarType dtype{};  // of the tensor
    Dims sizes, strides;      // of the tensor (new tensors only)
    c10::ScalarType base_dtype{};
    Dims base;    // logical shape of the result = the storage's base
    Dims padded;  // of its buffer, see Storage
    size_t nbytes = 0;
  };
  // One value the op returns.
  struct Return {
    enum Kind : uint8_t { kNew, kArgument, kNone, kList };
    Kind kind = kNone;
    int index = 0;          // output, or argument
    std::vector<int> list;  // outputs of a tensor list
  };
  struct Resize {
    int tensor = 0;
    Dims sizes;
  };
  struct Repad {
    int storage = 0;
    Dims padded;
  };

  const char* name = "";  // interned, for error messages
  std::string text;       // StableHLO; empty if there is nothing to compute
  std::string options;    // what it is compiled with
  // Programs of the same text and options have the same number. Set by finish().
  uint64_t uid = 0;
  std::vector<int> parameters;  // storage index of each base argument
  bool takes_ints = false;
  bool takes_floats = false;
  bool takes_rng = false;
  int64_t draws = 1;  // how far it moves the generator's offset, if it takes the state
  ChecksRef checks;   // not null if an i64 that tells of them follows the outputs
  std::vector<Output> outputs;
  std::vector<Return> returns;
  std::vector<Resize> resizes;  // out= arguments to resize first; then the call is parsed anew
  std::vector<Repad> repads;    // buffers to pad first; then the call is parsed anew
  // Follow the call's own ints: the sizes that a program for many sizes is run with.
  std::vector<int64_t> dynamic_sizes;
  bool cpu_fallback = false;

  void finish();  // once text and options stand
  // Compiled when it is first run by itself. Throws what obtain_executable throws.
  const pjrt::Executable& executable() const {
    const pjrt::Executable* compiled = compiled_.load(std::memory_order_acquire);
    return C10_LIKELY(compiled != nullptr) ? *compiled : compile();
  }
  bool compiled() const { return compiled_.load(std::memory_order_acquire) != nullptr; }

 private:
  const pjrt::Executable& compile() const;

  mutable std::atomic<const pjrt::Executable*> compiled_{nullptr};
  mutable std::shared_ptr<pjrt::Executable> executable_;
};

using ProgramRef = std::shared_ptr<const Program>;

const char* intern(const std::string& text);  // a copy that lives forever

}  // namespace torch_tpu
