"""Ops steered by a mask, with static result shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import cumulative_sum, gather_rows, index_dtype
from torch_tpu.lowering.ops.data_dependent import masked_select_padded, nonzero_padded
from torch_tpu.lowering.registry import lower, pointwise
from torch_tpu.lowering.types import Operand, Value, scalar_type


@pointwise("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", keep=("mask",), opmath=False)
def masked_fill(b: OpBuilder, x: Value, mask: Value, value: Operand) -> Value:
    return b.select(mask, value, x)


@lower("aten.masked_scatter.default")
def masked_scatter(b: OpBuilder, x: Value, mask: Value, source: Value) -> Value:
    """The n-th True position takes the n-th element of ``source``: a running count and a gather."""
    if not mask.is_bool:
        raise RuntimeError(
            "masked_scatter_ only supports boolean masks, but got mask with dtype "
            f"{scalar_type(mask.dtype)}"
        )
    shape = b.out_shape
    x, mask = b.broadcast_to(x, shape), b.broadcast_to(b.convert(mask, torch.bool), shape)
    flat = b.reshape(mask, (mask.numel,))
    order = cumulative_sum(b, b.convert(flat, index_dtype(flat.numel)))
    b.note_bad_index(b.gt(b.index_dim(order, 0, -1), source.numel))
    if source.numel == 0:
        return x
    place = b.clamp(b.sub(order, 1), 0, source.numel - 1)
    taken = gather_rows(b, b.reshape(source, (source.numel,)), 0, place)
    return b.select(mask, b.reshape(taken, shape), x)


@lower("aten.masked_scatter_backward.default")
def masked_scatter_backward(b: OpBuilder, grad: Value, mask: Value, sizes: Sequence[int]) -> Value:
    values, count = masked_select_padded(b, grad, mask)
    return b.reshape(_resize(b, values, count, math.prod(sizes), 0), sizes)


def _resize(b: OpBuilder, rows: Value, count: Value, size: int, fill: int) -> Value:
    """The first ``count`` rows of ``rows``, cut or filled up to ``size`` rows."""
    rows = b.slice_dim(rows, 0, 0, min(size, rows.shape[0]))
    rows = b.pad_dim(rows, 0, 0, 0, size - rows.shape[0])
    valid = b.lt(b.iota((size,), 0), count)
    return b.select(b.broadcast_in_dim(valid, rows.shape, [0]), rows, fill)


@lower("aten.nonzero_static.default")
def nonzero_static(b: OpBuilder, x: Value, *, size: int, fill_value: int = -1) -> Value:
    where, count = nonzero_padded(b, x)
    return _resize(b, where, count, size, fill_value)
