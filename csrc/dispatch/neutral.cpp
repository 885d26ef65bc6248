#include "dispatch/neutral.h"

#include <torch/library.h>

#include <memory>
#include <unordered_map>

namespace torch_tpu {

namespace {

struct NeutralKernel final : public c10::OperatorKernel {
  explicit NeutralKernel(c10::DispatchKey key) : keys_(key) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                  torch::jit::Stack* stack) {
    op.redispatchBoxed(keys_, stack);
  }

 private:
  c10::DispatchKeySet keys_;
};

// Registrations last as long as the process.
torch::Library& library(c10::DispatchKey key) {
  static auto* libraries =
      new std::unordered_map<c10::DispatchKey, std::unique_ptr<torch::Library>>();
  auto& lib = (*libraries)[key];
  if (lib == nullptr) {
    lib = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  }
  return *lib;
}

}  // namespace

void register_neutral_kernel(const std::string& name, const std::string& source,
                             const std::string& target) {
  library(c10::parseDispatchKey(target))
      .impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                              std::make_unique<NeutralKernel>(c10::parseDispatchKey(source))));
}

}  // namespace torch_tpu
