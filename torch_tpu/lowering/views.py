"""Reading and writing tensors through their storage's base, inside a program.

A base is a row-major value. A view over it is sizes, strides and operands for its offset. The kinds
are decided in the native core (``csrc/dispatch/call.h``), which feeds the operands; the walk over
nested strides here is the same as ``regular_starts`` there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.types import COMPLEX_OF_REAL, REAL_OF_COMPLEX, Operand, Value

WHOLE, RESHAPE, REGULAR, GATHER, EMPTY, SCALAR = range(6)


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its base; ``offset`` are i64 scalars (starts, or one linear offset)."""

    view: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[Operand, ...] = ()


def retyped(b: Builder, base: Value, dtype: torch.dtype) -> Value:
    """The base's bytes as another dtype: a flat value (same shape if the item size is the same)."""
    if base.dtype is dtype:
        return base
    if base.is_complex and REAL_OF_COMPLEX[base.dtype] is dtype:
        return b.reshape(b.stack([b.real(base), b.imag(base)], base.rank), (-1,))
    if dtype.is_complex and COMPLEX_OF_REAL.get(base.dtype) is dtype:
        pairs = b.reshape(base, (-1, 2))
        return b.complex(b.index_dim(pairs, 1, 0), b.index_dim(pairs, 1, 1))
    if base.is_complex:
        return retyped(b, retyped(b, base, REAL_OF_COMPLEX[base.dtype]), dtype)
    if dtype.is_complex:
        return retyped(b, retyped(b, base, REAL_OF_COMPLEX[dtype]), dtype)
    if base.is_bool:
        base = b.convert(base, torch.uint8)
    if dtype is torch.bool:
        return b.ne(retyped(b, base, torch.uint8), 0)
    if base.dtype is dtype:
        return base
    old, new = base.dtype.itemsize, dtype.itemsize
    if old == new:
        return b.bitcast(base, dtype)
    flat = b.reshape(base, (-1,))
    if old > new:
        return b.reshape(b.bitcast(flat, dtype), (-1,))
    return b.bitcast(b.reshape(flat, (-1, new // old)), dtype)


@dataclass(frozen=True)
class _Level:
    """One moving dim: the axis it cuts has ``length`` elements, in rows of ``stride``."""

    dim: int
    stride: int
    length: int
    rows: int
    size: int


def _levels(sizes: Sequence[int], strides: Sequence[int], numel: int) -> list[_Level]:
    dims = [d for d, (n, s) in enumerate(zip(sizes, strides, strict=True)) if n != 1 and s != 0]
    dims.sort(key=lambda d: -strides[d])  # stable, as the native walk
    levels, length = [], numel
    for d in dims:
        levels.append(_Level(d, strides[d], length, -(-length // strides[d]), sizes[d]))
        length = strides[d]
    return levels


def _refined(b: Builder, base: Value, levels: list[_Level]) -> Value:
    """The flat base as [rows of level 0, …, rows of the last level, its stride], padded where the
    last row of an axis is partial."""
    x = b.reshape(base, (base.numel,))
    for level in levels:
        padded = level.rows * level.stride
        if padded != level.length:
            x = b.pad_dim(x, x.rank - 1, 0 if not x.is_bool else False, 0, padded - level.length)
        x = b.reshape(x, (*x.shape[:-1], level.rows, level.stride))
    return x


def _window(
    levels: list[_Level], offset: Sequence[Operand], numel: int
) -> tuple[list[Operand], list[int]]:
    """Starts and sizes of the view's window over the refined base."""
    feed = iter(offset)
    starts: list[Operand] = []
    sizes: list[int] = []
    for level in levels:
        starts.append(next(feed) if level.size < level.rows else 0)
        sizes.append(level.size)
    last = levels[-1].stride if levels else numel
    starts.append(next(feed) if last > 1 else 0)
    sizes.append(1)
    return starts, sizes


def _linear_index(b: Builder, g: Geometry) -> Value:
    """The flat position of every element of the view, i64 of the view's shape."""
    index = b.full(g.sizes, g.offset[0], torch.int64)
    for d, stride in enumerate(g.strides):
        if g.sizes[d] > 1 and stride:
            index = b.add(index, b.mul(b.iota(g.sizes, d, torch.int64), stride))
    return index


def read(b: Builder, base: Value, g: Geometry) -> Value:
    """The tensor's value, row-major in its own sizes."""
    if g.view == EMPTY:
        return b.constant(0, g.dtype, g.sizes)
    base = retyped(b, base, g.dtype)
    if g.view in (WHOLE, RESHAPE):
        return b.reshape(base, g.sizes)
    if g.view == GATHER:
        flat = b.reshape(base, (base.numel,))
        index = b.reshape(_linear_index(b, g), (-1,))
        return b.reshape(b.take_rows(flat, index), g.sizes)
    levels = _levels(g.sizes, g.strides, base.numel)
    starts, sizes = _window(levels, g.offset, base.numel)
    x = b.dynamic_slice(_refined(b, base, levels), starts, sizes)
    x = b.reshape(x, sizes[:-1])
    return _to_view(b, x, levels, g)


def _to_view(b: Builder, x: Value, levels: list[_Level], g: Geometry) -> Value:
    """Dims in stride order to the view's own order, with broadcast and size-1 dims put back."""
    order = [level.dim for level in levels]
    moving = sorted(order)
    x = b.transpose(x, [order.index(d) for d in moving]) if order else x
    return b.broadcast_in_dim(x, g.sizes, moving)


def write(b: Builder, base: Value | None, numel: int, g: Geometry, value: Value) -> Value:
    """The flat base (of the tensor's dtype, ``numel`` elements) after ``value`` was stored.

    ``base`` may be None when the view covers every element.
    """
    if g.view in (WHOLE, RESHAPE):
        return b.reshape(value, (numel,))
    if g.view == GATHER:
        assert base is not None
        flat = b.reshape(base, (numel,))
        index = b.reshape(_linear_index(b, g), (-1, 1))
        return b.scatter(
            flat,
            index,
            b.reshape(value, (-1,)),
            "set",
            update_window_dims=[],
            inserted=[0],
            scatter_dims=[0],
            index_vector_dim=1,
        )
    levels = _levels(g.sizes, g.strides, numel)
    starts, sizes = _window(levels, g.offset, numel)
    order = [level.dim for level in levels]
    x = b.reshape(value, [g.sizes[d] for d in sorted(order)])
    x = b.transpose(x, [sorted(order).index(d) for d in order]) if order else x
    x = b.reshape(x, sizes)
    if math.prod(sizes) == numel:
        return b.reshape(x, (numel,))
    assert base is not None
    refined = _refined(b, b.reshape(base, (numel,)), levels)
    x = b.dynamic_update_slice(refined, x, starts)
    for level in reversed(levels):
        x = b.reshape(x, (*x.shape[:-2], level.rows * level.stride))
        if level.length != x.shape[-1]:
            x = b.slice_dim(x, x.rank - 1, 0, level.length)
    return x


def covers_base(g: Geometry, numel: int) -> bool:
    """Whether a write through this view replaces every element of the base."""
    if g.view in (WHOLE, RESHAPE):
        return True
    if g.view != REGULAR:
        return False
    return math.prod(g.sizes) == numel and all(
        s != 0 for n, s in zip(g.sizes, g.strides, strict=True) if n != 1
    )
