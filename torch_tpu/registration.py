"""Makes PyTorch know the device ``tpu``. Everything PyTorch offers a backend for that, in order.

Nothing of PyTorch is replaced: CPU and CUDA users of the same process see no change.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from torch_tpu import backends, tpu
from torch_tpu.import_hooks import after_import

__all__ = ["register"]

_registered = False


def register() -> None:
    """Registers the device. Calling it again does nothing.

    Raises RuntimeError if another backend has taken PyTorch's one slot for such devices.
    """
    global _registered
    if _registered:
        return
    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", tpu)
    _alias_submodules()
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    torch.backends.tpu = backends
    sys.modules["torch.backends.tpu"] = backends
    # PyTorch keeps this per thread and starts every thread at float16.
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    tpu.modes.read_environment()
    after_import("torch._dynamo.device_interface", lambda _: _install_interface())
    after_import("torch._dynamo.backends.registry", lambda _: _install_compiler())
    after_import("torch._subclasses.fake_impls", lambda _: _install_fake_rules())
    after_import("torch._dynamo.trace_rules", _install_trace_rules)
    after_import("torch._decomp.decompositions", lambda _: _keep_ops())
    after_import("torch.nn.attention.flex_attention", _admit_to_flex_attention)
    _registered = True


def _alias_submodules() -> None:
    """``import torch.tpu.memory`` must give the module that exists, not load it a second time."""
    names = (
        "compiler",
        "devices",
        "memory",
        "modes",
        "numerics",
        "optimizers",
        "profiler",
        "random",
        "streams",
    )
    for name in names:
        sys.modules[f"torch.tpu.{name}"] = getattr(tpu, name)


def _install_interface() -> None:
    from torch_tpu.dynamo import device_interface

    device_interface.install()


def _install_fake_rules() -> None:
    from torch_tpu.dynamo import fake_rules

    fake_rules.install()


def _admit_to_flex_attention(module: ModuleType) -> None:
    """flex_attention has a list of devices that backends cannot add to; others stay as they are."""
    check = module._validate_device

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            check(query, key, value)

    module._validate_device = validate_device


def _install_compiler() -> None:
    from torch_tpu.dynamo import backend

    backend.install()


def _keep_ops() -> None:
    from torch_tpu.dynamo import decompositions

    decompositions.install()


def _install_trace_rules(rules: ModuleType) -> None:
    from torch_tpu.dynamo import trace_rules

    trace_rules.install(rules)
