#include "core/storage.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "core/errors.h"
#include "core/memory_history.h"

namespace torch_tpu {

namespace {

// torch.profiler's profile_memory.
void report_to_profiler(const Buffer& buffer, int64_t size) {
  if (C10_LIKELY(!c10::memoryProfilingEnabled())) return;
  const auto total = static_cast<size_t>(Runtime::get().state(buffer.device()).allocated.load());
  c10::reportMemoryUsageToProfiler(
      reinterpret_cast<void*>(buffer.address()), size, total, total,
      c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(buffer.device())));
}

}  // namespace

Buffer::Buffer(pjrt::Buffer buffer, int device, size_t nbytes, const char* producer, Dims padded)
    : buffer_(std::move(buffer)),
      device_(device),
      state_(State::kReady),
      nbytes_(nbytes),
      producer_(producer),
      padded_(std::move(padded)),
      address_(memory_history::next_address(nbytes)) {
  enlist();
}

Buffer::Buffer(int device, size_t nbytes, const char* producer, Dims padded)
    : device_(device),
      state_(State::kPending),
      nbytes_(nbytes),
      producer_(producer),
      padded_(std::move(padded)),
      address_(memory_history::next_address(nbytes)) {}

void Buffer::enlist() {
  DeviceState& state = Runtime::get().state(device_);
  const auto size = static_cast<int64_t>(nbytes_);
  const int64_t now = state.allocated.fetch_add(size, std::memory_order_relaxed) + size;
  int64_t peak = state.peak.load(std::memory_order_relaxed);
  while (now > peak && !state.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  state.requested_total.fetch_add(size, std::memory_order_relaxed);
  state.num_allocs.fetch_add(1, std::memory_order_relaxed);
  state.live_buffers.fetch_add(1, std::memory_order_relaxed);
  memory_history::allocated(device_, address_, nbytes_, producer_);
  report_to_profiler(*this, size);
  const std::lock_guard<std::mutex> lock(state.live);
  next_ = state.live_head;
  if (next_ != nullptr) next_->previous_ = this;
  state.live_head = this;
}

void Buffer::fill(pjrt::Buffer buffer) {
  buffer_ = std::move(buffer);
  enlist();
  state_.store(State::kReady, std::memory_order_release);
}

void Buffer::fail(const std::string& message) {
  failure_ = message;
  state_.store(State::kFailed, std::memory_order_release);
}

void Buffer::raise_if_failed() const {
  TORCH_CHECK(state_.load(std::memory_order_acquire) != State::kFailed, producer_,
              ": its program could not be run: ", failure_);
}

void Buffer::donated() noexcept {
  if (nbytes_ == 0) return;
  DeviceState& state = Runtime::get().state(device_);
  const auto size = static_cast<int64_t>(nbytes_);
  state.allocated.fetch_sub(size, std::memory_order_relaxed);
  state.freed_total.fetch_add(size, std::memory_order_relaxed);
  memory_history::freed(device_, address_, nbytes_, producer_);
  report_to_profiler(*this, -size);
  nbytes_ = 0;
}

Buffer::~Buffer() {
  if (!ready()) return;
  Runtime& runtime = Runtime::get();
  if (runtime.in_bad_fork()) {
    buffer_.release();  // the client's threads do not exist in this process
    return;
  }
  donated();
  DeviceState& state = runtime.state(device_);
  state.num_frees.fetch_add(1, std::memory_order_relaxed);
  state.live_buffers.fetch_sub(1, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(state.live);
  (previous_ != nullptr ? previous_->next_ : state.live_head) = next_;
  if (next_ != nullptr) next_->previous_ = previous_;
}

void Buffer::await() const {
  try {
    buffer_.await();
  } catch (const pjrt::Error& error) {
    raise_execution_error(error, producer_);
  }
}

void Storage::set_base(c10::ScalarType type, c10::IntArrayRef shape) {
  dtype = type;
  dims.assign(shape.begin(), shape.end());
  numel = c10::multiply_integers(shape);
}

BufferRef Storage::set_buffer(BufferRef contents) {
  if (contents != nullptr) {
    padded = contents->padded();
  } else {
    padded.clear();
  }
  return std::exchange(buffer, std::move(contents));
}

Dims buffer_dims(c10::IntArrayRef dims, c10::IntArrayRef padded) {
  Dims out(dims.begin(), dims.end());
  for (size_t d = 0; d < padded.size(); ++d) {
    if (padded[d] != 0) out[d] = padded[d];
  }
  return out;
}

namespace {

// Addresses nobody can own, so that a stray dereference faults at once.
std::atomic<uintptr_t> next_token{uintptr_t{1} << 56};

void* new_token(size_t nbytes) {
  const size_t span = ((std::max<size_t>(nbytes, 1) + 511) / 512) * 512;
  return reinterpret_cast<void*>(next_token.fetch_add(span, std::memory_order_relaxed));
}

// All storages, to find one by its token.
struct StorageList {
  std::mutex mutex;
  Storage* head = nullptr;

  static StorageList& get() {
    static auto* list = new StorageList();  // tensors may outlive static destructors
    return *list;
  }
  Storage* find(uintptr_t token) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (Storage* s = head; s != nullptr; s = s->next) {
      if (s->token == token) return s;
    }
    return nullptr;
  }
};

Storage* find_borrowed(const c10::StorageImpl& impl) {
  return StorageList::get().find(reinterpret_cast<uintptr_t>(impl.data()));
}

c10::DataPtr make_data_ptr(std::unique_ptr<Storage> storage, size_t nbytes) {
  const c10::Device device(c10::DeviceType::PrivateUse1,
                           static_cast<c10::DeviceIndex>(storage->device));
  void* token = new_token(nbytes);
  Storage* raw = storage.release();
  raw->token = reinterpret_cast<uintptr_t>(token);
  StorageList& list = StorageList::get();
  {
    const std::lock_guard<std::mutex> lock(list.mutex);
    raw->next = list.head;
    if (raw->next != nullptr) raw->next->previous = raw;
    list.head = raw;
  }
  return {token, raw, &delete_storage, device};
}

}  // namespace

void delete_storage(void* context) {
  auto* storage = static_cast<Storage*>(context);
  if (!Runtime::get().in_bad_fork()) {  // there its holder may be gone
    StorageList& list = StorageList::get();
    const std::lock_guard<std::mutex> lock(list.mutex);
    (storage->previous != nullptr ? storage->previous->next : list.head) = storage->next;
    if (storage->next != nullptr) storage->next->previous = storage->previous;
  }
  delete storage;
}

Storage& borrowed_storage(const c10::StorageImpl& impl) {
  Storage* storage = find_borrowed(impl);
  TORCH_CHECK(storage != nullptr,
              "tpu: the tensor stands on memory that is not the tpu device's; copy it with .to()");
  return *storage;
}

struct TpuAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Runtime::get().client();
    auto storage = std::make_unique<Storage>();
    storage->device = current_device();
    storage->set_base(c10::ScalarType::Byte, {static_cast<int64_t>(nbytes)});
    storage->raw_bytes = true;
    return make_data_ptr(std::move(storage), nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* /*dest*/, const void* /*src*/, std::size_t /*count*/) const override {
    TORCH_CHECK(false, "tpu: storages have no addressable memory to copy");
  }
};

namespace {
TpuAllocator allocator;
}  // namespace

c10::Allocator* tpu_allocator() { return &allocator; }

bool has_storage_of_ours(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return false;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!storage || storage.device_type() != c10::DeviceType::PrivateUse1) return false;
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  return impl._mutable_data_ptr_no_checks().get_deleter() == &delete_storage ||
         find_borrowed(impl) != nullptr;
}

at::TensorBase make_tensor(int device, c10::ScalarType dtype, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides, c10::IntArrayRef base_dims, BufferRef buffer) {
  auto storage = std::make_unique<Storage>();
  storage->device = device;
  storage->set_base(dtype, base_dims);
  storage->set_buffer(std::move(buffer));
  const size_t nbytes = static_cast<size_t>(storage->numel) * c10::elementSize(dtype);
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                    make_data_ptr(std::move(storage), nbytes),
                                                    &allocator, /*resizable=*/true);
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(std::move(impl)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(dtype));
  if (sizes.size() != 1 || sizes[0] != 0) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  }
  return tensor;
}

bool dense_order(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                 c10::SmallVectorImpl<int64_t>& order) {
  order.resize(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const bool unit_a = sizes[a] == 1;
    const bool unit_b = sizes[b] == 1;
    if (unit_a || unit_b) return false;  // where a dim of size 1 stands does not matter
    return strides[a] > strides[b];
  });
  int64_t expected = 1;
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    if (sizes[*it] == 1) continue;
    if (strides[*it] != expected) return false;
    expected *= sizes[*it];
  }
  return true;
}

at::TensorBase empty_strided(int device, c10::ScalarType dtype, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides) {
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape");
  Dims order;
  Dims base;
  int64_t extent = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(sizes[i] >= 0, "Trying to create tensor with negative dimension ", sizes[i], ": ",
                sizes);
    TORCH_CHECK(strides[i] >= 0, "negative strides are not supported; got ", strides);
    extent = sizes[i] == 0 ? 0 : extent == 0 ? 0 : extent + (sizes[i] - 1) * strides[i];
  }
  if (extent > 0 && dense_order(sizes, strides, order)) {
    for (const int64_t d : order) base.push_back(sizes[d]);
  } else {
    base.push_back(extent);
  }
  to_pjrt(dtype);  // refuse an unsupported dtype here, not at first use
  return make_tensor(device, dtype, sizes, strides, base);
}

void resize_storage(c10::StorageImpl* impl, size_t nbytes) {
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  Storage& storage = storage_of(*impl);
  const size_t old = impl->nbytes();
  if (old == nbytes) return;
  const auto itemsize = static_cast<size_t>(c10::elementSize(storage.dtype));
  if (nbytes == 0 || storage.buffer == nullptr) {
    storage.set_buffer(nullptr);
    if (nbytes % itemsize == 0) {
      storage.set_base(storage.dtype, {static_cast<int64_t>(nbytes / itemsize)});
    } else {
      storage.set_base(c10::ScalarType::Byte, {static_cast<int64_t>(nbytes)});
    }
    impl->set_nbytes(nbytes);
    return;
  }
  // Copy what is kept through a program over a flat view of the old base.
  const bool whole_items = nbytes % itemsize == 0;
  const auto dtype = whole_items ? storage.dtype : c10::ScalarType::Byte;
  const auto unit = static_cast<size_t>(c10::elementSize(dtype));
  const auto count = static_cast<int64_t>(nbytes / unit);
  const auto before = static_cast<int64_t>(old / unit);
  const c10::OptionalDeviceGuard guard(
      c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(storage.device)));
  at::Tensor flat = make_tensor(storage.device, storage.dtype, {storage.numel}, {1}, storage.dims,
                                storage.buffer);
  if (!whole_items) flat = flat.view(c10::ScalarType::Byte);
  const at::Tensor grown = count > before ? at::constant_pad_nd(flat, {0, count - before}, 0)
                                          : flat.narrow(0, 0, count).clone();
  Storage& result = storage_of(grown);
  storage.set_buffer(std::move(result.buffer));
  storage.set_base(result.dtype, result.dims);
  impl->set_nbytes(nbytes);
}

}  // namespace torch_tpu
