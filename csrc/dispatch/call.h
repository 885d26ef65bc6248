#pragma once

// One ATen call, taken apart: what identifies its program (the key) and what is fed to it.
//
// In the key: dtypes, base shapes, view geometry, static attributes. Operands, never in the key:
// numbers, storage offsets and slice starts, RNG state. They travel in two small packed buffers,
// one of int64 and one of float64.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "core/storage.h"

namespace torch_tpu {

enum class ArgKind : uint8_t {
  kTensor,      // Tensor or Tensor?
  kTensorList,  // Tensor[] or Tensor?[]
  kScalar,      // a number that travels as an operand (unless it equals the schema's default)
  kScalarList,  // Scalar[] / float[] as operands
  kGenerator,   // supplies the random state
  kPlacement,   // device, layout, pin_memory, non_blocking: not part of a program
  kStatic,      // anything else: hashed into the key by value
};

// How a tensor lies in its base.
enum class View : uint8_t {
  kWhole = 0,    // same shape, same dtype, row-major
  kReshape = 1,  // row-major and all of the base, another shape
  kRegular = 2,  // nested strides: slices, steps, transposes, broadcasts; starts are operands
  kGather = 3,   // any other strides; the offset is an operand
  kEmpty = 4,    // no elements
  kScalar = 5,   // a 0-d CPU tensor; its value is an operand
};

struct TensorRef {
  const at::Tensor* tensor = nullptr;
  Storage* storage = nullptr;  // null for a CPU scalar
  int storage_index = -1;
  View view = View::kWhole;
  int first_operand = 0;  // into ints (starts) or, for a CPU scalar, into ints/floats
  int num_operands = 0;
};

struct OpState;

struct Call {
  c10::SmallVector<uint64_t, 96> key;
  c10::SmallVector<TensorRef, 8> tensors;
  c10::SmallVector<Storage*, 8> storages;
  c10::SmallVector<int64_t, 16> ints;
  c10::SmallVector<double, 8> floats;
  // Tensors made while parsing: CPU indices moved over, conjugations carried out.
  c10::SmallVector<std::unique_ptr<at::Tensor>, 2> held;
  std::optional<at::Generator> generator;
  int device = -1;

  void clear();
  // Takes `args` apart. Throws PyTorch's errors for operands on different devices.
  void parse(const OpState& op, c10::ArrayRef<c10::IValue> args);
  // One operand: a tensor with a storage of ours on this call's device, its conjugation and
  // negation carried out; a number; something that is part of the key. The tensor has to outlive
  // the call.
  void add_device_tensor(const at::Tensor& tensor);
  void add_cpu_scalar(const at::Tensor& tensor);
  void add_scalar(const c10::IValue& value);
  void add_static(const c10::IValue& value);

 private:
  void add_tensor(const OpState& op, const at::Tensor& tensor, size_t arg);
  size_t storage_index(Storage& storage);
  void add_view(TensorRef& ref, const c10::TensorImpl& impl, const Storage& storage);

  // Places of `storages` by address, once there are too many to look through: open addressing,
  // -1 is free.
  c10::SmallVector<int32_t, 8> places_;
};

// The starts of a view with nested strides; false if the strides are not of that kind.
// The same walk stands in torch_tpu/lowering/views.py.
bool regular_starts(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                    int64_t base_numel, c10::SmallVectorImpl<int64_t>& starts);

}  // namespace torch_tpu
