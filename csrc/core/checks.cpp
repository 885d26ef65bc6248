#include "core/checks.h"

#include <ATen/ATen.h>

namespace torch_tpu {

namespace {

constexpr int kLabelBits = 16;
constexpr int kValueBits = 24;

// PyTorch has the words for each function; it is given an info that fails in the same place.
void raise_linalg(const std::string& text, int64_t detail) {
  const auto bar = text.find('|');
  const bool matrix = text.substr(bar + 1) == "matrix";
  const int64_t row = detail >> kValueBits;
  const int64_t low = detail & ((int64_t{1} << kValueBits) - 1);
  const int64_t value =
      low >= int64_t{1} << (kValueBits - 1) ? low - (int64_t{1} << kValueBits) : low;
  at::Tensor info = at::zeros({row + 1}, at::TensorOptions().dtype(at::kInt));
  info[row].fill_(value);
  if (matrix) info = info[row];
  at::_linalg_check_errors(info, text.substr(0, bar), matrix);
}

}  // namespace

void raise_check(const Checks& checks, int64_t code) {
  const auto place = static_cast<size_t>(code & ((int64_t{1} << kLabelBits) - 1)) - 1;
  TORCH_INTERNAL_ASSERT(place < checks.size(), "a program reports an unknown check, ", code);
  const Check& check = checks[place];
  TORCH_CHECK_INDEX(check.kind != Check::kIndex, check.text, ": index out of range");
  if (check.kind == Check::kLinalg) raise_linalg(check.text, code >> kLabelBits);
  TORCH_CHECK(false, check.text);
}

}  // namespace torch_tpu
