"""Element-wise gather and scatter along one dim."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import (
    Scatter,
    address_along,
    checked_index,
    gather_along,
    scatter_flat,
)
from torch_tpu.lowering.ops.indexing import reduce_into
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, canonical_dim


@lower("aten.gather.default", lift_0d=True)
def gather(b: OpBuilder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    dim = canonical_dim(dim, x.rank)
    return gather_along(b, x, dim, checked_index(b, index, x.shape[dim]))


def _address(b: OpBuilder, x: Value, dim: int, index: Value) -> Value:
    dim = canonical_dim(dim, x.rank)
    return address_along(b, x.shape, dim, checked_index(b, index, x.shape[dim]))


def _source(b: OpBuilder, x: Value, index: Value, src: Operand) -> Value:
    """``src`` cut to the shape of ``index``; a number is spread over it."""
    if not isinstance(src, Value) or src.weak:
        return b.full(index.shape, src, x.dtype)
    return b.slice(src, [0] * src.rank, index.shape)


def _scatter(b: OpBuilder, address: Value) -> Scatter:
    return lambda x, src, kind: scatter_flat(b, x, address, src, kind)


@lower("aten.scatter.src", "aten.scatter.value", lift_0d=True)
def scatter(b: OpBuilder, x: Value, dim: int, index: Value, src: Operand) -> Value:
    if index.numel == 0:
        return x
    address = _address(b, x, dim, index)
    return scatter_flat(b, x, address, _source(b, x, index, src), "set")


@lower("aten.scatter_add.default", lift_0d=True)
def scatter_add(b: OpBuilder, x: Value, dim: int, index: Value, src: Value) -> Value:
    return scatter_reduce(b, x, dim, index, src, "sum")


@lower("aten.scatter.reduce", "aten.scatter.value_reduce", lift_0d=True)
def scatter_combine(
    b: OpBuilder, x: Value, dim: int, index: Value, src: Operand, *, reduce: str
) -> Value:
    return scatter_reduce(b, x, dim, index, src, reduce)


@lower("aten.scatter_reduce.two", lift_0d=True)
def scatter_reduce(
    b: OpBuilder,
    x: Value,
    dim: int,
    index: Value,
    src: Operand,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    if index.numel == 0:
        return x
    address = _address(b, x, dim, index)
    counts = None
    if reduce == "mean" or not include_self:
        none = b.constant(0, torch.int32, x.shape)
        ones = b.constant(1, torch.int32, index.shape)
        counts = scatter_flat(b, none, address, ones, "add")
    source = _source(b, x, index, src)
    return reduce_into(b, _scatter(b, address), x, source, counts, reduce, include_self)
