#pragma once

// Random state: a seed and an offset on the host. An op that draws numbers takes the pair as an
// operand of its program and moves the offset on by one, so the same seed gives the same numbers in
// every eager mode and a restored state replays them.

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

namespace torch_tpu {

struct RngState {
  int64_t seed = 0;
  int64_t offset = 0;
};

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val);

  // The kind of device this generator is for, as at::check_generator asks.
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(uint64_t seed) override;  // and offset 0
  uint64_t current_seed() const override;
  uint64_t seed() override;  // a seed nobody can foretell
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;

  // 16 bytes on the host: seed and offset, each a little-endian 64-bit integer, as CUDA has them.
  // set_state also takes the first 8 alone (offset 0).
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // A generator that shares this one's state, and taking over another's.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;

  // The state before the call; the offset moves on by `count`. Safe from any thread.
  RngState next(int64_t count = 1);

 private:
  struct State {
    std::mutex mutex;
    uint64_t seed = 0;
    uint64_t offset = 0;
  };

  GeneratorImpl(c10::DeviceIndex device, std::shared_ptr<State> state);
  GeneratorImpl* clone_impl() const override;

  std::shared_ptr<State> state_;
};

// The default generator of a device, made at first use; valid for the life of the process. Until
// somebody seeds it, its seed is the one of the CPU's default generator, so that a seed set before
// this library was imported counts. Does not touch the device.
const at::Generator& default_generator(c10::DeviceIndex device);

// Seeds the default generators of all devices, present and future. Does not touch the device.
void manual_seed_all(uint64_t seed);

// The state an op on `device` draws from: that of `generator`, or of the device's default generator
// if there is none; it moves on by `count`. Throws c10::Error if `generator` belongs to another
// kind of device.
RngState next_state(const std::optional<at::Generator>& generator, int device, int64_t count = 1);

}  // namespace torch_tpu
