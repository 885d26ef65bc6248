#include "dispatch/op_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <unordered_set>

namespace torch_tpu {

const char* intern(const std::string& text) {
  static auto* mutex = new std::mutex();
  static auto* texts = new std::unordered_set<std::string>();
  const std::lock_guard<std::mutex> lock(*mutex);
  return texts->insert(text).first->c_str();
}

Counters& counters() {
  static auto* instance = new Counters();
  return *instance;
}

namespace {

bool is_tensor_type(const c10::TypePtr& type) { return type->kind() == c10::TypeKind::TensorType; }

c10::TypePtr without_optional(c10::TypePtr type) {
  if (const auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
  return type;
}

ArgKind kind_of(const c10::Argument& arg) {
  static const std::unordered_set<std::string> placement = {"device", "layout", "pin_memory",
                                                            "non_blocking"};
  const c10::TypePtr type = without_optional(arg.type());
  if (is_tensor_type(type)) return ArgKind::kTensor;
  if (const auto list = type->cast<c10::ListType>()) {
    const c10::TypePtr element = without_optional(list->getElementType());
    if (is_tensor_type(element)) return ArgKind::kTensorList;
    return ArgKind::kStatic;
  }
  if (type->kind() == c10::TypeKind::GeneratorType) return ArgKind::kGenerator;
  if (placement.count(arg.name()) != 0) return ArgKind::kPlacement;
  return ArgKind::kStatic;
}

std::string full_name(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

}  // namespace

OpState::OpState(c10::OperatorHandle op) : handle(op), name(intern(full_name(op))) {
  const auto& arguments = schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    kinds.push_back(kind_of(arguments[i]));
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && i < 64) written |= uint64_t{1} << i;
  }
  const std::string& base = handle.operator_name().name;
  moves_cpu_tensors = base.find("index") != std::string::npos;
}

void OpState::set_operands(const std::vector<std::string>& operands) {
  const auto& arguments = schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (kinds[i] != ArgKind::kStatic) continue;
    if (std::find(operands.begin(), operands.end(), arguments[i].name()) == operands.end())
      continue;
    const bool list = without_optional(arguments[i].type())->cast<c10::ListType>() != nullptr;
    kinds[i] = list ? ArgKind::kScalarList : ArgKind::kScalar;
  }
}

size_t OpState::hash(c10::ArrayRef<uint64_t> key) {
  uint64_t h = 0x9E3779B97F4A7C15ULL ^ key.size();
  for (const uint64_t word : key) {
    h = (h ^ word) * 0xBF58476D1CE4E5B9ULL;
    h ^= h >> 29;
  }
  return h;
}

namespace {

// An executable holds a dozen memory maps, and Linux grants a process 65,530.
constexpr size_t kMaxPrograms = 3072;
std::atomic<size_t> num_programs{0};
std::atomic<uint64_t> clock_tick{0};  // moves on with every insertion

size_t max_programs() {
  static const size_t bound = [] {
    const char* text = std::getenv("TORCH_TPU_MAX_PROGRAMS");
    const long value = text == nullptr ? 0 : std::strtol(text, nullptr, 10);
    return value > 0 ? static_cast<size_t>(value) : kMaxPrograms;
  }();
  return bound;
}

}  // namespace

ProgramRef OpState::find(c10::ArrayRef<uint64_t> key) const {
  const size_t h = hash(key);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [begin, end] = slots_.equal_range(h);
  for (auto it = begin; it != end; ++it) {
    if (c10::ArrayRef<uint64_t>(it->second.key) == key) {
      it->second.last_use = clock_tick.load(std::memory_order_relaxed);
      return it->second.program;
    }
  }
  return nullptr;
}

void OpState::insert(c10::ArrayRef<uint64_t> key, ProgramRef program) {
  const size_t h = hash(key);
  const uint64_t now = clock_tick.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [begin, end] = slots_.equal_range(h);
    for (auto it = begin; it != end; ++it) {
      if (c10::ArrayRef<uint64_t>(it->second.key) == key) {
        it->second.program = std::move(program);
        return;
      }
    }
    slots_.emplace(h, Slot{key.vec(), std::move(program), now});
  }
  if (num_programs.fetch_add(1, std::memory_order_relaxed) + 1 > max_programs()) bound_programs();
}

size_t OpState::evict_older_than(uint64_t tick) {
  std::vector<ProgramRef> evicted;  // destroyed after the lock is gone
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = slots_.begin(); it != slots_.end();) {
    if (it->second.last_use < tick) {
      evicted.push_back(std::move(it->second.program));
      it = slots_.erase(it);
    } else {
      ++it;
    }
  }
  return evicted.size();
}

// Drops the half that was used least recently. A program that is running is held by its caller.
void OpState::bound_programs() {
  static auto* mutex = new std::mutex();
  const std::lock_guard<std::mutex> once(*mutex);
  if (num_programs.load(std::memory_order_relaxed) <= max_programs()) return;
  const std::vector<OpState*> ops = all();
  std::vector<uint64_t> ticks;
  for (const OpState* op : ops) {
    const std::lock_guard<std::mutex> lock(op->mutex_);
    for (const auto& [h, slot] : op->slots_) ticks.push_back(slot.last_use);
  }
  if (ticks.empty()) return;
  const auto middle = ticks.begin() + static_cast<std::ptrdiff_t>(ticks.size() / 2);
  std::nth_element(ticks.begin(), middle, ticks.end());
  size_t evicted = 0;
  for (OpState* op : ops) evicted += op->evict_older_than(*middle);
  num_programs.fetch_sub(evicted, std::memory_order_relaxed);
}

bool OpState::same_operands(const Call& call) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return c10::ArrayRef<int64_t>(checked_ints_) == c10::ArrayRef<int64_t>(call.ints) &&
         c10::ArrayRef<double>(checked_floats_) == c10::ArrayRef<double>(call.floats);
}

void OpState::remember_operands(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  checked_ints_.assign(call.ints.begin(), call.ints.end());
  checked_floats_.assign(call.floats.begin(), call.floats.end());
}

void OpState::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  num_programs.fetch_sub(slots_.size(), std::memory_order_relaxed);
  slots_.clear();
}

size_t OpState::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size();
}

void OpState::raise_wrong_device(const at::Tensor& tensor, size_t arg, int device) const {
  const std::string here =
      device >= 0 ? "tpu:" + std::to_string(device) : "tpu:" + std::to_string(current_device());
  const auto& base = handle.operator_name().name;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ",
              schema().arguments()[arg].name(), " is on ", tensor.device(),
              ", different from other tensors on ", here, " (when checking argument in method ",
              "wrapper_TPU_", base.substr(base.find("::") + 2),
              "). Expected all tensors to be on the same device, but found at least two devices, ",
              here, " and ", tensor.device(), "!");
}

void OpState::raise_no_storage(const at::Tensor& tensor, size_t arg) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": argument '", schema().arguments()[arg].name(),
                              "' has no storage of the tpu device; got layout ", tensor.layout(),
                              ", keys ", tensor.key_set());
}

void OpState::retype(const at::Tensor& tensor) {
  Storage& storage = storage_of(tensor);
  storage.raw_bytes = false;
  const auto itemsize = static_cast<int64_t>(tensor.dtype().itemsize());
  if (itemsize == 0 || storage.numel % itemsize != 0) return;
  const auto dtype = tensor.scalar_type();
  Dims dims;
  Dims order;
  if (tensor.storage_offset() == 0 && tensor.numel() * itemsize == storage.numel &&
      dense_order(tensor.sizes(), tensor.strides(), order)) {
    for (const int64_t d : order) dims.push_back(tensor.size(d));
  } else {
    dims.push_back(storage.numel / itemsize);
  }
  if (storage.buffer == nullptr) {
    storage.set_base(dtype, dims);
    return;
  }
  // Convert once here rather than in every program that reads it.
  const at::Tensor bytes = make_tensor(storage.device, c10::ScalarType::Byte, {storage.numel}, {1},
                                       storage.dims, storage.buffer);
  const at::Tensor typed = bytes.view(dtype).view(dims).clone();
  Storage& result = storage_of(typed);
  storage.set_buffer(result.buffer);
  storage.set_base(dtype, result.dims);
}

namespace {

struct States {
  std::mutex mutex;
  std::unordered_map<std::string, OpState*> by_name;
};
States& states() {
  static auto* instance = new States();
  return *instance;
}

}  // namespace

OpState& OpState::of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OpState*> recent;
  const c10::FunctionSchema* schema = &op.schema();
  const auto hit = recent.find(schema);
  if (hit != recent.end()) return *hit->second;
  States& known = states();
  const std::lock_guard<std::mutex> lock(known.mutex);
  OpState*& state = known.by_name[full_name(op)];
  if (state == nullptr) state = new OpState(op);
  recent[schema] = state;
  return *state;
}

std::vector<OpState*> OpState::all() {
  States& known = states();
  const std::lock_guard<std::mutex> lock(known.mutex);
  std::vector<OpState*> out;
  for (const auto& [name, state] : known.by_name) out.push_back(state);
  return out;
}

}  // namespace torch_tpu
