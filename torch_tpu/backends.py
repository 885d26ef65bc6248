"""``torch.backends.tpu``: present once ``torch_tpu`` is imported, whatever the hardware."""

from __future__ import annotations

from torch_tpu import _C

__all__ = ["is_available", "is_built"]


def is_built() -> bool:
    """True: the backend is installed."""
    return True


def is_available() -> bool:
    """Whether there is a device to use."""
    return _C.device_count() > 0
