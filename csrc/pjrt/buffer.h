#pragma once

// Lifetime and donation
//
// * A Buffer owns one PJRT_Buffer. Destroying it returns at once, even while programs that read it
//   are running or still queued: the plug-in keeps the memory until they are done.
// * A program may *donate* an argument to an output (`tf.aliasing_output` in its text). Executing
//   it then leaves the argument's PJRT_Buffer deleted: is_deleted() is true, any further use but
//   destruction fails, and the memory lives on in the output. Naming the argument's index in
//   `non_donatable` keeps it: the plug-in copies instead. The Buffer object itself still has to be
//   destroyed.
// * So donate only a buffer that nobody else will read through PJRT. Uses issued before the
//   donating call are ordered by the plug-in.
// * Passing one buffer twice, once to a donated argument, makes execute() throw and leaves it as it
//   was: name that argument in `non_donatable`.
// * A buffer with an external reference is not donated: the plug-in copies it, or refuses.
// * A failed asynchronous program poisons its outputs: ready_event(), to_host() and every program
//   that takes them report the same error.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "api.h"
#include "event.h"

namespace torch_tpu::pjrt {

class Device;

// Sizes owned by somebody else.
struct DimsRef {
  const int64_t* data = nullptr;
  size_t size = 0;

  const int64_t* begin() const noexcept { return data; }
  const int64_t* end() const noexcept { return data + size; }
  int64_t operator[](size_t i) const noexcept { return data[i]; }
};

// Bytes an element takes in host memory; 0 for types without whole bytes (4-bit, 2-bit, token).
size_t element_size(PJRT_Buffer_Type type) noexcept;

class Buffer {
 public:
  Buffer() noexcept = default;
  // Takes ownership of `raw`, such as an output of Executable::execute.
  Buffer(const Api& api, PJRT_Buffer* raw) noexcept : api_(&api), raw_(raw) {}
  Buffer(Buffer&& other) noexcept : api_(other.api_), raw_(std::exchange(other.raw_, nullptr)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      api_ = other.api_;
      raw_ = std::exchange(other.raw_, nullptr);
    }
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { reset(); }

  explicit operator bool() const noexcept { return raw_ != nullptr; }
  PJRT_Buffer* raw() const noexcept { return raw_; }
  const Api* api() const noexcept { return api_; }
  // Gives up ownership without destroying.
  PJRT_Buffer* release() noexcept { return std::exchange(raw_, nullptr); }
  void reset() noexcept {
    if (raw_ != nullptr) destroy(*api_, std::exchange(raw_, nullptr));
  }
  static void destroy(const Api& api, PJRT_Buffer* raw) noexcept {
    TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Destroy_Args, args);
    args.buffer = raw;
    if (PJRT_Error* error = api.raw()->PJRT_Buffer_Destroy(&args)) api.discard(error);
  }

  PJRT_Buffer_Type type() const;
  // Valid as long as this buffer.
  DimsRef dims() const;
  // The sizes at run time, smaller than dims() where a dimension is bounded-dynamic.
  DimsRef unpadded_dims() const;
  // Bytes held on the device, padding included.
  size_t on_device_size() const;
  // Bytes that to_host() writes.
  size_t host_size() const;
  PJRT_Device* device() const;
  // Whether the contents lie in host memory, where unsafe_pointer() can be read.
  bool is_on_cpu() const;
  // Whether erase() or a donation has taken the contents.
  bool is_deleted() const;

  Event ready_event() const;
  // Waits for the contents to be computed; throws the Error of a failed program.
  void await() const { ready_event().await(); }

  // Copies the contents to `dst` in dense row-major order, whatever the order on the device. `size`
  // is that of `dst` in bytes, at least host_size(). Waits. Throws Error; UNIMPLEMENTED for a
  // buffer in host memory whose order is not row-major, which a program has to ask for: XLA:CPU
  // would hand it out as it lies.
  void to_host(void* dst, size_t size) const;
  // The same without waiting. `dst` must stay alive until the event is ready. On XLA:CPU this takes
  // a thread hop of 15 us or more; to_host() takes none.
  Event to_host_async(void* dst, size_t size) const;
  // Copies `size` bytes from `offset` of the device representation. Meaningful for one dimension,
  // and where the device layout is dense and row-major. Throws Error(UNIMPLEMENTED) if the plug-in
  // cannot.
  Event raw_to_host_async(void* dst, int64_t offset, int64_t size) const;

  // A copy on another device of the same client. Some plug-ins throw Error if the buffer is on
  // `device` already, others copy.
  Buffer copy_to_device(const Device& device) const;

  // Gives the memory back while keeping the handle.
  void erase();

  // The address of the contents: on a CPU plug-in a host pointer, valid once the buffer is ready
  // and until it is destroyed, deleted or donated. Throws Error(UNIMPLEMENTED) where there is none.
  const void* unsafe_pointer() const;
  // Pins the memory for a foreign reader of unsafe_pointer(), until decreased as often.
  void increase_external_reference();
  void decrease_external_reference();

 private:
  const Api* api_ = nullptr;
  PJRT_Buffer* raw_ = nullptr;
};

}  // namespace torch_tpu::pjrt
