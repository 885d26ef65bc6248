"""Sizes that change: one program for many of them (see docs/dynamic-shapes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_tpu import _C
from torch_tpu.program import options

__all__ = ["mark_dynamic", "set_dynamic_shapes"]


@contextmanager
def set_dynamic_shapes(enabled: bool) -> Iterator[None]:
    """Context manager: whether ops that meet many sizes get programs for all of them.

    Holds for the process; ``torch.tpu.dynamic_shapes`` is the same as a property.
    """
    before = options.exchange_dynamic_shapes(bool(enabled))
    try:
        yield
    finally:
        options.exchange_dynamic_shapes(before)


def mark_dynamic(
    tensor: torch.Tensor,
    dims: int | Sequence[int],
    *,
    min: int | None = None,
    max: int | None = None,
) -> torch.Tensor:
    """Say that sizes of a tensor change from call to call; returns the tensor.

    Eager ops on it are compiled once for all sizes up to ``max`` (default: the next power of two),
    and so is what they lead to; ``torch.compile`` traces the dims as ``torch._dynamo.mark_dynamic``
    asks. The tensor's memory grows to the bound.

    Args:
        tensor: on a tpu device, without gaps. Sizes of 0 and 1 stay as they are.
        dims: the dim or dims, negative ones counted from the end.
        min, max: limits of the size, for all ``dims``.

    Raises:
        IndexError: a dim that the tensor does not have.
        ValueError: a size outside of the limits; a tensor on another device or with gaps.
    """
    wanted = [dims] if isinstance(dims, int) else list(dims)
    for d in wanted:
        if not -tensor.dim() <= d < tensor.dim():
            raise IndexError(
                f"mark_dynamic: Dimension out of range (expected to be in range of "
                f"[{-tensor.dim()}, {tensor.dim() - 1}], but got {d})"
            )
    wanted = [d % tensor.dim() for d in wanted]
    if tensor.device.type != "tpu":
        raise ValueError(f"mark_dynamic: expected a tensor on a tpu device; got {tensor.device}")
    for d in wanted:
        n = tensor.shape[d]
        if (min is not None and n < min) or (max is not None and n > max):
            raise ValueError(
                f"mark_dynamic: dim {d} has size {n}; expected {min if min is not None else 0} to "
                f"{max if max is not None else 'any'}"
            )
    from torch._dynamo import mark_dynamic as trace_dynamic

    for d in wanted:
        trace_dynamic(tensor, d, min=min, max=max)
    _pad(tensor, wanted, max)
    return tensor


def _pad(tensor: torch.Tensor, dims: Sequence[int], limit: int | None) -> None:
    from torch_tpu.program.bounded.policy import bucket
    from torch_tpu.program.emitter import stride_order

    if not options.dynamic_shapes() or tensor.numel() == 0:
        return
    base, padded = _C.storage_base(tensor)
    order = stride_order(tensor.shape, tensor.stride())
    if order is None or [tensor.shape[d] for d in order] != base:
        raise ValueError(
            "mark_dynamic: expected a tensor that is all of its memory, without gaps; got sizes "
            f"{tuple(tensor.shape)}, strides {tensor.stride()} in a base of {tuple(base)}"
        )
    sizes = list(padded) or [0] * len(base)
    for place, d in enumerate(order):
        n = tensor.shape[d]
        if d in dims and n >= 2 and not sizes[place]:
            sizes[place] = bucket(n) if limit is None else limit
    if sizes != (list(padded) or [0] * len(base)):
        _C.pad_storage(tensor, sizes)
