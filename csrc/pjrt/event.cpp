#include "event.h"

#include <memory>

namespace torch_tpu::pjrt {

bool Event::ready() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Event_IsReady_Args, args);
  args.event = raw_;
  api_->check(api_->raw()->PJRT_Event_IsReady(&args));
  return args.is_ready;
}

void Event::await() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Event_Await_Args, args);
  args.event = raw_;
  api_->check(api_->raw()->PJRT_Event_Await(&args));
}

std::optional<Error> Event::error() const {
  TORCH_TPU_PJRT_ARGS(PJRT_Event_Error_Args, args);
  args.event = raw_;
  PJRT_Error* error = api_->raw()->PJRT_Event_Error(&args);
  if (error == nullptr) return std::nullopt;
  return api_->to_error(error);
}

namespace {

struct Pending {
  const Api* api;
  std::function<void(const Error*)> callback;
};

// noexcept: an exception cannot cross the C frames of the plug-in.
void run_pending(PJRT_Error* raw_error, void* user_arg) noexcept {
  const std::unique_ptr<Pending> pending(static_cast<Pending*>(user_arg));
  if (raw_error == nullptr) {
    pending->callback(nullptr);
  } else {
    const Error error = pending->api->to_error(raw_error);
    pending->callback(&error);
  }
}

}  // namespace

void Event::on_ready(std::function<void(const Error*)> callback) const {
  auto pending = std::make_unique<Pending>(Pending{api_, std::move(callback)});
  TORCH_TPU_PJRT_ARGS(PJRT_Event_OnReady_Args, args);
  args.event = raw_;
  args.callback = run_pending;
  args.user_arg = pending.get();
  api_->check(api_->raw()->PJRT_Event_OnReady(&args));
  static_cast<void>(pending.release());  // run_pending owns it, and may be through with it by now
}

void Event::destroy() noexcept {
  TORCH_TPU_PJRT_ARGS(PJRT_Event_Destroy_Args, args);
  args.event = raw_;
  if (PJRT_Error* error = api_->raw()->PJRT_Event_Destroy(&args)) api_->discard(error);
}

}  // namespace torch_tpu::pjrt
