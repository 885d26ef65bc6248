// Which attention the device takes: PyTorch's decomposition into matmuls and a softmax, or, while a
// graph is traced that asks for it, one op of ours. That op returns lengths next to tensors, which
// the boxed kernel does not give, so it is for graphs only.

#include "core/attention.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include <atomic>

namespace torch_tpu {

namespace {

std::atomic<bool> one_op{false};

// torch_tpu/lowering/ops/attention.py has the program: (batch, heads, length, width), the same
// batch everywhere, and for grouped queries a number of query heads that the key heads divide.
bool has_program(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 bool grouped) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  if (!at::isFloatingType(query.scalar_type()) || query.scalar_type() != key.scalar_type() ||
      query.scalar_type() != value.scalar_type()) {
    return false;
  }
  if (query.sym_size(0) != key.sym_size(0) || key.sym_size(0) != value.sym_size(0)) return false;
  const auto heads = query.sym_size(1), key_heads = key.sym_size(1);
  if (key_heads != value.sym_size(1)) return false;
  if (heads != key_heads && !(grouped && key_heads != 0 && heads % key_heads == 0)) return false;
  return query.sym_numel() != 0 && key.sym_numel() != 0 && value.sym_numel() != 0;
}

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& /*mask*/, double /*dropout*/,
                         bool /*causal*/, std::optional<double> /*scale*/, bool grouped) {
  const bool traced = query.key_set().has(c10::DispatchKey::Python);
  const bool ours = one_op && traced && at::globalContext().userEnabledOverrideableSDP() &&
                    has_program(query, key, value, grouped);
  return static_cast<int64_t>(ours ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

}  // namespace

bool exchange_one_op_attention(bool wanted) { return one_op.exchange(wanted); }

}  // namespace torch_tpu

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &torch_tpu::choose_attention)

}  // namespace at::native
