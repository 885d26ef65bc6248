"""PEFT 0.21: the device that adapters are loaded to when none is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

__all__ = ["HOOKS"]


def _other(module: ModuleType) -> None:
    original = module.infer_device

    @functools.wraps(original)
    def infer_device() -> str:
        device = original()
        return "tpu" if device == "cpu" and torch.tpu.is_available() else device

    module.infer_device = infer_device


HOOKS: dict[str, Callable[[ModuleType], None]] = {"peft.utils.other": _other}
