// Autocast: which ops run in the lower precision, which in float32, which in the widest type given.
// PyTorch keeps the lists; a backend registers them for its own key.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

// Names that the lists use.
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TORCH_TPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TORCH_TPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TORCH_TPU_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TORCH_TPU_APPEND_DTYPE(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define TORCH_TPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TORCH_TPU_LOWER_PRECISION)
  AT_FORALL_FP32(TORCH_TPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TORCH_TPU_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(TORCH_TPU_APPEND_DTYPE)
  AT_FORALL_PROMOTE(TORCH_TPU_PROMOTE)
  // CUDA refuses it for the sake of float16 gradients; in float32 there is nothing to refuse.
  TORCH_TPU_FP32(binary_cross_entropy)
}

}  // namespace
