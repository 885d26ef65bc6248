#include "core/generator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <limits>

namespace torch_tpu {

namespace {

c10::Device tpu_device(c10::DeviceIndex index) { return {c10::DeviceType::PrivateUse1, index}; }

constexpr size_t kWord = sizeof(uint64_t);

}  // namespace

GeneratorImpl::GeneratorImpl(c10::DeviceIndex device, uint64_t seed)
    : GeneratorImpl(device, std::make_shared<State>()) {
  state_->seed = seed;
}

GeneratorImpl::GeneratorImpl(c10::DeviceIndex device, std::shared_ptr<State> state)
    : c10::GeneratorImpl(tpu_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

void GeneratorImpl::set_current_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->seed = seed;
  state_->offset = 0;
}

uint64_t GeneratorImpl::current_seed() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->seed;
}

uint64_t GeneratorImpl::seed() {
  const uint64_t random = c10::detail::getNonDeterministicRandom(/*is_cuda=*/true);
  set_current_seed(random);
  return random;
}

void GeneratorImpl::set_offset(uint64_t offset) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->offset = offset;
}

uint64_t GeneratorImpl::get_offset() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->offset;
}

c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  at::Tensor tensor = at::detail::empty_cpu({2 * kWord}, at::kByte);
  auto* bytes = tensor.mutable_data_ptr<uint8_t>();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::memcpy(bytes, &state_->seed, kWord);
  std::memcpy(bytes + kWord, &state_->offset, kWord);
  return tensor.getIntrusivePtr();
}

void GeneratorImpl::set_state(const c10::TensorImpl& new_state) {
  at::detail::check_rng_state(new_state);
  const auto size = static_cast<size_t>(new_state.numel());
  TORCH_CHECK(size == 2 * kWord || size == kWord, "RNG state is wrong size; got ", size,
              " bytes; expected ", 2 * kWord);
  const auto* bytes = static_cast<const uint8_t*>(new_state.data());
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::memcpy(&state_->seed, bytes, kWord);
  state_->offset = 0;
  if (size == 2 * kWord) std::memcpy(&state_->offset, bytes + kWord, kWord);
}

c10::intrusive_ptr<c10::GeneratorImpl> GeneratorImpl::graphsafe_get_state() const {
  return c10::intrusive_ptr<GeneratorImpl>::unsafe_steal_from_new(
      new GeneratorImpl(device().index(), state_));
}

void GeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  auto* impl = dynamic_cast<GeneratorImpl*>(other.get());
  TORCH_CHECK(impl != nullptr, "graphsafe_set_state: expected a generator of device tpu; got ",
              other ? other->device().str() : "none");
  state_ = impl->state_;
}

RngState GeneratorImpl::next(int64_t count) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const RngState before{static_cast<int64_t>(state_->seed), static_cast<int64_t>(state_->offset)};
  state_->offset += static_cast<uint64_t>(count);
  return before;
}

GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto copy = std::make_shared<State>();
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    copy->seed = state_->seed;
    copy->offset = state_->offset;
  }
  return new GeneratorImpl(device().index(), std::move(copy));
}

namespace {

struct DefaultGenerators {
  std::mutex mutex;
  std::optional<uint64_t> seed;  // of generators not made yet
  std::array<at::Generator, std::numeric_limits<c10::DeviceIndex>::max()> all;

  static DefaultGenerators& get() {
    static auto* generators = new DefaultGenerators();  // outlives every user
    return *generators;
  }
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  DefaultGenerators& generators = DefaultGenerators::get();
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < generators.all.size(),
              "tpu: invalid device ordinal ", static_cast<int>(device));
  at::Generator& generator = generators.all[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(generators.mutex);
  if (!generator.defined()) {
    const uint64_t seed =
        generators.seed.value_or(at::detail::getDefaultCPUGenerator().current_seed());
    generator = at::make_generator<GeneratorImpl>(device, seed);
  }
  return generator;
}

void manual_seed_all(uint64_t seed) {
  DefaultGenerators& generators = DefaultGenerators::get();
  const std::lock_guard<std::mutex> lock(generators.mutex);
  generators.seed = seed;
  for (at::Generator& generator : generators.all) {
    if (generator.defined()) generator.set_current_seed(seed);
  }
}

RngState next_state(const std::optional<at::Generator>& generator, int device, int64_t count) {
  if (!generator.has_value() || !generator->defined()) {
    const at::Generator& own = default_generator(static_cast<c10::DeviceIndex>(device));
    return own.get<GeneratorImpl>()->next(count);
  }
  return at::check_generator<GeneratorImpl>(generator)->next(count);
}

}  // namespace torch_tpu
