// Boolean masks among the indices of a read: the result's size is data, so they are turned into
// integer indices before the call is parsed.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "dispatch/boxed.h"
#include "dispatch/op_state.h"

namespace torch_tpu {

namespace {

bool is_mask(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const auto dtype = value.toTensor().scalar_type();
  return dtype == c10::kBool || dtype == c10::kByte;
}

at::Tensor on_device(const at::Tensor& mask, const at::Tensor& self) {
  at::Tensor out = mask.device() == self.device() ? mask : mask.to(self.device());
  if (out.scalar_type() == c10::kByte) {
    TORCH_WARN_ONCE(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype "
        "torch.bool instead.");
    out = out.to(c10::kBool);
  }
  return out;
}

void check_mask(const at::Tensor& mask, const at::Tensor& self, int64_t at, size_t position) {
  for (int64_t j = 0; j < mask.dim(); ++j) {
    TORCH_CHECK_INDEX(at + j < self.dim() && mask.size(j) == self.size(at + j),
                      "The shape of the mask ", mask.sizes(), " at index ", j,
                      " does not match the shape of the indexed tensor ", self.sizes(),
                      " at index ", at + j, position == 0 ? "" : " (after other indices)");
  }
}

// All rows of `nonzero` at their largest number, and how many are valid.
std::pair<at::Tensor, int64_t> nonzero_padded(const at::Tensor& mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_tpu::nonzero_padded", "")
                             .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&)>();
  const auto [rows, count] = op.call(mask);
  return {rows, count.item<int64_t>()};
}

}  // namespace

bool expand_masks(OpState& op, torch::jit::Stack* stack) {
  const size_t num_args = op.kinds.size();
  const size_t base = stack->size() - num_args;
  // Writes through a mask have static shapes: their lowering takes the mask itself.
  if (num_args != 2 || op.kinds[1] != ArgKind::kTensorList) return false;
  const c10::IValue& list = (*stack)[base + 1];
  if (!list.isList()) return false;
  const auto items = list.toListRef();
  size_t masks = 0;
  size_t defined = 0;
  for (const c10::IValue& item : items) {
    masks += is_mask(item) ? 1 : 0;
    defined += item.isTensor() && item.toTensor().defined() ? 1 : 0;
  }
  if (masks == 0) return false;
  const at::Tensor self = (*stack)[base].toTensor();
  c10::List<std::optional<at::Tensor>> expanded;
  int64_t count = -1;
  int64_t narrowed = 0;
  int64_t dim = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!is_mask(items[i])) {
      const bool given = items[i].isTensor() && items[i].toTensor().defined();
      expanded.push_back(given ? std::optional<at::Tensor>(items[i].toTensor()) : std::nullopt);
      ++dim;
      continue;
    }
    const at::Tensor mask = on_device(items[i].toTensor(), self);
    check_mask(mask, self, dim, i);
    at::Tensor rows;
    if (defined == 1 && mask.dim() > 0) {
      std::tie(rows, count) = nonzero_padded(mask);
      narrowed = dim;
    } else {
      rows = at::nonzero(mask);
    }
    for (int64_t j = 0; j < mask.dim(); ++j) expanded.push_back(rows.select(1, j));
    dim += mask.dim();
  }
  (*stack)[base + 1] = expanded;
  run_boxed(op, stack);
  if (count >= 0) {
    const at::Tensor padded = torch::jit::pop(*stack).toTensor();
    torch::jit::push(*stack, padded.narrow(narrowed, 0, count));
  }
  return true;
}

}  // namespace torch_tpu
