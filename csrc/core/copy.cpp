// Copies between tpu and cpu, between two tpu devices, and reading one element.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "core/activity.h"
#include "core/errors.h"
#include "core/modes.h"
#include "core/storage.h"
#include "dispatch/boxed.h"
#include "dispatch/trace.h"

namespace torch_tpu {

namespace {

bool on_tpu(const at::Tensor& t) { return t.device().type() == c10::DeviceType::PrivateUse1; }

// Whether the tensor is all of its storage, without gaps; `order` is then its memory order.
bool is_whole(const at::Tensor& t, Dims& order) {
  const c10::StorageImpl* impl = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return t.storage_offset() == 0 && t.numel() > 0 && t.nbytes() == impl->nbytes() &&
         dense_order(t.sizes(), t.strides(), order);
}

BufferRef upload(const at::Tensor& contiguous, c10::IntArrayRef dims, int device) {
  Runtime& runtime = Runtime::get();
  const activity::Timer timer(activity::Kind::kToDevice, "copy to the device", device,
                              static_cast<int64_t>(contiguous.nbytes()));
  try {
    counters().bytes_to_device.fetch_add(static_cast<int64_t>(contiguous.nbytes()),
                                         std::memory_order_relaxed);
    pjrt::Buffer buffer =
        runtime.client().from_host(contiguous.const_data_ptr(), to_pjrt(contiguous.scalar_type()),
                                   dims.data(), dims.size(), runtime.device(device));
    if (eager_mode() == EagerMode::kDebug) buffer.await();
    return std::make_shared<Buffer>(std::move(buffer), device, contiguous.nbytes(),
                                    "copy to the device");
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, "copy to the device");
  }
}

void install(Storage& storage, BufferRef buffer, c10::ScalarType dtype, c10::IntArrayRef dims) {
  BufferRef old;
  const LaunchLock lock(Runtime::get().state(storage.device));
  old = storage.set_buffer(std::move(buffer));
  storage.set_base(dtype, dims);
}

BufferRef buffer_of(Storage& storage) {
  if (storage.buffer == nullptr) define_contents(storage);
  const LaunchLock lock(Runtime::get().state(storage.device));
  return storage.buffer;
}

// Tells waiting for the contents apart from copying them, if anybody wants to know.
void observe_wait(const Buffer& buffer, int device) {
  if (!activity::spans_wanted()) return;
  const activity::Timer timer(activity::Kind::kWait, buffer.producer(), device);
  buffer.pjrt().await();
}

// The same for somebody who reads the contents.
BufferRef contents_of(Storage& storage) {
  BufferRef buffer = buffer_of(storage);
  materialise(*buffer);
  return buffer;
}

// The corner of a tensor of bytes, [sizes…, itemsize].
at::Tensor corner(at::Tensor bytes, c10::IntArrayRef dims) {
  for (size_t d = 0; d < dims.size(); ++d) {
    bytes = bytes.narrow(static_cast<int64_t>(d), 0, dims[d]);
  }
  return bytes;
}

Dims with_bytes(c10::IntArrayRef dims, c10::ScalarType dtype) {
  Dims out(dims.begin(), dims.end());
  out.push_back(static_cast<int64_t>(c10::elementSize(dtype)));
  return out;
}

// The base's elements, row-major. Waits. Throws pjrt::Error.
void read_base(const Buffer& buffer, const Storage& storage, void* dst, size_t nbytes) {
  if (C10_LIKELY(buffer.padded().empty())) {
    buffer.pjrt().to_host(dst, nbytes);
    return;
  }
  const Dims shape = with_bytes(buffer_dims(storage.dims, buffer.padded()), storage.dtype);
  const at::Tensor all = at::empty(shape, at::kByte);
  buffer.pjrt().to_host(all.mutable_data_ptr(), all.nbytes());
  at::from_blob(dst, with_bytes(storage.dims, storage.dtype), at::kByte)
      .copy_(corner(all, storage.dims));
}

void copy_on_device(const at::Tensor& self, const at::Tensor& src);

void copy_to_device(const at::Tensor& self, const at::Tensor& src) {
  if (self.numel() == 0) return;
  const c10::OptionalDeviceGuard guard(self.device());
  at::Tensor host = src.to(self.scalar_type()).resolve_conj().resolve_neg();
  Dims order;
  if (is_whole(self, order)) {
    host = host.expand(self.sizes()).permute(order).contiguous();
    Storage& storage = storage_of(self);
    install(storage, upload(host, host.sizes(), storage.device), self.scalar_type(), host.sizes());
    return;
  }
  host = host.contiguous();
  Storage& storage = storage_of(self);
  const at::Tensor staged =
      make_tensor(storage.device, host.scalar_type(), host.sizes(), host.strides(), host.sizes(),
                  upload(host, host.sizes(), storage.device));
  copy_on_device(self, staged);
}

// A tensor with the same elements that is all of its storage.
at::Tensor whole(const at::Tensor& src, Dims& order) {
  if (is_whole(src, order) && storage_of(src).dtype == src.scalar_type()) return src;
  at::Tensor copy = src.clone(at::MemoryFormat::Contiguous);
  is_whole(copy, order);
  return copy;
}

void copy_to_host(const at::Tensor& self, const at::Tensor& src) {
  Runtime& runtime = Runtime::get();
  runtime.client();  // refuses in a forked child
  const int device = static_cast<int>(src.device().index());
  if (self.numel() == 0) return;
  Dims order;
  const at::Tensor dense = whole(src, order);
  const BufferRef buffer = contents_of(storage_of(dense));
  const bool direct = self.sizes() == dense.sizes() && self.strides() == dense.strides() &&
                      self.scalar_type() == dense.scalar_type() && !self.is_conj() &&
                      !self.is_neg();
  at::Tensor host = self;
  if (!direct) {
    host = at::empty_strided(dense.sizes(), dense.strides(),
                             self.options().dtype(dense.scalar_type()).pinned_memory(false));
  }
  try {
    observe_wait(*buffer, device);
    const activity::Timer timer(activity::Kind::kToHost, "copy to the host", device,
                                static_cast<int64_t>(host.nbytes()));
    read_base(*buffer, storage_of(dense), host.mutable_data_ptr(), host.nbytes());
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, buffer->producer());
  }
  runtime.raise_pending_checks(device);
  counters().bytes_to_host.fetch_add(static_cast<int64_t>(dense.nbytes()),
                                     std::memory_order_relaxed);
  if (!direct) self.copy_(host);
}

void copy_across(const at::Tensor& self, const at::Tensor& src) {
  Runtime& runtime = Runtime::get();
  if (self.numel() == 0) return;
  Dims order;
  at::Tensor dense;
  {
    const c10::OptionalDeviceGuard guard(src.device());
    dense = whole(src, order);
  }
  const c10::OptionalDeviceGuard guard(self.device());
  const BufferRef from = contents_of(storage_of(dense));
  const int target = static_cast<int>(self.device().index());
  BufferRef moved;
  const activity::Timer timer(activity::Kind::kAcross, "copy between devices", target,
                              static_cast<int64_t>(dense.nbytes()));
  try {
    moved = std::make_shared<Buffer>(from->pjrt().copy_to_device(runtime.device(target)), target,
                                     from->nbytes(), "copy between devices", from->padded());
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, "copy between devices");
  }
  const Storage& base = storage_of(dense);
  Dims own_order;
  if (self.scalar_type() == dense.scalar_type() && self.sizes() == dense.sizes() &&
      self.strides() == dense.strides() && is_whole(self, own_order)) {
    install(storage_of(self), std::move(moved), base.dtype, base.dims);
    return;
  }
  const at::Tensor staged = make_tensor(target, dense.scalar_type(), dense.sizes(), dense.strides(),
                                        base.dims, std::move(moved));
  copy_on_device(self, staged);
}

OpState& copy_op() {
  static OpState& op =
      OpState::of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  return op;
}

// Buffers are values: a copy of everything, unchanged, is the same buffer.
bool share_buffer(const at::Tensor& self, const at::Tensor& src) {
  if (self.scalar_type() != src.scalar_type() || self.sizes() != src.sizes() ||
      self.strides() != src.strides()) {
    return false;
  }
  Dims order;
  if (!is_whole(self, order) || !is_whole(src, order)) return false;
  Storage& from = storage_of(src);
  // A base of another dtype (a dtype view) is better converted now than by every later reader.
  if (&from == &storage_of(self) || from.raw_bytes || from.dtype != src.scalar_type()) return false;
  BufferRef buffer = buffer_of(from);
  install(storage_of(self), std::move(buffer), from.dtype, from.dims);
  return true;
}

void copy_on_device(const at::Tensor& self, const at::Tensor& src) {
  if (share_buffer(self, src)) return;
  torch::jit::Stack stack;
  torch::jit::push(stack, self, src, false);
  run_boxed(copy_op(), &stack);
}

// Conjugation and negation are bits of a tensor that PyTorch leaves to copies to carry out.
void copy_any(const at::Tensor& self, const at::Tensor& src) {
  const activity::Scope scope;
  if (C10_UNLIKELY(self.is_conj())) return copy_any(self._conj(), src.conj());
  if (C10_UNLIKELY(self.is_neg())) return copy_any(self._neg_view(), at::neg(src));
  if (C10_UNLIKELY(src.is_conj())) return copy_any(self, at::conj_physical(src._conj()));
  if (C10_UNLIKELY(src.is_neg())) return copy_any(self, at::neg(src._neg_view()));
  if (on_tpu(self) && on_tpu(src)) {
    if (self.device() == src.device()) {
      copy_on_device(self, src);
    } else {
      copy_across(self, src);
    }
  } else if (on_tpu(self)) {
    TORCH_CHECK(src.is_cpu(), "copy_: cannot copy from ", src.device(), " to ", self.device());
    copy_to_device(self, src);
  } else {
    TORCH_CHECK(self.is_cpu(), "copy_: cannot copy from ", src.device(), " to ", self.device());
    copy_to_host(self, src);
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool /*non_blocking*/) {
  if (self.unsafeGetTensorImpl() == src.unsafeGetTensorImpl()) return self;
  if (self.sizes() != src.sizes()) {
    const auto shape = at::infer_size(self.sizes(), src.sizes());
    TORCH_CHECK(self.sizes() == c10::IntArrayRef(shape), "output with shape ", self.sizes(),
                " doesn't match the broadcast shape ", shape);
    copy_any(self, src.expand(self.sizes()));
    return self;
  }
  copy_any(self, src);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool /*non_blocking*/) {
  copy_any(dst, self.expand(dst.sizes()));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  copy_any(dst, self);
  return dst;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const activity::Scope scope;
  Runtime& runtime = Runtime::get();
  runtime.client();  // refuses in a forked child
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(),
              " elements cannot be converted to Scalar");
  const c10::OptionalDeviceGuard guard(self.device());
  Dims order;
  const at::Tensor one = whole(self, order);
  const BufferRef buffer = contents_of(storage_of(one));
  const Storage& base = storage_of(one);
  alignas(16) char bytes[16] = {};
  const int device = buffer->device();
  try {
    observe_wait(*buffer, device);
    const activity::Timer timer(activity::Kind::kToHost, "item", device,
                                static_cast<int64_t>(buffer->nbytes()));
    read_base(*buffer, base, bytes, sizeof bytes);
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, buffer->producer());
  }
  counters().bytes_to_host.fetch_add(static_cast<int64_t>(buffer->nbytes()),
                                     std::memory_order_relaxed);
  runtime.raise_pending_checks(device);
  const auto value = at::from_blob(bytes, {}, at::TensorOptions().dtype(self.scalar_type()));
  return value.item();
}

at::Tensor clone(const at::Tensor& self, std::optional<c10::MemoryFormat> memory_format) {
  at::Tensor out =
      at::empty_like(self, self.options(), memory_format.value_or(c10::MemoryFormat::Preserve));
  if (self.numel() > 0) copy_any(out, self);
  return out;
}

}  // namespace

void pad_storage(Storage& storage, c10::IntArrayRef padded, uint8_t fill) {
  const BufferRef old = contents_of(storage);
  const Dims shape = with_bytes(buffer_dims(storage.dims, padded), storage.dtype);
  const at::Tensor host = at::full(shape, fill, at::kByte);
  const at::Tensor exact = at::empty(with_bytes(storage.dims, storage.dtype), at::kByte);
  Runtime& runtime = Runtime::get();
  BufferRef longer;
  const activity::Timer timer(activity::Kind::kToDevice, "padding to a bound", storage.device,
                              static_cast<int64_t>(host.nbytes()));
  try {
    read_base(*old, storage, exact.mutable_data_ptr(), exact.nbytes());
    corner(host, storage.dims).copy_(exact);
    longer = std::make_shared<Buffer>(
        runtime.client().from_host(host.const_data_ptr(), to_pjrt(storage.dtype), shape.data(),
                                   shape.size() - 1, runtime.device(storage.device)),
        storage.device, host.nbytes(), "padding to a bound", Dims(padded.begin(), padded.end()));
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, "padding to a bound");
  }
  counters().repads.fetch_add(1, std::memory_order_relaxed);
  BufferRef replaced;  // destroyed after the lock is gone
  const LaunchLock lock(runtime.state(storage.device));
  replaced = storage.set_buffer(std::move(longer));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("clone", &clone);
}

}  // namespace torch_tpu
