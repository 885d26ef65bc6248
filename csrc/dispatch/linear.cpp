// Linear layers. PyTorch composes them of a transpose, a product and a sum, and their backward of
// five ops; on this device each direction is one program.
//
// A kernel below autograd would lose the gradient of a composite op, so this one stands at autograd
// itself. It leaves to PyTorch's composition what wants to see its parts: forward-mode derivatives,
// tensor subclasses, tracing.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "core/activity.h"
#include "core/modes.h"

namespace torch_tpu {

namespace {

at::Tensor linear_below_autograd(const at::Tensor& input, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowAutograd guard;
  return at::linear(input, weight, bias);
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    context->save_for_backward({input, weight});
    context->saved_data["bias"] = bias.has_value() && bias->defined();
    return linear_below_autograd(input, weight, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const auto saved = context->get_saved_variables();
    const bool has_bias = context->saved_data["bias"].toBool();
    const std::array<bool, 3> wanted = {context->needs_input_grad(0), context->needs_input_grad(1),
                                        has_bias && context->needs_input_grad(2)};
    auto [input, weight, bias] = at::linear_backward(saved[0], grads[0], saved[1], wanted);
    return {wanted[0] ? input : at::Tensor(), wanted[1] ? weight : at::Tensor(),
            wanted[2] ? bias : at::Tensor()};
  }
};

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_privateuseone() && tensor.layout() == c10::kStrided &&
         !tensor.key_set().has(c10::DispatchKey::Python) && !tensor._fw_grad(0).defined();
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias.has_value() && bias->defined();
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || !is_plain(input) || !is_plain(weight) ||
      input.dim() < 2 || weight.dim() != 2 ||
      (has_bias && (!is_plain(*bias) || bias->dim() != 1))) {
    return at::native::linear(input, weight, bias);
  }
  const bool wants_gradient =
      at::GradMode::is_enabled() &&
      (input.requires_grad() || weight.requires_grad() || (has_bias && bias->requires_grad()));
  if (!wants_gradient) return linear_below_autograd(input, weight, bias);
  const activity::Scope scope(eager_mode() == EagerMode::kDebug);
  at::Tensor out = Linear::apply(input, weight, bias);
  // The kernel runs with gradients off, after the node was made: it cannot tell whose it is.
  remember_node(activity::scope_line());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("linear", &linear); }

}  // namespace torch_tpu
