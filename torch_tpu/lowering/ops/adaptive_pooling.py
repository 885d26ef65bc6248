"""Pooling whose windows follow from the output's size, fractional pooling, and unpooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.banded import banded_product
from torch_tpu.lowering.ops.pooling import larger
from torch_tpu.lowering.regions import lowest
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

Ints = Sequence[int]


def _bounds(size: int, out: int) -> list[tuple[int, int]]:
    """Window i covers floor(i size / out) up to ceil((i + 1) size / out)."""
    return [((i * size) // out, -((-(i + 1) * size) // out)) for i in range(out)]


# -- adaptive average --------------------------------------------------------------------------


def _averaging(b: OpBuilder, size: int, out: int, dtype: torch.dtype) -> Value:
    """The (out, size) matrix whose row i averages window i."""
    bounds = _bounds(size, out)
    shape = (out, size)
    column = b.iota(shape, 1, torch.int32)

    def rows(values: Sequence[float], kind: torch.dtype) -> Value:
        return b.broadcast_in_dim(b.constant_array(values, kind), shape, [0])

    start, end = (rows([edge[k] for edge in bounds], torch.int32) for k in (0, 1))
    inside = b.and_(b.ge(column, start), b.lt(column, end))
    return b.select(inside, rows([1.0 / (e - s) for s, e in bounds], dtype), 0)


def _along(b: OpBuilder, x: Value, dim: int, matrix: Value, side: int) -> Value:
    """Contract ``dim`` of x with dim ``side`` of the matrix; the other one takes its place."""
    return banded_product(b, x, dim, matrix, side, lambda: _contract(b, x, dim, matrix, side))


def _contract(b: OpBuilder, x: Value, dim: int, matrix: Value, side: int) -> Value:
    saved, b.matmul_precision = b.matmul_precision, "HIGHEST"
    out = b.dot_general(x, matrix, ([dim], [side]))
    b.matmul_precision = saved
    order = [*range(dim), x.rank - 1, *range(dim, x.rank - 1)]
    return b.transpose(out, order)


def _mean_pool(b: OpBuilder, x: Value, out: Ints) -> Value:
    n = len(out)
    for axis in range(n):
        dim = x.rank - n + axis
        size, count = x.shape[dim], out[axis]
        if size % count == 0:
            step = size // count
            split = b.reshape(x, (*x.shape[:dim], count, step, *x.shape[dim + 1 :]))
            x = b.mul(b.reduce(split, "add", [dim + 1]), 1.0 / step)
        else:
            x = _along(b, x, dim, _averaging(b, size, count, x.dtype), 1)
    return x


def _mean_pool_gradient(b: OpBuilder, grad: Value, sizes: Ints, n: int) -> Value:
    for dim in range(grad.rank - n, grad.rank):
        size, count = sizes[dim], grad.shape[dim]
        if size % count == 0:
            step = size // count
            shape = (*grad.shape[:dim], count, step, *grad.shape[dim + 1 :])
            dims = [d for d in range(len(shape)) if d != dim + 1]
            wide = b.broadcast_in_dim(b.mul(grad, 1.0 / step), shape, dims)
            grad = b.reshape(wide, (*grad.shape[:dim], size, *grad.shape[dim + 1 :]))
        else:
            grad = _along(b, grad, dim, _averaging(b, size, count, grad.dtype), 0)
    return grad


@lower("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d")
def adaptive_avg_pool(b: OpBuilder, x: Value, output_size: Ints) -> Value:
    wide = b.convert(x, opmath_dtype(x.dtype))
    return b.convert(_mean_pool(b, wide, b.out_shape[-len(output_size) :]), x.dtype)


def _adaptive_avg_backward(b: OpBuilder, grad: Value, x: Value, n: int) -> Value:
    if grad.numel == 0:
        return b.constant(0, b.out_dtype, b.out_shape)
    wide = b.convert(grad, opmath_dtype(grad.dtype))
    return b.convert(_mean_pool_gradient(b, wide, x.shape, n), b.out_dtype)


@lower("aten._adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    return _adaptive_avg_backward(b, grad, x, 2)


@lower("aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    return _adaptive_avg_backward(b, grad, x, 3)


# -- maxima with positions ---------------------------------------------------------------------


def _maximum_of_windows(
    b: OpBuilder, values: Value, places: Value, dims: Sequence[int]
) -> tuple[Value, Value]:
    """Reduce window dims to (maximum, its i32 position)."""

    def body(m: Value, i: Value, v: Value, j: Value) -> tuple[Value, Value]:
        take = larger(b, m, i, v, j)
        return b.select(take, v, m), b.select(take, j, i)

    inits = [b.constant(lowest(values.dtype), values.dtype), b.constant(2**31 - 1, torch.int32)]
    best, at = b.reduce_general([values, places], inits, dims, body)
    return best, at


def _scatter_gradient(b: OpBuilder, grad: Value, indices: Value, sizes: Ints, n: int) -> Value:
    """Add each gradient at its flat position in the last ``n`` dims of ``sizes``."""
    area, count = math.prod(sizes[-n:]), math.prod(grad.shape[-n:])
    if grad.numel == 0:
        return b.constant(0, grad.dtype, sizes)
    flat = b.reshape(grad, (-1, count))
    where = b.reshape(b.convert(indices, torch.int32), flat.shape)
    zeros = b.constant(0, grad.dtype, (flat.shape[0], area))
    out = b.scatter(
        zeros,
        b.unsqueeze(where, 2),
        flat,
        "add",
        update_window_dims=[],
        inserted=[1],
        scatter_dims=[1],
        index_vector_dim=2,
        operand_batching=[0],
        indices_batching=[0],
    )
    return b.reshape(out, sizes)


def _select_static(b: OpBuilder, x: Value, dim: int, positions: Sequence[int]) -> Value:
    """``x.index_select(dim, positions)`` for a static list of positions."""
    if list(positions) == list(range(x.shape[dim])):
        return x
    rows = b.constant_array(list(positions), torch.int32)
    offset = [d for d in range(x.rank) if d != dim]
    return b.gather(
        x,
        rows,
        offset_dims=offset,
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=1,
        slice_sizes=[1 if d == dim else n for d, n in enumerate(x.shape)],
    )


def _adaptive_max(b: OpBuilder, x: Value, n: int) -> tuple[Value, Value]:
    """Windows become dims of their own; a short window repeats its last element."""
    rank = x.rank
    out = b.out_shape[-n:]
    sizes = x.shape[-n:]
    longest, positions = [], []
    for size, count in zip(sizes, out, strict=True):
        bounds = _bounds(size, count)
        length = max(e - s for s, e in bounds)
        longest.append(length)
        positions.append([min(s + i, e - 1) for s, e in bounds for i in range(length)])
    values = b.convert(x, opmath_dtype(x.dtype))
    for axis in range(n):
        values = _select_static(b, values, rank - n + axis, positions[axis])
    spatial = [len(p) for p in positions]
    places = b.constant(0, torch.int32, spatial)
    step = 1
    for axis in reversed(range(n)):
        row = b.constant_array([p * step for p in positions[axis]], torch.int32)
        places = b.add(places, b.broadcast_in_dim(row, spatial, [axis]))
        step *= sizes[axis]
    places = b.broadcast_to(places, values.shape)
    shape = list(x.shape[:-n])
    for count, length in zip(out, longest, strict=True):
        shape += [count, length]
    dims = range(rank - n + 1, rank + n, 2)
    best, at = _maximum_of_windows(b, b.reshape(values, shape), b.reshape(places, shape), dims)
    return b.convert(best, x.dtype), b.convert(at, b.results[1][1])


@lower("aten.adaptive_max_pool2d")
def adaptive_max_pool2d(b: OpBuilder, x: Value, output_size: Ints) -> tuple[Value, Value]:
    return _adaptive_max(b, x, 2)


@lower("aten.adaptive_max_pool3d")
def adaptive_max_pool3d(b: OpBuilder, x: Value, output_size: Ints) -> tuple[Value, Value]:
    return _adaptive_max(b, x, 3)


def _max_backward(b: OpBuilder, grad: Value, x: Value, indices: Value, n: int) -> Value:
    wide = b.convert(grad, opmath_dtype(grad.dtype))
    return b.convert(_scatter_gradient(b, wide, indices, x.shape, n), b.out_dtype)


@lower("aten.adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(b: OpBuilder, grad: Value, x: Value, indices: Value) -> Value:
    return _max_backward(b, grad, x, indices, 2)


@lower("aten.adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(b: OpBuilder, grad: Value, x: Value, indices: Value) -> Value:
    return _max_backward(b, grad, x, indices, 3)


# -- fractional max pooling (Graham, 2014) -----------------------------------------------------


def _fractional_starts(b: OpBuilder, samples: Value, size: int, out: int, window: int) -> Value:
    """Window starts (planes, out) from one uniform sample per plane."""
    planes = samples.shape[0]
    last = b.constant(size - window, torch.int32, (planes, 1))
    if out == 1:
        return last
    shape = (planes, out - 1)
    alpha = b.div(b.constant(size - window, samples.dtype), out - 1)
    sample = b.broadcast_in_dim(samples, shape, [0])
    place = b.add(b.iota(shape, 1, samples.dtype), sample)
    first = b.convert(b.trunc(b.mul(sample, alpha)), torch.int32)
    moved = b.convert(b.trunc(b.mul(place, alpha)), torch.int32)
    return b.concatenate([b.sub(moved, first), last], 1)


def _fractional(
    b: OpBuilder, x: Value, window: Ints, out: Ints, samples: Value, order: Ints
) -> tuple[Value, Value]:
    """``order[axis]`` is the column of the samples that drives the axis."""
    n = len(window)
    sizes = x.shape[-n:]
    planes = math.prod(x.shape[:-n])
    table = b.reshape(b.convert(samples, opmath_dtype(samples.dtype)), (planes, n))
    shape: list[int] = [planes]
    for count, length in zip(out, window, strict=True):
        shape += [count, length]
    places = b.constant(0, torch.int32, shape)
    step = 1
    for axis in reversed(range(n)):
        starts = _fractional_starts(
            b, b.index_dim(table, 1, order[axis]), sizes[axis], out[axis], window[axis]
        )
        at = b.add(
            b.broadcast_in_dim(starts, shape, [0, 1 + 2 * axis]),
            b.iota(shape, 2 + 2 * axis, torch.int32),
        )
        places = b.add(places, b.mul(at, step))
        step *= sizes[axis]
    flat = b.convert(b.reshape(x, (planes, math.prod(sizes))), opmath_dtype(x.dtype))
    values = b.reshape(b.take_along(flat, 1, b.reshape(places, (planes, -1))), shape)
    best, at = _maximum_of_windows(b, values, places, range(2, 2 * n + 1, 2))
    index_shape, index_dtype = b.results[1]
    return (
        b.convert(b.reshape(best, b.out_shape), x.dtype),
        b.convert(b.reshape(at, index_shape), index_dtype),
    )


@lower("aten.fractional_max_pool2d")
def fractional_max_pool2d(
    b: OpBuilder, x: Value, kernel_size: Ints, output_size: Ints, random_samples: Value
) -> tuple[Value, Value]:
    return _fractional(b, x, kernel_size, output_size, random_samples, (1, 0))


@lower("aten.fractional_max_pool3d")
def fractional_max_pool3d(
    b: OpBuilder, x: Value, kernel_size: Ints, output_size: Ints, random_samples: Value
) -> tuple[Value, Value]:
    return _fractional(b, x, kernel_size, output_size, random_samples, (0, 1, 2))


@lower("aten.fractional_max_pool2d_backward")
def fractional_max_pool2d_backward(
    b: OpBuilder, grad: Value, x: Value, kernel_size: Ints, output_size: Ints, indices: Value
) -> Value:
    return _max_backward(b, grad, x, indices, 2)


# PyTorch has no shape rule for this one.
@lower("aten.fractional_max_pool3d_backward", specs=lambda grad, x, *_: [(x.shape, x.dtype)])
def fractional_max_pool3d_backward(
    b: OpBuilder, grad: Value, x: Value, kernel_size: Ints, output_size: Ints, indices: Value
) -> Value:
    return _max_backward(b, grad, x, indices, 3)


# -- unpooling ---------------------------------------------------------------------------------


def _unpool(b: OpBuilder, x: Value, indices: Value, n: int) -> Value:
    """Zeros with each value at its flat position."""
    shape = b.out_shape
    area, count = math.prod(shape[-n:]), math.prod(x.shape[-n:])
    if x.numel == 0:
        return b.constant(0, x.dtype, shape)
    flat = b.reshape(x, (-1, count))
    where = b.reshape(b.convert(indices, torch.int64), flat.shape)
    b.note_bad_index(b.or_(b.lt(where, 0), b.ge(where, area)))
    out = b.scatter(
        b.constant(0, x.dtype, (flat.shape[0], area)),
        b.unsqueeze(where, 2),
        flat,
        "set",
        update_window_dims=[],
        inserted=[1],
        scatter_dims=[1],
        index_vector_dim=2,
        operand_batching=[0],
        indices_batching=[0],
    )
    return b.reshape(out, shape)


@lower("aten.max_unpool2d")
def max_unpool2d(b: OpBuilder, x: Value, indices: Value, output_size: Ints) -> Value:
    return _unpool(b, x, indices, 2)


@lower("aten.max_unpool3d")
def max_unpool3d(
    b: OpBuilder, x: Value, indices: Value, output_size: Ints, stride: Ints, padding: Ints
) -> Value:
    return _unpool(b, x, indices, 3)
