#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "api.h"

namespace torch_tpu::pjrt {

// Completion of asynchronous work. Destroying an event neither waits for the work nor cancels it.
class Event {
 public:
  Event() noexcept = default;
  // Takes ownership of `raw`.
  Event(const Api& api, PJRT_Event* raw) noexcept : api_(&api), raw_(raw) {}
  Event(Event&& other) noexcept : api_(other.api_), raw_(std::exchange(other.raw_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(raw_, other.raw_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (raw_ != nullptr) destroy();
  }

  explicit operator bool() const noexcept { return raw_ != nullptr; }
  PJRT_Event* raw() const noexcept { return raw_; }

  // Whether the work is over, be it with an error.
  bool ready() const;
  // Blocks until the work is over; throws the Error it ended with. Release the GIL first.
  void await() const;
  // The Error a finished event carries, if any. Requires ready().
  std::optional<Error> error() const;
  // Calls `callback` once, with the Error the work ended with or null: at once on this thread if
  // ready(), else on a thread of the plug-in, which it must not block. It must not throw. The event
  // may be destroyed meanwhile.
  void on_ready(std::function<void(const Error*)> callback) const;

 private:
  void destroy() noexcept;

  const Api* api_ = nullptr;
  PJRT_Event* raw_ = nullptr;
};

}  // namespace torch_tpu::pjrt
