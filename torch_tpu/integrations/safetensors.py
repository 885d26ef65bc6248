"""Safetensors 0.8: files opened with ``device="tpu"``.

Safetensors checks device names in Rust. A file for this device is opened for the CPU, where its
tensors are views of the mapped file, and each tensor is copied to the device as it is asked for:
the host holds no second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch

__all__ = ["HOOKS"]


def _our_device(device: Any) -> torch.device | None:
    """The device if it is ours; a number means an accelerator, CUDA's where there is CUDA."""
    if isinstance(device, bool):
        return None
    if isinstance(device, int):
        ours = torch.tpu.is_available() and not torch.cuda.is_available()
        return torch.device("tpu", device) if ours else None
    if isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "tpu":
        return torch.device(device)
    return None


class _Slice:
    """Part of a tensor of the file, read by indexing."""

    def __init__(self, of_file: Any, device: torch.device) -> None:
        self._of_file = of_file
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._of_file[index].to(self._device)

    def __getattr__(self, name: str) -> Any:  # get_shape, get_dtype
        return getattr(self._of_file, name)


class _File:
    """An open file whose tensors are given on the device."""

    def __init__(self, opened: Any, device: torch.device) -> None:
        self._opened = opened
        self._device = device

    def __enter__(self) -> _File:
        self._opened.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self, *arguments: Any, **options: Any) -> Any:
        found = self._opened.get_tensors(*arguments, **options)
        if isinstance(found, dict):
            return {name: value.to(self._device) for name, value in found.items()}
        return [value.to(self._device) for value in found]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._opened.get_slice(name), self._device)

    def __getattr__(self, name: str) -> Any:  # keys, offset_keys, metadata
        return getattr(self._opened, name)


def _with_device(original: Any) -> Any:
    """``safe_open`` that also knows the device; for any other it is the original's."""

    class Opener(type):
        def __call__(
            cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any
        ) -> Any:
            ours = _our_device(device)
            if ours is None:
                return original(filename, framework, device, **options)
            if framework not in ("pt", "torch", "pytorch"):
                raise ValueError(f"safe_open: device {device} is PyTorch's; got {framework!r}")
            return _File(original(filename, framework, "cpu", **options), ours)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, _File))

    return Opener("safe_open", (), {"__doc__": original.__doc__, "__wrapped__": original})


def _package(module: ModuleType) -> None:
    if not hasattr(module.safe_open, "__wrapped__"):
        module.safe_open = _with_device(module.safe_open)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "safetensors": _package,
    # Bound already where the library was imported before torch_tpu.
    "safetensors.torch": _package,
}
