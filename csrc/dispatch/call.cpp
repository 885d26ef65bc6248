#include "dispatch/call.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>

#include <bit>

#include "dispatch/op_state.h"

namespace torch_tpu {

namespace {

// Tags of key words; the payload stands in the high bits.
enum Tag : uint64_t {
  kTagNone = 1,
  kTagTensor,
  kTagCpuScalar,
  kTagList,
  kTagDefault,
  kTagIntOperand,
  kTagFloatOperand,
  kTagComplexOperand,
  kTagBoolOperand,
  kTagBool,
  kTagInt,
  kTagDouble,
  kTagComplex,
  kTagString,
  kTagDevice,
};

uint64_t tag(Tag t, uint64_t payload = 0) { return t | payload << 8; }

}  // namespace

void Call::clear() {
  key.clear();
  tensors.clear();
  storages.clear();
  ints.clear();
  floats.clear();
  held.clear();
  generator.reset();
  device = -1;
  places_.clear();
}

bool regular_starts(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                    int64_t base_numel, c10::SmallVectorImpl<int64_t>& starts) {
  // Dims that move, from the largest stride to the smallest.
  Dims dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1 || strides[d] == 0) continue;
    auto at = dims.end();
    while (at != dims.begin() && strides[*(at - 1)] < strides[d]) --at;
    dims.insert(at, static_cast<int64_t>(d));
  }
  // Each dim cuts an axis of `length` elements into rows of `stride`; the last row may be partial.
  int64_t length = base_numel;
  int64_t rest = offset;
  Dims digits;
  for (const int64_t d : dims) {
    const int64_t stride = strides[d];
    if (stride > length) return false;
    const int64_t rows = (length + stride - 1) / stride;
    const int64_t digit = rest / stride;
    rest %= stride;
    if (digit + sizes[d] > rows) return false;
    if (sizes[d] < rows) starts.push_back(digit);
    digits.push_back(digit);
    length = stride;
  }
  if (rest >= length) return false;
  if (length > 1) starts.push_back(rest);
  // No row may reach beyond its axis into the next one.
  int64_t end = rest;
  for (size_t i = dims.size(); i-- > 0;) {
    end += (digits[i] + sizes[dims[i]] - 1) * strides[dims[i]];
    const int64_t axis = i == 0 ? base_numel : strides[dims[i - 1]];
    if (end >= axis) return false;
  }
  return true;
}

void Call::add_view(TensorRef& ref, const c10::TensorImpl& impl, const Storage& storage) {
  const auto sizes = impl.sizes();
  const auto strides = impl.strides();
  const bool same_dtype = impl.dtype() == c10::scalarTypeToTypeMeta(storage.dtype);
  int64_t base_numel = storage.numel;
  if (!same_dtype) {
    base_numel = base_numel * static_cast<int64_t>(c10::elementSize(storage.dtype)) /
                 static_cast<int64_t>(impl.itemsize());
  }
  ref.first_operand = static_cast<int>(ints.size());
  if (impl.numel() == 0) {
    ref.view = View::kEmpty;
  } else if (impl.storage_offset() == 0 && impl.numel() == base_numel && impl.is_contiguous()) {
    ref.view =
        same_dtype && sizes == c10::IntArrayRef(storage.dims) ? View::kWhole : View::kReshape;
  } else if (regular_starts(sizes, strides, impl.storage_offset(), base_numel, ints)) {
    ref.view = View::kRegular;
  } else {
    ints.resize(static_cast<size_t>(ref.first_operand));
    ints.push_back(impl.storage_offset());
    ref.view = View::kGather;
  }
  ref.num_operands = static_cast<int>(ints.size()) - ref.first_operand;
}

void Call::add_tensor(const OpState& op, const at::Tensor& given, size_t arg) {
  if (!given.defined()) {
    key.push_back(tag(kTagNone));
    return;
  }
  const at::Tensor* tensor = &given;
  const c10::TensorImpl* impl = tensor->unsafeGetTensorImpl();
  if (C10_UNLIKELY(impl->device_type() != c10::DeviceType::PrivateUse1)) {
    if (impl->is_cpu() && impl->dim() == 0 && !op.is_written(arg)) {
      add_cpu_scalar(*tensor);
      return;
    }
    if (impl->is_cpu() && op.moves_cpu_tensors && device >= 0) {
      held.push_back(std::make_unique<at::Tensor>(tensor->to(
          c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)))));
      tensor = held.back().get();
      impl = tensor->unsafeGetTensorImpl();
    } else if (impl->device_type() == c10::DeviceType::Meta && impl->is_python_dispatch() &&
               c10::string_view(op.name).find("_like") != c10::string_view::npos) {
      // FakeTensor runs ops without a shape function on zeros that it makes "like" itself.
      held.push_back(std::make_unique<at::Tensor>(at::empty_strided(
          tensor->sizes(), tensor->strides(),
          at::TensorOptions().dtype(tensor->dtype()).device(c10::DeviceType::PrivateUse1))));
      tensor = held.back().get();
      impl = tensor->unsafeGetTensorImpl();
    } else {
      op.raise_wrong_device(*tensor, arg, device);
    }
  }
  if (C10_UNLIKELY(impl->is_conj() || impl->is_neg())) {
    // PyTorch carries these bits out before most kernels, but not before the matmul family.
    TORCH_CHECK_NOT_IMPLEMENTED(!op.is_written(arg), op.name,
                                ": cannot write to a conjugated or negated view");
    held.push_back(std::make_unique<at::Tensor>(tensor->resolve_conj().resolve_neg()));
    tensor = held.back().get();
    impl = tensor->unsafeGetTensorImpl();
  }
  if (C10_UNLIKELY(!has_storage_of_ours(*tensor))) op.raise_no_storage(*tensor, arg);
  Storage& storage = storage_of(*tensor);
  if (C10_UNLIKELY(device >= 0 && storage.device != device)) {
    op.raise_wrong_device(*tensor, arg, device);
  }
  if (C10_UNLIKELY(storage.raw_bytes && tensor->scalar_type() != c10::ScalarType::Byte)) {
    OpState::retype(*tensor);
  }
  add_device_tensor(*tensor);
}

void Call::add_cpu_scalar(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TensorRef ref{&tensor, nullptr, -1, View::kScalar, 0, 1};
  const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  key.push_back(tag(kTagCpuScalar, static_cast<uint64_t>(dtype) << 8 | (wrapped ? 1U : 0U)));
  if (c10::isComplexType(dtype)) {
    const auto value = tensor.item().toComplexDouble();
    ref.first_operand = static_cast<int>(floats.size());
    floats.push_back(value.real());
    floats.push_back(value.imag());
  } else if (c10::isFloatingType(dtype)) {
    ref.first_operand = static_cast<int>(floats.size());
    floats.push_back(dtype == c10::kDouble ? *tensor.const_data_ptr<double>()
                                           : tensor.item().toDouble());
  } else {
    ref.first_operand = static_cast<int>(ints.size());
    ints.push_back(dtype == c10::kLong ? *tensor.const_data_ptr<int64_t>()
                                       : static_cast<int64_t>(tensor.item().toLong()));
  }
  tensors.push_back(ref);
}

size_t Call::storage_index(Storage& storage) {
  constexpr size_t kFew = 16;
  if (storages.size() <= kFew) {
    size_t index = 0;
    while (index < storages.size() && storages[index] != &storage) ++index;
    if (index == storages.size()) storages.push_back(&storage);
    return index;
  }
  const auto place_of = [this](const Storage* s) {
    const size_t mask = places_.size() - 1;
    size_t at = (reinterpret_cast<uintptr_t>(s) * 0x9E3779B97F4A7C15ULL >> 32) & mask;
    while (places_[at] >= 0 && storages[static_cast<size_t>(places_[at])] != s) {
      at = (at + 1) & mask;
    }
    return at;
  };
  if (places_.size() < 2 * (storages.size() + 1)) {
    const size_t size = std::bit_ceil(4 * (storages.size() + 1));
    places_.assign(size, -1);
    for (size_t i = 0; i < storages.size(); ++i) {
      places_[place_of(storages[i])] = static_cast<int32_t>(i);
    }
  }
  const size_t at = place_of(&storage);
  if (places_[at] < 0) {
    places_[at] = static_cast<int32_t>(storages.size());
    storages.push_back(&storage);
  }
  return static_cast<size_t>(places_[at]);
}

void Call::add_device_tensor(const at::Tensor& given) {
  const at::Tensor* tensor = &given;
  const c10::TensorImpl* impl = given.unsafeGetTensorImpl();
  Storage& storage = storage_of(given);
  device = storage.device;
  const size_t index = storage_index(storage);
  TensorRef ref{tensor, &storage, static_cast<int>(index), View::kWhole, 0, 0};
  add_view(ref, *impl, storage);
  const auto sizes = impl->sizes();
  key.push_back(tag(kTagTensor, static_cast<uint64_t>(ref.view) |
                                    static_cast<uint64_t>(sizes.size()) << 4 |
                                    static_cast<uint64_t>(tensor->scalar_type()) << 12 |
                                    static_cast<uint64_t>(storage.dtype) << 20 |
                                    static_cast<uint64_t>(index) << 28 |
                                    static_cast<uint64_t>(!storage.padded.empty()) << 55));
  for (const int64_t n : sizes) key.push_back(static_cast<uint64_t>(n));
  if (ref.view != View::kWhole) {
    if (ref.view != View::kReshape) {
      for (const int64_t n : impl->strides()) key.push_back(static_cast<uint64_t>(n));
    }
    key.push_back(storage.dims.size());
    for (const int64_t n : storage.dims) key.push_back(static_cast<uint64_t>(n));
  }
  for (const int64_t n : storage.padded) key.push_back(static_cast<uint64_t>(n));
  tensors.push_back(ref);
}

void Call::add_scalar(const c10::IValue& value) {
  if (value.isInt()) {
    key.push_back(tag(kTagIntOperand));
    ints.push_back(value.toInt());
  } else if (value.isDouble()) {
    key.push_back(tag(kTagFloatOperand));
    floats.push_back(value.toDouble());
  } else if (value.isBool()) {
    key.push_back(tag(kTagBoolOperand));
    ints.push_back(value.toBool() ? 1 : 0);
  } else if (value.isComplexDouble()) {
    key.push_back(tag(kTagComplexOperand));
    const auto number = value.toComplexDouble();
    floats.push_back(number.real());
    floats.push_back(number.imag());
  } else if (value.isNone()) {
    key.push_back(tag(kTagNone));
  } else if (value.isSymInt()) {
    key.push_back(tag(kTagIntOperand));
    ints.push_back(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else {
    TORCH_CHECK(false, "tpu: cannot pass a ", value.tagKind(), " to a program as a number");
  }
}

void Call::add_static(const c10::IValue& value) {
  if (value.isNone()) {
    key.push_back(tag(kTagNone));
  } else if (value.isBool()) {
    key.push_back(tag(kTagBool, value.toBool() ? 1 : 0));
  } else if (value.isInt()) {
    key.push_back(tag(kTagInt));
    key.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    key.push_back(tag(kTagDouble));
    key.push_back(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    key.push_back(tag(kTagComplex));
    key.push_back(std::bit_cast<uint64_t>(number.real()));
    key.push_back(std::bit_cast<uint64_t>(number.imag()));
  } else if (value.isIntList()) {
    const auto list = value.toIntVector();
    key.push_back(tag(kTagList, list.size()));
    for (const int64_t n : list) key.push_back(static_cast<uint64_t>(n));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    key.push_back(tag(kTagString, text.size()));
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      text.copy(reinterpret_cast<char*>(&word), 8, i);
      key.push_back(word);
    }
  } else if (value.isSymInt()) {
    key.push_back(tag(kTagInt));
    key.push_back(static_cast<uint64_t>(value.toSymInt().guard_int(__FILE__, __LINE__)));
  } else if (value.isDevice()) {
    key.push_back(tag(kTagDevice, static_cast<uint64_t>(value.toDevice().type())));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.push_back(tag(kTagList, list.size()) | uint64_t{1} << 63);
    for (const c10::IValue& item : list) add_static(item);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "tpu: an argument of kind ", value.tagKind(),
                                " is not supported");
  }
}

void Call::parse(const OpState& op, c10::ArrayRef<c10::IValue> args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::IValue& value = args[i];
    switch (op.kinds[i]) {
      case ArgKind::kTensor:
        if (value.isNone()) {
          key.push_back(tag(kTagNone));
        } else {
          add_tensor(op, value.toTensor(), i);
        }
        break;
      case ArgKind::kTensorList: {
        if (value.isNone()) {
          key.push_back(tag(kTagNone));
          break;
        }
        const auto list = value.toListRef();
        key.push_back(tag(kTagList, list.size()));
        static const at::Tensor undefined;
        for (const c10::IValue& item : list) {
          add_tensor(op, item.isNone() ? undefined : item.toTensor(), i);
        }
        break;
      }
      case ArgKind::kScalar: {
        const auto& fallback = op.schema().arguments()[i].default_value();
        if (fallback.has_value() && value.tagKind() == fallback->tagKind() && value == *fallback) {
          key.push_back(tag(kTagDefault));
        } else {
          add_scalar(value);
        }
        break;
      }
      case ArgKind::kScalarList: {
        if (value.isNone()) {
          key.push_back(tag(kTagNone));
          break;
        }
        if (value.isDoubleList()) {
          const auto list = value.toDoubleVector();
          key.push_back(tag(kTagList, list.size()));
          key.push_back(tag(kTagFloatOperand));
          for (const double x : list) floats.push_back(x);
          break;
        }
        const auto list = value.toListRef();
        key.push_back(tag(kTagList, list.size()));
        for (const c10::IValue& item : list) add_scalar(item);
        break;
      }
      case ArgKind::kGenerator:
        if (!value.isNone()) generator = value.toGenerator();
        break;
      case ArgKind::kPlacement:
        break;
      case ArgKind::kStatic:
        add_static(value);
        break;
    }
  }
}

}  // namespace torch_tpu
