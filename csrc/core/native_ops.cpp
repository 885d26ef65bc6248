// Ops that make, alias or resize storages. Everything that computes goes through programs instead.

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "core/storage.h"

namespace torch_tpu {

namespace {

int device_index(const std::optional<c10::Device>& device) {
  Runtime::get().client();
  if (!device.has_value() || !device->has_index()) return current_device();
  Runtime::get().device(device->index());  // refuses an index that does not exist
  return device->index();
}

void check_options(const std::optional<c10::Layout>& layout, const std::optional<bool>& pin) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(c10::kStrided) == c10::kStrided,
                              "the tpu device has strided tensors only; got layout ", *layout);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                               std::optional<bool> pin,
                               std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin);
  const auto format = memory_format.value_or(c10::MemoryFormat::Contiguous);
  Dims strides;
  if (format == c10::MemoryFormat::ChannelsLast) {
    TORCH_CHECK(sizes.size() == 4, "required rank 4 tensor to use channels_last format");
    strides = Dims(c10::get_channels_last_strides_2d(sizes));
  } else if (format == c10::MemoryFormat::ChannelsLast3d) {
    TORCH_CHECK(sizes.size() == 5, "required rank 5 tensor to use channels_last_3d format");
    strides = Dims(c10::get_channels_last_strides_3d(sizes));
  } else {
    strides.resize(sizes.size());
    int64_t step = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = step;
      step *= std::max<int64_t>(sizes[i], 1);
    }
  }
  return empty_strided(device_index(device), dtype.value_or(c10::get_default_dtype_as_scalartype()),
                       sizes, strides);
}

at::Tensor empty_strided_op(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                            std::optional<c10::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  return empty_strided(device_index(device), dtype.value_or(c10::get_default_dtype_as_scalartype()),
                       sizes, strides);
}

// Bytes a strided view needs.
size_t extent_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                    size_t itemsize) {
  int64_t extent = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    extent += (sizes[i] - 1) * strides[i];
  }
  return static_cast<size_t>(extent + offset) * itemsize;
}

void grow_storage(const at::Tensor& self) {
  c10::StorageImpl* storage = self.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const size_t needed =
      extent_bytes(self.sizes(), self.strides(), self.storage_offset(), self.dtype().itemsize());
  if (needed > storage->nbytes()) {
    Storage& ours = storage_of(*storage);
    // A fresh storage takes the tensor's own shape, so that later programs need no view.
    if (ours.buffer == nullptr && self.is_contiguous() && self.storage_offset() == 0) {
      ours.set_base(self.scalar_type(), self.sizes());
      ours.raw_bytes = false;
      storage->set_nbytes(needed);
    } else {
      resize_storage(storage, needed);
    }
  }
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                          std::optional<c10::MemoryFormat> memory_format) {
  for (const int64_t n : sizes) {
    TORCH_CHECK(n >= 0, "Trying to create tensor with negative dimension ", n, ": ", sizes);
  }
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    grow_storage(self);
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(*memory_format != c10::MemoryFormat::Preserve, "Unsupported memory format",
                *memory_format);
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage source, int64_t offset,
                               c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(),
              "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  TORCH_CHECK(sizes.size() == strides.size() || strides.empty(), "unequal size length (",
              sizes.size(), ") and stride length (", strides.size(), ")");
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  TORCH_CHECK(self.dtype() == source.dtype(), "Could not set tensor of type ", source.dtype(),
              " to a tensor of type ", self.dtype());
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage fresh(c10::Storage::use_byte_size_t(), 0, tpu_allocator(), true);
  return set_storage_offset(self, std::move(fresh), 0, {0}, {1});
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided_op);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

}  // namespace torch_tpu
