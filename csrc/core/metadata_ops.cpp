// Ops that look at tensors or mark them, and compute nothing.

#include <ATen/ATen.h>
#include <ATen/ops/is_set_to_native.h>
#include <torch/library.h>

namespace torch_tpu {

namespace {

// An ordinary tensor over a storage, on the host or here: any of them can take another's place.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         (tensor.is_cpu() || tensor.is_privateuseone());
}

// Asked by Module.to() and by `tensor.data = other`. PyTorch's own answer knows a fixed list of
// backends; without ours in it Module.to() would make new Parameters and untie shared ones.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  if (is_plain(self) && is_plain(from)) return true;
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

// The plug-in keeps memory until every program that uses it is done.
void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("record_stream", &record_stream);
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
}

}  // namespace torch_tpu
