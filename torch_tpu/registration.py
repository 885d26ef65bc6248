"""Makes PyTorch know the device ``tpu``. Everything PyTorch offers a backend for that, in order.

Nothing of PyTorch is replaced: CPU and CUDA users of the same process see no change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import torch

from torch_tpu import backends, tpu

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
    _when_imported("torch._dynamo.device_interface", _install_interface)
    _when_imported("torch._dynamo.backends.registry", _install_compiler)
    _registered = True


def _alias_submodules() -> None:
    """``import torch.tpu.memory`` must give the module that exists, not load it a second time."""
    for name in ("devices", "memory", "modes", "numerics", "random", "streams"):
        sys.modules[f"torch.tpu.{name}"] = getattr(tpu, name)


def _install_interface() -> None:
    from torch_tpu.dynamo import device_interface

    device_interface.install()


def _install_compiler() -> None:
    from torch_tpu.dynamo import backend

    backend.install()


class _AfterImport(MetaPathFinder, Loader):
    """Loads one module as usual when somebody imports it, then acts. Used up by that.

    Importing Dynamo ourselves would cost every process seconds.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()


def _when_imported(name: str, action: Callable[[], None]) -> None:
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))
