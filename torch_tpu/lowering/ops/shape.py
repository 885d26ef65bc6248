"""Views in their functional form, their copies, and the scatters and backwards that invert them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import scatter_flat
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import COMPLEX_OF_REAL, Operand, Value, canonical_dim

# -- same elements in the same order ---------------------------------------------------------

IDENTITIES = (
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "prims.view_of.default",
    "prims.copy_strided.default",
)

RESHAPES = (
    "aten.view.default",
    "aten.view_copy.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_alias.default",
    "aten._reshape_alias_copy.default",
    "aten._reshape_copy.default",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
    "prims.reshape.default",
    "prims.squeeze.default",
    "prims.collapse.default",
    "prims.collapse_view.default",
    "prims.split_dim.default",
)


@lower(*IDENTITIES)
def identity(b: OpBuilder, x: Value, *_: object) -> Value:
    return x


@lower(*RESHAPES)
def reshape(b: OpBuilder, x: Value, *_: object) -> Value:
    return b.reshape(x, b.out_shape)


@lower("aten.expand.default", "aten.expand_copy.default")
def expand(b: OpBuilder, x: Value, size: Sequence[int]) -> Value:
    return b.broadcast_to(x, b.out_shape)


@lower("prims.broadcast_in_dim.default")
def broadcast_in_dim(b: OpBuilder, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    return b.broadcast_in_dim(x, shape, dims)


# -- reordered dims --------------------------------------------------------------------------


@lower("aten.permute.default", "aten.permute_copy.default", "prims.transpose.default")
def permute(b: OpBuilder, x: Value, dims: Sequence[int]) -> Value:
    return b.transpose(x, dims)


@lower("aten.transpose.int", "aten.transpose_copy.int")
def transpose(b: OpBuilder, x: Value, dim0: int, dim1: int) -> Value:
    if x.rank == 0:
        return x
    return b.swap(x, canonical_dim(dim0, x.rank), canonical_dim(dim1, x.rank))


@lower("aten.t.default", "aten.t_copy.default")
def t(b: OpBuilder, x: Value) -> Value:
    return b.swap(x, 0, 1) if x.rank == 2 else x


# -- slices ----------------------------------------------------------------------------------


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """Start, tight limit and length of a slice of a dim of ``size``; out-of-range ends clamp."""
    first, last, _ = slice(start, end, 1).indices(size)
    length = max(0, -(-(last - first) // step))
    return first, first + (length - 1) * step + 1 if length else first, length


@lower("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    b: OpBuilder,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim = canonical_dim(dim, x.rank)
    first, limit, _ = slice_bounds(x.shape[dim], start, end, step)
    return b.slice_dim(x, dim, first, limit, step)


@lower("aten.narrow_copy.default")
def narrow(b: OpBuilder, x: Value, dim: int, start: int, length: int) -> Value:
    dim = canonical_dim(dim, x.rank)
    first = start + x.shape[dim] if start < 0 else start
    return b.slice_dim(x, dim, first, first + length)


@lower("aten.select.int", "aten.select_copy.int")
def select(b: OpBuilder, x: Value, dim: int, index: int) -> Value:
    return b.index_dim(x, dim, index)


@lower(
    "aten.split.Tensor",
    "aten.split_copy.Tensor",
    "aten.split_with_sizes.default",
    "aten.split_with_sizes_copy.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
)
def split(b: OpBuilder, x: Value, sizes: int | Sequence[int], dim: int = 0) -> list[Value]:
    dim = canonical_dim(dim, x.rank)
    parts, start = [], 0
    for shape, _ in b.results:
        parts.append(b.slice_dim(x, dim, start, start + shape[dim]))
        start += shape[dim]
    return parts


@lower("aten.unbind.int", "aten.unbind_copy.int")
def unbind(b: OpBuilder, x: Value, dim: int = 0) -> list[Value]:
    dim = canonical_dim(dim, x.rank)
    return [b.index_dim(x, dim, i) for i in range(x.shape[dim])]


def _dilated(
    b: OpBuilder, src: Value, dim: int, start: int, step: int, size: int, fill: Operand
) -> Value:
    """Put the entries of ``src`` at start, start + step, … of a dim of ``size``; else ``fill``."""
    n = src.shape[dim]
    low, high, interior = [0] * src.rank, [0] * src.rank, [0] * src.rank
    low[dim], interior[dim] = start, step - 1
    high[dim] = size - start - ((n - 1) * step + 1 if n else 0)
    return b.pad(src, fill, low, high, interior)


@lower("aten.slice_scatter.default")
def slice_scatter(
    b: OpBuilder,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim = canonical_dim(dim, x.rank)
    size = x.shape[dim]
    first, limit, length = slice_bounds(size, start, end, step)
    src = b.broadcast_to(b.convert(src, x.dtype), (*x.shape[:dim], length, *x.shape[dim + 1 :]))
    if length == 0:
        return x
    if step == 1 or length == 1:
        return b.dynamic_update_slice(x, src, [first if d == dim else 0 for d in range(x.rank)])
    place = b.sub(b.iota((size,), 0, torch.int32), first)
    inside = b.and_(b.ge(place, 0), b.lt(place, limit - first))
    hit = b.and_(inside, b.eq(b.remainder(place, step), 0))
    spread = _dilated(b, src, dim, first, step, size, 0)
    return b.select(b.broadcast_in_dim(hit, x.shape, [dim]), spread, x)


@lower("aten.select_scatter.default")
def select_scatter(b: OpBuilder, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = canonical_dim(dim, x.rank)
    src = b.broadcast_to(b.convert(src, x.dtype), x.shape[:dim] + x.shape[dim + 1 :])
    starts = [index % x.shape[dim] if d == dim else 0 for d in range(x.rank)]
    return b.dynamic_update_slice(x, b.unsqueeze(src, dim), starts)


@lower("aten.slice_backward.default")
def slice_backward(
    b: OpBuilder, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    dim = canonical_dim(dim, grad.rank)
    first, _, _ = slice_bounds(sizes[dim], start, end, step)
    return _dilated(b, grad, dim, first, step, sizes[dim], 0)


@lower("aten.select_backward.default")
def select_backward(b: OpBuilder, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    dim = canonical_dim(dim, len(sizes))
    return _dilated(b, b.unsqueeze(grad, dim), dim, index % sizes[dim], 1, sizes[dim], 0)


@lower("prims.rev.default")
def rev(b: OpBuilder, x: Value, dims: Sequence[int]) -> Value:
    return b.reverse(x, dims)


# -- diagonals -------------------------------------------------------------------------------


def _last_two(b: OpBuilder, x: Value, dim1: int, dim2: int) -> Value:
    rest = [d for d in range(x.rank) if d not in (dim1, dim2)]
    return b.transpose(x, [*rest, dim1, dim2])


def spread_diagonal(
    b: OpBuilder,
    src: Value,
    shape: Sequence[int],
    offset: int,
    dim1: int,
    dim2: int,
    other: Operand,
) -> Value:
    """``other`` with ``src`` (diagonal as its last dim) on the diagonal of dims ``dim1``, ``dim2``.

    One comparison of two counters selects; no scatter and no gather.
    """
    rank = len(shape)
    dim1, dim2 = canonical_dim(dim1, rank), canonical_dim(dim2, rank)
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    # Row r of the matrix holds diagonal entry r - max(-offset, 0).
    low = max(-offset, 0)
    rows = b.pad_dim(src, -1, 0, low, shape[dim1] - low - src.shape[-1])
    # broadcast_in_dim asks for ascending dims: order the operand's dims that way first.
    targets = [*rest, dim1]
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    rows = b.transpose(rows, order)
    wide = b.broadcast_in_dim(rows, shape, sorted(targets))
    row = b.iota(shape, dim1, torch.int32)
    hit = b.eq(b.add(row, offset), b.iota(shape, dim2, torch.int32))
    return b.select(hit, wide, other)


@lower("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(b: OpBuilder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    x = _last_two(b, x, canonical_dim(dim1, x.rank), canonical_dim(dim2, x.rank))
    *lead, rows, cols = x.shape
    length = b.out_shape[-1]
    start = offset if offset >= 0 else -offset * cols
    # In the flattened matrix a diagonal is a slice with step cols + 1.
    flat = b.reshape(x, (*lead, rows * cols))
    return b.slice_dim(flat, -1, start, start + (length - 1) * (cols + 1) + 1, cols + 1)


@lower("aten.diagonal_scatter.default")
def diagonal_scatter(
    b: OpBuilder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    if src.numel == 0:
        return x
    return spread_diagonal(b, b.convert(src, x.dtype), x.shape, offset, dim1, dim2, x)


@lower("aten.diagonal_backward.default")
def diagonal_backward(
    b: OpBuilder, grad: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Value:
    zero = b.constant(0, grad.dtype, sizes)
    if grad.numel == 0:
        return zero
    return spread_diagonal(b, grad, sizes, offset, dim1, dim2, zero)


@lower("aten.diag_embed.default")
def diag_embed(b: OpBuilder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    zero = b.constant(0, x.dtype, b.out_shape)
    return spread_diagonal(b, x, b.out_shape, offset, dim1, dim2, zero) if x.numel else zero


# -- strided views of a row-major value ------------------------------------------------------


def _addresses(b: OpBuilder, size: Sequence[int], stride: Sequence[int], offset: int) -> Value:
    """Element positions of a strided view, shape ``size``."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    dtype = torch.int32 if last < 2**31 else torch.int64
    where = b.constant(offset, dtype, size)
    for d, step in enumerate(stride):
        if size[d] > 1 and step:
            where = b.add(where, b.mul(b.iota(size, d, dtype), step))
    return where


def _check_strided(x: Value, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if last >= x.numel or offset < 0:
        raise RuntimeError(
            f"as_strided: sizes {list(size)}, strides {list(stride)}, storage offset {offset} "
            f"reach element {last}; the value has {x.numel}"
        )


@lower("aten.as_strided.default", "aten.as_strided_copy.default")
def as_strided(
    b: OpBuilder,
    x: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    """The view of a row-major value; dims of stride 0 are broadcast, dense runs are slices."""
    offset = storage_offset or 0
    _check_strided(x, size, stride, offset)
    flat = b.reshape(x, (x.numel,))
    kept = [d for d in range(len(size)) if size[d] != 1 and stride[d] != 0]
    core, steps = [size[d] for d in kept], [stride[d] for d in kept]
    order = sorted(range(len(kept)), key=lambda i: -steps[i])
    dense, run = True, 1
    for i in reversed(order):
        dense, run = dense and steps[i] == run, run * core[i]
    if dense:
        part = b.slice(flat, [offset], [offset + math.prod(core)])
        part = b.reshape(part, [core[i] for i in order])
        part = b.transpose(part, [order.index(i) for i in range(len(core))])
    elif len(core) == 1:
        part = b.slice(flat, [offset], [offset + (core[0] - 1) * steps[0] + 1], [steps[0]])
    else:
        part = b.take_rows(flat, _addresses(b, core, steps, offset))
    return b.broadcast_in_dim(part, size, kept)


@lower("aten.as_strided_scatter.default", "prims.as_strided_scatter.default")
def as_strided_scatter(
    b: OpBuilder,
    x: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    offset = storage_offset or 0
    if src.numel == 0:
        return x
    _check_strided(x, size, stride, offset)
    src = b.broadcast_to(b.convert(src, x.dtype), size)
    return scatter_flat(b, x, _addresses(b, size, stride, offset), src, "set")


# -- other dtypes, complex parts -------------------------------------------------------------


@lower("aten.view.dtype", "aten.view_copy.dtype", "prims.view_of_dtype.default")
def view_dtype(b: OpBuilder, x: Value, dtype: torch.dtype) -> Value:
    """Reinterpret the bytes; the last dim shrinks or grows with the item size."""
    if dtype is x.dtype:
        return x
    if x.is_complex:
        x = _merge_last(b, view_as_real(b, x))
    if x.is_bool:
        x = b.convert(x, torch.uint8)
    part = {c: r for r, c in COMPLEX_OF_REAL.items()}.get(dtype, dtype)
    target = torch.uint8 if part is torch.bool else part
    old, new = x.dtype.itemsize, target.itemsize
    if old > new:
        x = _merge_last(b, b.bitcast(x, target))
    elif old < new:
        ratio = new // old
        x = b.bitcast(b.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio)), target)
    else:
        x = b.bitcast(x, target) if target is not x.dtype else x
    if dtype.is_complex:
        return view_as_complex(b, b.reshape(x, (*b.out_shape, 2)))
    return b.convert(x, dtype)


def _merge_last(b: OpBuilder, x: Value) -> Value:
    """Merge the last two dims; a 0-d source keeps its single pair dim."""
    return b.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1])) if x.rank > 1 else x


@lower("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(b: OpBuilder, x: Value) -> Value:
    return b.stack([b.real(x), b.imag(x)], x.rank)


@lower("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(b: OpBuilder, x: Value) -> Value:
    return b.complex(b.index_dim(x, -1, 0), b.index_dim(x, -1, 1))


CONJUGATES: dict[str, Callable[[OpBuilder, Value], Value]] = {
    "aten._conj.default": lambda b, x: b.conj(x),
    "aten._conj_copy.default": lambda b, x: b.conj(x),
    "prims.conj.default": lambda b, x: b.conj(x),
    "aten._neg_view.default": lambda b, x: b.neg(x),
    "aten._neg_view_copy.default": lambda b, x: b.neg(x),
}
for _name, _fn in CONJUGATES.items():
    lower(_name)(_fn)
