"""Tensors made from numbers: fills, ranges, identities, triangles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.pointwise import exp2
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import INTEGRAL, Operand, Value

# -- constant tensors --------------------------------------------------------------------------


def _result(b: OpBuilder, value: Operand) -> Value:
    return b.full(b.out_shape, value, b.out_dtype)


@lower(
    "aten.zeros",
    "aten.zeros_like",
    "aten.zero",
    "aten.new_zeros",
    "aten.empty.memory_format",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten._efficientzerotensor",
)
def zeros(b: OpBuilder, *_: object) -> Value:
    """Uninitialised tensors are zeros too: a program has no undefined values."""
    return _result(b, 0)


@lower("prims.empty", "prims.empty_strided", "prims.empty_permuted")
def empty_prim(b: OpBuilder, *_: object, requires_grad: bool = False) -> Value:
    return _result(b, 0)


@lower("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(b: OpBuilder, *_: object) -> Value:
    return _result(b, 1)


@lower(
    "aten.full",
    "aten.full_like",
    "aten.fill",
    "aten.new_full",
    "prims.full",
    "prims.full_like",
    "prims.fill",
)
def full(b: OpBuilder, *args: Operand, requires_grad: bool = False) -> Value:
    """The last argument is the value: a number or a 0-d tensor."""
    return _result(b, args[-1])


lower("aten.scalar_tensor", "prims.scalar_tensor")(_result)

# -- ranges ------------------------------------------------------------------------------------


def _progression(b: OpBuilder, start: float, step: float) -> Value:
    """start, start + step, … of the result's length and dtype; static start and step."""
    (length,), dtype = b.out_shape, b.out_dtype
    if dtype in INTEGRAL:  # both are truncated first
        return b.add(b.mul(b.iota((length,), 0, dtype), int(step)), int(start))
    whole = all(float(v).is_integer() for v in (start, step))
    largest = abs(start) + abs(step) * length
    # Fractional steps are counted in float64 as PyTorch does, so that rounding happens once.
    exact = whole and largest < 2**24
    wide = torch.float32 if exact else torch.float64
    count = b.iota((length,), 0, wide)
    return b.convert(b.add(b.mul(count, float(step)), float(start)), dtype)


_STATIC_RANGE = ("start", "end", "step")


@lower("aten.arange.default", static=_STATIC_RANGE)
def arange(b: OpBuilder, end: float) -> Value:
    return _progression(b, 0, 1)


@lower("aten.arange.start", "aten.range.default", static=_STATIC_RANGE)
def arange_start(b: OpBuilder, start: float, end: float) -> Value:
    return _progression(b, start, 1)


@lower("aten.arange.start_step", "aten.range.step", static=_STATIC_RANGE)
def arange_step(b: OpBuilder, start: float, end: float, step: float = 1) -> Value:
    return _progression(b, start, step)


@lower("prims.iota")
def iota(b: OpBuilder, length: int, *, start: int, step: int, requires_grad: bool) -> Value:
    return _progression(b, start, step)


def _interpolate(
    b: OpBuilder, start: Operand, end: Operand, steps: int, dtype: torch.dtype
) -> Value:
    """``steps`` points from start to end inclusive, counted from the nearer end."""
    if b.out_dtype in INTEGRAL:  # the ends are truncated first
        start, end = (b.as_value(v, b.out_dtype) for v in (start, end))
    start, end = (b.reshape(b.as_value(v, dtype), ()) for v in (start, end))
    if steps == 1:
        return b.reshape(start, (1,))
    step = b.div(b.sub(end, start), steps - 1)
    position = b.iota((steps,), 0, torch.int64)
    count = b.convert(position, dtype)
    low = b.add(start, b.mul(count, step))
    high = b.sub(end, b.mul(b.sub(b.constant(steps - 1, dtype), count), step))
    return b.select(b.lt(position, steps // 2), low, high)


def _point_dtype(b: OpBuilder) -> torch.dtype:
    """Where the points are computed: integers in float64, half precision in float32."""
    dtype = b.out_dtype
    if dtype in INTEGRAL:
        return torch.float64
    return torch.float32 if dtype.itemsize < 4 else dtype


@lower("aten.linspace")
def linspace(b: OpBuilder, start: Operand, end: Operand, steps: int) -> Value:
    return b.convert(_interpolate(b, start, end, steps, _point_dtype(b)), b.out_dtype)


@lower("aten.logspace")
def logspace(b: OpBuilder, start: Operand, end: Operand, steps: int, base: Operand = 10.0) -> Value:
    """base ** linspace(start, end)."""
    dtype = _point_dtype(b)
    exponent = _interpolate(b, start, end, steps, dtype)
    if base == 2 and not exponent.is_complex:
        return b.convert(exp2(b, exponent), b.out_dtype)
    return b.convert(b.pow(b.constant(base, dtype), exponent), b.out_dtype)


# -- matrices ----------------------------------------------------------------------------------


@lower("aten.eye")
def eye(b: OpBuilder, n: int, m: int | None = None) -> Value:
    shape = b.out_shape
    return b.convert(b.eq(b.iota(shape, 0), b.iota(shape, 1)), b.out_dtype)


def _offset_from_diagonal(b: OpBuilder, shape: Sequence[int]) -> Value:
    """column - row over the last two dims."""
    matrix = tuple(shape[-2:])
    return b.sub(b.iota(matrix, 1, torch.int32), b.iota(matrix, 0, torch.int32))


def _clip_to_shape(diagonal: int, shape: Sequence[int]) -> int:
    return max(-shape[-2] - 1, min(diagonal, shape[-1] + 1))


@lower("aten.tril")
def tril(b: OpBuilder, x: Value, diagonal: int = 0) -> Value:
    keep = b.le(_offset_from_diagonal(b, x.shape), _clip_to_shape(diagonal, x.shape))
    return b.select(b.broadcast_to(keep, x.shape), x, b.constant(0, x.dtype, x.shape))


@lower("aten.triu")
def triu(b: OpBuilder, x: Value, diagonal: int = 0) -> Value:
    keep = b.ge(_offset_from_diagonal(b, x.shape), _clip_to_shape(diagonal, x.shape))
    return b.select(b.broadcast_to(keep, x.shape), x, b.constant(0, x.dtype, x.shape))


def _staircase(b: OpBuilder, k: Value, first: int, limit: int, rows: int) -> tuple[Value, Value]:
    """(row, column) of the k-th cell of a staircase.

    Row r holds ``min(first + r, limit)`` cells; ``first`` >= 1. The growing rows form a
    trapezoid whose row is the root of a quadratic, the full rows a rectangle.
    """
    growing = max(0, min(rows, limit - first))
    above = growing * first + growing * (growing - 1) // 2
    p = 2 * first - 1
    root = b.sqrt(b.convert(b.add(b.mul(k, 8), p * p), torch.float64))
    row = b.convert(b.floor(b.div(b.sub(root, float(p)), 2.0)), torch.int64)

    def before(r: Value) -> Value:
        return b.div(b.mul(r, b.add(r, p)), 2)

    # The square root may be off by one unit in the last place.
    row = b.select(b.gt(before(row), k), b.sub(row, 1), row)
    row = b.select(b.le(before(b.add(row, 1)), k), b.add(row, 1), row)
    column = b.sub(k, before(row))
    rest = b.sub(k, above)
    full_row = b.add(b.div(rest, limit), growing)
    in_full = b.ge(rest, 0)
    return b.select(in_full, full_row, row), b.select(in_full, b.remainder(rest, limit), column)


@lower("aten.tril_indices")
def tril_indices(b: OpBuilder, row: int, col: int, offset: int = 0) -> Value:
    count = b.out_shape[1]
    skipped = max(0, -offset)  # rows without a cell
    k = b.iota((count,), 0)
    rows, columns = _staircase(b, k, max(1, 1 + offset), col, row - skipped)
    return b.convert(b.stack([b.add(rows, skipped), columns], 0), b.out_dtype)


@lower("aten.triu_indices")
def triu_indices(b: OpBuilder, row: int, col: int, offset: int = 0) -> Value:
    """An upper triangle read backwards is a staircase."""
    count = b.out_shape[1]
    # Row r starts at column max(0, r + offset); rows from the last one with a cell upwards grow.
    last = min(row - 1, col - 1 - offset)
    k = b.sub(b.constant(count - 1, torch.int64), b.iota((count,), 0))
    rows, columns = _staircase(b, k, min(col, col - last - offset), col, last + 1)
    rows = b.sub(b.constant(last, torch.int64), rows)
    columns = b.sub(b.constant(col - 1, torch.int64), columns)
    return b.convert(b.stack([rows, columns], 0), b.out_dtype)
