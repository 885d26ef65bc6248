#include "python/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Native core of torch_tpu.";
  torch_tpu::bind_device(m);
  torch_tpu::bind_dispatch(m);
  torch_tpu::bind_activity(m);
  torch_tpu::bind_compiled(m);
  torch_tpu::bind_topology(m);
}
