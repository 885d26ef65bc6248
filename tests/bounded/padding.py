"""Tensors whose buffers are longer than what they hold, with hostile contents beyond."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.program.bounded import policy


def pad(tensor: torch.Tensor, which: str) -> torch.Tensor:
    """Make the buffer of a device tensor longer in its "first", "last" or "all" dims of size 2 or
    more; beyond its contents stand NaNs (-1 in integers, True in booleans)."""
    dims, padded = _C.storage_base(tensor)
    able = [d for d, n in enumerate(dims) if n >= 2]
    if padded or not able or tensor.numel() == 0:
        return tensor
    chosen = {"first": able[:1], "last": able[-1:], "all": able}[which]
    sizes = [policy.bucket(n) if d in chosen else 0 for d, n in enumerate(dims)]
    _C.pad_storage(tensor, sizes, 1 if tensor.dtype is torch.bool else 0xFF)
    return tensor


def is_bounded(tensor: Any) -> bool:
    return bool(_C.storage_base(tensor)[1])
