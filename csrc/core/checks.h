#pragma once

// What programs find wrong with values while they run. A program that checks returns one i64
// besides its results: 0, or in the low 16 bits one more than the place in its list of the check
// that failed first, and above them a detail for the message (torch_tpu/lowering/checks.py).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_tpu {

struct Check {
  enum Kind : uint8_t { kIndex, kAssertion, kLinalg };
  Kind kind = kIndex;
  std::string text;  // the op; the message; the function and "|matrix" or "|batch"
};
using Checks = std::vector<Check>;
using ChecksRef = std::shared_ptr<const Checks>;

// Raises what the code of a failed check says: IndexError, RuntimeError or LinAlgError.
[[noreturn]] void raise_check(const Checks& checks, int64_t code);

}  // namespace torch_tpu
