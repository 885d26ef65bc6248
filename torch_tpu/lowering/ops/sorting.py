"""Sorting and order statistics: sort, topk, kthvalue, median, mode."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.scans import prefix
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim, tensor_type

_LOW31 = 0x7FFFFFFF


def order_key(b: OpBuilder, x: Value) -> Value:
    """An i64 in 33 bits that orders as PyTorch sorts: NaN largest, both zeros equal.

    For dtypes of at most 32 bits.
    """
    if not x.is_float:
        return b.convert(x, torch.int64)
    bits = b.bitcast(b.convert(x, torch.float32), torch.int32)
    key = b.xor(bits, b.and_(b.shift_right_arithmetic(bits, 31), _LOW31))
    key = b.select(b.eq(bits, -(2**31)), 0, key)
    return b.convert(b.select(b.is_nan(x), _LOW31, key), torch.int64)


def _value_of_key(b: OpBuilder, key: Value, dtype: torch.dtype) -> Value:
    if not dtype.is_floating_point:
        return b.convert(key, dtype)
    key = b.convert(key, torch.int32)
    bits = b.xor(key, b.and_(b.shift_right_arithmetic(key, 31), _LOW31))
    return b.convert(b.bitcast(bits, torch.float32), dtype)


def _sort_packed(b: OpBuilder, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Sort with value and position in one i64: XLA:CPU sorts a single operand by a plain
    comparison several times faster than two operands.

    Layout: order key (above bit 32), position (bits 1 to 31), sign of a zero (bit 0), which the
    order must not see.
    """
    key = order_key(b, x)
    if descending:
        key = b.not_(key)
    packed = b.or_(b.shift_left(key, 32), b.shift_left(b.iota(x.shape, dim), 1))
    if x.is_float:
        negative_zero = b.eq(b.bitcast(b.convert(x, torch.float32), torch.int32), -(2**31))
        packed = b.or_(packed, b.convert(negative_zero, torch.int64))
    (packed,) = b.sort([packed], dim, lambda a, c: b.lt(a, c), stable=False)
    where = b.and_(b.shift_right_logical(packed, 1), _LOW31)
    key = b.shift_right_arithmetic(packed, 32)
    value = _value_of_key(b, b.not_(key) if descending else key, x.dtype)
    if x.is_float:
        value = b.select(b.ne(b.and_(packed, 1), 0), b.neg(value), value)
    return value, where


def _sort_pairs(b: OpBuilder, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Sort with value and position as two operands, for any real dtype."""
    narrow = torch.int32 if x.shape[dim] < 2**31 else torch.int64
    position = b.iota(x.shape, dim, narrow)
    value, where = b.sort([x, position], dim, lambda a, c, *_: b.total_less(a, c, descending))
    return value, b.convert(where, torch.int64)


def sort_with_positions(
    b: OpBuilder, x: Value, dim: int, descending: bool = False
) -> tuple[Value, Value]:
    """Stable sort along ``dim``: the values and where they were (i64)."""
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    if x.is_bool:
        value, where = sort_with_positions(b, b.convert(x, torch.uint8), dim, descending)
        return b.convert(value, torch.bool), where
    if x.shape[dim] < 2**31 and x.dtype.itemsize <= 4 and x.dtype is not torch.uint32:
        return _sort_packed(b, x, dim, descending)
    if x.dtype is not torch.int64 or x.numel < 2**10 or x.shape[dim] >= 2**31:
        return _sort_pairs(b, x, dim, descending)
    # Most integers are small: look, and take the fast way when all fit in 32 bits.
    every = range(x.rank)
    low, high = b.reduce(x, "min", every), b.reduce(x, "max", every)
    value, where = b.if_(
        b.and_(b.ge(low, -(2**31)), b.lt(high, 2**31)),
        lambda: _sort_packed(b, x, dim, descending),
        lambda: _sort_pairs(b, x, dim, descending),
        [(x.shape, torch.int64), (x.shape, torch.int64)],
    )
    return value, where


@lower("aten.sort.default", "aten.sort.stable")
def sort(
    b: OpBuilder, x: Value, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Value, Value]:
    return sort_with_positions(b, x, canonical_dim(dim, x.rank), descending)


def _top_k_exact(dtype: torch.dtype) -> bool:
    """Whether float32 holds every value of ``dtype``."""
    return dtype is torch.float32 or dtype.itemsize <= 2


def _top_k(b: OpBuilder, x: Value, k: int, largest: bool) -> tuple[Value, Value]:
    """``chlo.top_k`` over the last dim of float32; its order is total: -NaN < -inf, inf < NaN."""
    nan = b.constant(math.nan, torch.float32)
    key = b.select(b.is_nan(x), b.abs(nan) if largest else b.neg(b.abs(nan)), x)
    if not largest:
        key = b.select(b.is_nan(x), key, b.neg(x))
    shape = (*x.shape[:-1], k)
    out = f"{tensor_type(shape, torch.float32)}, {tensor_type(shape, torch.int32)}"
    specs = [(shape, torch.float32), (shape, torch.int32)]
    value, where = b.emit_many(f"chlo.top_k({key.name}, k = {k}) : {key.type} -> ({out})", specs)
    return (value if largest else b.neg(value)), b.convert(where, torch.int64)


@lower("aten.topk")
def topk(
    b: OpBuilder, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    dim = canonical_dim(dim, x.rank)
    if _top_k_exact(x.dtype) and k * 16 <= x.shape[dim]:
        last = b.convert(b.move_dim(x, dim, -1), torch.float32)
        value, where = _top_k(b, last, k, largest)
        return b.convert(b.move_dim(value, -1, dim), x.dtype), b.move_dim(where, -1, dim)
    value, where = sort_with_positions(b, x, dim, descending=largest)
    return b.slice_dim(value, dim, 0, k), b.slice_dim(where, dim, 0, k)


def _pick(b: OpBuilder, x: Value, dim: int, rank: Value) -> Value:
    """``x`` at position ``rank`` (dim of size 1) along ``dim``, reshaped to the result."""
    return b.reshape(b.take_along(x, dim, rank), b.out_shape)


@lower("aten.kthvalue")
def kthvalue(
    b: OpBuilder, x: Value, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    dim = canonical_dim(dim, x.rank)
    value, where = sort_with_positions(b, x, dim)
    return (
        b.reshape(b.slice_dim(value, dim, k - 1, k), b.out_shape),
        b.reshape(b.slice_dim(where, dim, k - 1, k), b.out_shape),
    )


def _median(b: OpBuilder, x: Value, dim: int, ignore_nan: bool) -> tuple[Value, Value]:
    """The lower median; a NaN wins unless NaNs are ignored."""
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    n = x.shape[dim]
    value, where = sort_with_positions(b, x, dim)
    if not x.is_float:
        middle = (n - 1) // 2
        return (
            b.reshape(b.slice_dim(value, dim, middle, middle + 1), b.out_shape),
            b.reshape(b.slice_dim(where, dim, middle, middle + 1), b.out_shape),
        )
    nans = b.reduce(b.convert(b.is_nan(x), torch.int64), "add", [dim], keepdim=True)
    numbers = b.sub(n, nans)
    if ignore_nan:
        rank = b.maximum(b.shift_right_arithmetic(b.sub(numbers, 1), 1), 0)
    else:
        rank = b.select(b.gt(nans, 0), numbers, (n - 1) // 2)
    return _pick(b, value, dim, rank), _pick(b, where, dim, rank)


@lower("aten.median.dim")
def median_dim(b: OpBuilder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _median(b, x, canonical_dim(dim, x.rank), ignore_nan=False)


@lower("aten.nanmedian.dim")
def nanmedian_dim(b: OpBuilder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _median(b, x, canonical_dim(dim, x.rank), ignore_nan=True)


def _median_all(b: OpBuilder, x: Value, ignore_nan: bool) -> Value:
    if x.numel == 0:
        return b.constant(math.nan if x.is_float else torch.iinfo(x.dtype).min, x.dtype)
    return _median(b, b.reshape(x, (x.numel,)), 0, ignore_nan)[0]


@lower("aten.median.default")
def median(b: OpBuilder, x: Value) -> Value:
    return _median_all(b, x, ignore_nan=False)


@lower("aten.nanmedian.default")
def nanmedian(b: OpBuilder, x: Value) -> Value:
    return _median_all(b, x, ignore_nan=True)


@lower("aten.mode")
def mode(b: OpBuilder, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """The most frequent value (the smallest on ties) and its last position."""
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    dim = canonical_dim(dim, x.rank)
    n = x.shape[dim]
    value, where = sort_with_positions(b, x, dim)
    position = b.iota(x.shape, dim, torch.int32)
    changes = b.ne(b.slice_dim(value, dim, 1, n), b.slice_dim(value, dim, 0, n - 1))
    starts = b.pad_dim(changes, dim, True, 1, 0)
    run = b.sub(position, prefix(b, b.select(starts, position, 0), "max", dim))
    # The first place where the longest run is complete ends the smallest such value's run.
    longest = b.reduce(run, "max", [dim], keepdim=True)
    end = b.reduce(b.select(b.eq(run, longest), position, n), "min", [dim], keepdim=True)
    rank = b.convert(end, torch.int64)
    return _pick(b, value, dim, rank), _pick(b, where, dim, rank)
