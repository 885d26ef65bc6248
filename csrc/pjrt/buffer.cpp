#include "buffer.h"

#include <cstring>
#include <string>
#include <vector>

#include "device.h"

namespace torch_tpu::pjrt {

size_t element_size(PJRT_Buffer_Type type) noexcept {
  switch (type) {
    case PJRT_Buffer_Type_PRED:
    case PJRT_Buffer_Type_S8:
    case PJRT_Buffer_Type_U8:
    case PJRT_Buffer_Type_F8E5M2:
    case PJRT_Buffer_Type_F8E4M3FN:
    case PJRT_Buffer_Type_F8E4M3B11FNUZ:
    case PJRT_Buffer_Type_F8E5M2FNUZ:
    case PJRT_Buffer_Type_F8E4M3FNUZ:
    case PJRT_Buffer_Type_F8E4M3:
    case PJRT_Buffer_Type_F8E3M4:
    case PJRT_Buffer_Type_F8E8M0FNU:
      return 1;
    case PJRT_Buffer_Type_S16:
    case PJRT_Buffer_Type_U16:
    case PJRT_Buffer_Type_F16:
    case PJRT_Buffer_Type_BF16:
      return 2;
    case PJRT_Buffer_Type_S32:
    case PJRT_Buffer_Type_U32:
    case PJRT_Buffer_Type_F32:
      return 4;
    case PJRT_Buffer_Type_S64:
    case PJRT_Buffer_Type_U64:
    case PJRT_Buffer_Type_F64:
    case PJRT_Buffer_Type_C64:
      return 8;
    case PJRT_Buffer_Type_C128:
      return 16;
    default:
      return 0;
  }
}

PJRT_Buffer_Type Buffer::type() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ElementType_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_ElementType(&args));
  return args.type;
}

DimsRef Buffer::dims() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Dimensions_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_Dimensions(&args));
  return {args.dims, args.num_dims};
}

DimsRef Buffer::unpadded_dims() const {
  const auto unpadded =
      api_->require(&PJRT_Api::PJRT_Buffer_UnpaddedDimensions, "PJRT_Buffer_UnpaddedDimensions");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_UnpaddedDimensions_Args, args);
  args.buffer = raw_;
  api_->check(unpadded(&args));
  return {args.unpadded_dims, args.num_dims};
}

size_t Buffer::on_device_size() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_OnDeviceSizeInBytes_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_OnDeviceSizeInBytes(&args));
  return args.on_device_size_in_bytes;
}

PJRT_Device* Buffer::device() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Device_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_Device(&args));
  return args.device;
}

bool Buffer::is_on_cpu() const {
  if (!api_->has(&PJRT_Api::PJRT_Buffer_IsOnCpu)) return false;
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IsOnCpu_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_IsOnCpu(&args));
  return args.is_on_cpu;
}

bool Buffer::is_deleted() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IsDeleted_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_IsDeleted(&args));
  return args.is_deleted;
}

Event Buffer::ready_event() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ReadyEvent_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_ReadyEvent(&args));
  return Event(*api_, args.event);
}

namespace {

// The dense row-major layout of `rank` dimensions, as the C API spells it.
class RowMajor {
 public:
  explicit RowMajor(size_t rank) {
    int64_t* order = inline_;
    if (rank > kInline) {
      heap_.resize(rank);
      order = heap_.data();
    }
    for (size_t i = 0; i < rank; ++i) order[i] = static_cast<int64_t>(rank - 1 - i);
    layout_.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
    layout_.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
    layout_.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
    layout_.tiled.minor_to_major = order;
    layout_.tiled.minor_to_major_size = rank;
  }
  RowMajor(const RowMajor&) = delete;
  RowMajor& operator=(const RowMajor&) = delete;

  PJRT_Buffer_MemoryLayout* get() { return &layout_; }

 private:
  static constexpr size_t kInline = 16;
  int64_t inline_[kInline];
  std::vector<int64_t> heap_;
  PJRT_Buffer_MemoryLayout layout_{};
};

// Whether the elements lie in row-major order, without tiles.
bool is_row_major(const Buffer& buffer) {
  const Api& api = *buffer.api();
  const auto get_layout =
      api.require(&PJRT_Api::PJRT_Buffer_GetMemoryLayout, "PJRT_Buffer_GetMemoryLayout");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_GetMemoryLayout_Args, args);
  args.buffer = buffer.raw();
  api.check(get_layout(&args));
  if (args.layout.type != PJRT_Buffer_MemoryLayout_Type_Tiled) return false;
  const PJRT_Buffer_MemoryLayout_Tiled& tiled = args.layout.tiled;
  if (tiled.num_tiles != 0) return false;
  const size_t rank = tiled.minor_to_major_size;
  for (size_t i = 0; i < rank; ++i) {
    if (tiled.minor_to_major[i] != static_cast<int64_t>(rank - 1 - i)) return false;
  }
  return true;
}

// Bytes of the valid elements alone, in a dense order; 0 if they have no whole bytes.
size_t dense_size(const Buffer& buffer) {
  size_t bytes = element_size(buffer.type());
  for (const int64_t dim : buffer.unpadded_dims()) bytes *= static_cast<size_t>(dim);
  return bytes;
}

}  // namespace

size_t Buffer::host_size() const {
  RowMajor layout(dims().size);
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ToHostBuffer_Args, args);
  args.src = raw_;
  args.host_layout = layout.get();
  api_->check(api_->raw()->PJRT_Buffer_ToHostBuffer(&args));
  return args.dst_size;
}

Event Buffer::to_host_async(void* dst, size_t size) const {
  if (is_on_cpu() && !is_row_major(*this)) {
    throw Error(PJRT_Error_Code_UNIMPLEMENTED,
                "to_host: the buffer lies in host memory in an order other than row-major");
  }
  RowMajor layout(dims().size);
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_ToHostBuffer_Args, args);
  args.src = raw_;
  args.host_layout = layout.get();
  args.dst = dst;
  args.dst_size = size;
  api_->check(api_->raw()->PJRT_Buffer_ToHostBuffer(&args));
  return Event(*api_, args.event);
}

void Buffer::to_host(void* dst, size_t size) const {
  const size_t bytes = is_on_cpu() ? dense_size(*this) : 0;
  // A bounded-dynamic buffer is larger: it has padding, and perhaps its sizes behind the elements.
  if (bytes == 0 || bytes != on_device_size() || !is_row_major(*this)) {
    to_host_async(dst, size).await();
    return;
  }
  if (size < bytes) {
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT, "to_host: the destination has " +
                                                      std::to_string(size) + " bytes; expected " +
                                                      std::to_string(bytes));
  }
  await();
  std::memcpy(dst, unsafe_pointer(), bytes);
}

Event Buffer::raw_to_host_async(void* dst, int64_t offset, int64_t size) const {
  const auto copy =
      api_->require(&PJRT_Api::PJRT_Buffer_CopyRawToHost, "PJRT_Buffer_CopyRawToHost");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_CopyRawToHost_Args, args);
  args.buffer = raw_;
  args.dst = dst;
  args.offset = offset;
  args.transfer_size = size;
  api_->check(copy(&args));
  return Event(*api_, args.event);
}

Buffer Buffer::copy_to_device(const Device& device) const {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_CopyToDevice_Args, args);
  args.buffer = raw_;
  args.dst_device = device.raw();
  api_->check(api_->raw()->PJRT_Buffer_CopyToDevice(&args));
  return Buffer(*api_, args.dst_buffer);
}

void Buffer::erase() {
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_Delete_Args, args);
  args.buffer = raw_;
  api_->check(api_->raw()->PJRT_Buffer_Delete(&args));
}

const void* Buffer::unsafe_pointer() const {
  const auto pointer =
      api_->require(&PJRT_Api::PJRT_Buffer_UnsafePointer, "PJRT_Buffer_UnsafePointer");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_UnsafePointer_Args, args);
  args.buffer = raw_;
  api_->check(pointer(&args));
  return reinterpret_cast<const void*>(args.buffer_pointer);
}

void Buffer::increase_external_reference() {
  const auto increase = api_->require(&PJRT_Api::PJRT_Buffer_IncreaseExternalReferenceCount,
                                      "PJRT_Buffer_IncreaseExternalReferenceCount");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_IncreaseExternalReferenceCount_Args, args);
  args.buffer = raw_;
  api_->check(increase(&args));
}

void Buffer::decrease_external_reference() {
  const auto decrease = api_->require(&PJRT_Api::PJRT_Buffer_DecreaseExternalReferenceCount,
                                      "PJRT_Buffer_DecreaseExternalReferenceCount");
  TORCH_TPU_PJRT_ARGS(PJRT_Buffer_DecreaseExternalReferenceCount_Args, args);
  args.buffer = raw_;
  api_->check(decrease(&args));
}

}  // namespace torch_tpu::pjrt
