#pragma once

// Storage: what a tensor of this device stands on.
//
// A c10::StorageImpl of device `tpu` carries a DataPtr whose context is a `Storage`: a shared,
// immutable PJRT buffer plus its logical row-major shape and dtype (the *base*), or no buffer at
// all while the contents are undefined (`empty` allocates nothing). Tensors are ordinary
// at::Tensors with sizes, strides and offset over that base; programs read and write through these
// views.
//
// Buffers are values: writing replaces the storage's buffer. Two storages may share one buffer (a
// clone costs nothing); it is donated to a program only by its last holder.
//
// The data pointer is a token: unique, non-null, 512-byte aligned, never dereferenced.

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <string>

#include "core/runtime.h"

namespace torch_tpu {

using Dims = c10::SmallVector<int64_t, 6>;

// A PJRT buffer that is counted in its device's memory statistics while it lives; or, in Fused
// mode, what a recorded program will compute.
class Buffer {
 public:
  // `producer`: a string that lives forever, named in the error of a failed program.
  // `padded`: see Storage.
  Buffer(pjrt::Buffer buffer, int device, size_t nbytes, const char* producer, Dims padded = {});
  // Pending until fill() or fail().
  Buffer(int device, size_t nbytes, const char* producer, Dims padded = {});
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool ready() const noexcept { return state_.load(std::memory_order_acquire) == State::kReady; }
  bool pending() const noexcept {
    return state_.load(std::memory_order_acquire) == State::kPending;
  }
  void fill(pjrt::Buffer buffer);
  // The program that should have made it could not be run.
  void fail(const std::string& message);
  void raise_if_failed() const;

  // The rest is for buffers that are ready (dispatch/trace.h, materialise).
  PJRT_Buffer* raw() const noexcept { return buffer_.raw(); }
  const pjrt::Buffer& pjrt() const noexcept { return buffer_; }
  int device() const noexcept { return device_; }
  size_t nbytes() const noexcept { return nbytes_; }
  const char* producer() const noexcept { return producer_; }
  const Dims& padded() const noexcept { return padded_; }
  uint64_t address() const noexcept { return address_; }  // see memory_history.h
  // In the device's list of buffers; under DeviceState::live.
  const Buffer* next() const noexcept { return next_; }
  // Waits; raises the failure of the program that should have written it.
  void await() const;
  // Takes the memory out of the statistics: the program it was donated to owns it now.
  void donated() noexcept;

  // Its number in the recording it takes part in (dispatch/trace.h). With the launch mutex held.
  uint64_t recording = 0;
  uint32_t number = 0;

 private:
  friend class Runtime;
  enum class State : uint8_t { kReady, kPending, kFailed };
  void enlist();

  pjrt::Buffer buffer_;
  int device_;
  std::atomic<State> state_;
  size_t nbytes_;
  const char* producer_;
  Dims padded_;
  std::string failure_;
  uint64_t address_;
  Buffer* previous_ = nullptr;
  Buffer* next_ = nullptr;
};
using BufferRef = std::shared_ptr<Buffer>;

struct Storage {
  int device = 0;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  Dims dims;         // the base's logical shape; prod(dims) * itemsize == nbytes of the StorageImpl
  BufferRef buffer;  // null: contents undefined
  // Where the buffer is longer than the base (a bounded program made it): its sizes in those dims,
  // 0 in all others. The base is its first corner. Empty: the buffer is just the base.
  Dims padded;
  int64_t numel = 0;
  uintptr_t token = 0;
  Storage* previous = nullptr;  // in the list of all storages
  Storage* next = nullptr;
  bool raw_bytes =
      false;  // made without a dtype (UntypedStorage, torch.load): adopts its first user's

  void set_base(c10::ScalarType type, c10::IntArrayRef shape);
  // Returns the buffer it replaces.
  BufferRef set_buffer(BufferRef contents);
};

// The shape of a buffer over a base of shape `dims`.
Dims buffer_dims(c10::IntArrayRef dims, c10::IntArrayRef padded);

c10::Allocator* tpu_allocator();

// The deleter of our DataPtrs, by which they are known.
void delete_storage(void* context);
// The Storage whose token a DataPtr of somebody else carries: at::from_blob(storage.data_ptr()), as
// pickling does. It must outlive the borrower. Throws c10::Error if there is none.
Storage& borrowed_storage(const c10::StorageImpl& impl);

// The Storage under a tensor of this device.
inline Storage& storage_of(c10::StorageImpl& impl) {
  const c10::DataPtr& data = impl._mutable_data_ptr_no_checks();
  if (C10_UNLIKELY(data.get_deleter() != &delete_storage)) return borrowed_storage(impl);
  return *static_cast<Storage*>(data.get_context());
}
inline Storage& storage_of(const at::TensorBase& tensor) {
  return storage_of(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}
// Whether the tensor has a Storage of ours (a meta or lazy storage has none).
bool has_storage_of_ours(const at::TensorBase& tensor);

// A tensor with its own storage; contents undefined unless `buffer` is given.
at::TensorBase make_tensor(int device, c10::ScalarType dtype, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides, c10::IntArrayRef base_dims,
                           BufferRef buffer = nullptr);
at::TensorBase empty_strided(int device, c10::ScalarType dtype, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides);

// The order of dims from the largest stride to the smallest, and whether sizes/strides tile a block
// without gaps or overlap.
bool dense_order(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                 c10::SmallVectorImpl<int64_t>& order);

// Changes the size in bytes; contents up to the smaller size are kept. Zero frees the buffer.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

}  // namespace torch_tpu
