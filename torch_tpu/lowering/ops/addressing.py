"""Checked indices, linear addresses and the gather and scatter forms that indexing ops share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.types import Value, opmath_dtype

# (x, updates, kind) -> new x: a scatter whose addresses are already bound.
Scatter = Callable[[Value, Value, str], Value]


def index_dtype(limit: int) -> torch.dtype:
    """The cheapest type for addresses up to ``limit``: 64-bit integers are emulated on a TPU."""
    return torch.int32 if limit < 2**31 else torch.int64


def checked_index(b: Builder, index: Value, size: int, wrap: bool = False) -> Value:
    """``index`` in a cheap type, out-of-range entries noted; ``wrap`` allows negative ones."""
    return b.convert(b.check_index(index, size, wrap), index_dtype(size))


def linear_address(
    b: Builder, parts: Sequence[Value], sizes: Sequence[int], valid: Value | None = None
) -> Value:
    """Row-major address of the coordinates ``parts`` in a block of ``sizes``.

    Entries that are not ``valid`` get an address past the end: scatter drops them.
    """
    total = math.prod(sizes)
    dtype = index_dtype(total)
    address = b.convert(parts[0], dtype)
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        address = b.add(b.mul(address, size), b.convert(part, dtype))
    return address if valid is None else b.select(valid, address, total)


def scatter_flat(
    b: Builder, x: Value, address: Value, updates: Value, kind: str, unique: bool = False
) -> Value:
    """Combine ``updates`` into ``x`` at row-major addresses (any shape, that of ``updates``).

    On one flat dim a scatter is 1.3 to 4 times faster than with coordinate tuples or batching dims.
    """
    flat = b.scatter(
        b.reshape(x, (x.numel,)),
        b.reshape(address, (address.numel,)),
        b.reshape(updates, (updates.numel,)),
        kind,
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=1,
        unique=unique,
    )
    return b.reshape(flat, x.shape)


def scatter_rows(
    b: Builder,
    x: Value,
    dim: int,
    index: Value,
    updates: Value,
    kind: str,
    sorted_indices: bool = False,
) -> Value:
    """Combine slices of ``updates`` (``index``'s dims in place of ``dim``) into slices of ``x``.

    A whole slice is one update window, so the loop has one step per index, not per element.
    """
    window = [d if d < dim else d + index.rank - 1 for d in range(x.rank) if d != dim]
    if math.prod(x.shape) == x.shape[dim]:
        return scatter_flat(b, x, index, updates, kind)
    return b.scatter(
        x,
        index,
        updates,
        kind,
        update_window_dims=window,
        inserted=[dim],
        scatter_dims=[dim],
        index_vector_dim=index.rank,
        sorted_indices=sorted_indices,
    )


def gather_rows(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """Slices of ``x`` along ``dim``; the dims of ``index`` stand in its place."""
    return gather_windows(b, x, dim, b.unsqueeze(index, index.rank))


def gather_windows(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """``x[…, i, j]`` at the in-range coordinates in the last dim of ``index``, one each for
    ``dim`` and the dims after it; index dims stand in the place of the indexed dims.

    Dims before ``dim`` are batch dims, not parts of a window: up to 5 times faster on XLA:CPU.
    """
    count = index.shape[-1]
    lead, batch, rest = x.shape[:dim], index.shape[:-1], x.shape[dim + count :]
    shape = (*lead, *batch, *rest)
    if x.numel == 0:
        return b.constant(0, x.dtype, shape)
    index = b.broadcast_in_dim(index, (*lead, *index.shape), range(dim, dim + index.rank))
    return b.gather(
        x,
        index,
        offset_dims=range(len(shape) - len(rest), len(shape)),
        collapsed=range(dim, dim + count),
        start_index_map=range(dim, dim + count),
        index_vector_dim=index.rank - 1,
        slice_sizes=[1] * (dim + count) + list(rest),
        operand_batching=range(dim),
        indices_batching=range(dim),
    )


def gather_along(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """``x.gather(dim, index)`` for in-range indices; other dims of ``index`` may be smaller."""
    if x.numel == 0:
        return b.constant(0, x.dtype, index.shape)
    limits = [n if d == dim else index.shape[d] for d, n in enumerate(x.shape)]
    x = b.slice(x, [0] * x.rank, limits)
    others = [d for d in range(x.rank) if d != dim]
    return b.gather(
        x,
        index,
        offset_dims=[],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=index.rank,
        slice_sizes=[1] * x.rank,
        operand_batching=others,
        indices_batching=others,
    )


def address_along(b: Builder, shape: Sequence[int], dim: int, index: Value) -> Value:
    """Row-major addresses in ``shape`` of the elements that ``gather(dim, index)`` would read."""
    total = math.prod(shape)
    parts = [
        index if d == dim else b.iota(index.shape, d, index_dtype(total)) for d in range(len(shape))
    ]
    return linear_address(b, parts, shape)


def cumulative_sum(b: Builder, x: Value) -> Value:
    """Inclusive running sum of a 1-d integer value."""
    if x.numel == 0:
        return x
    zero = b.constant(0, x.dtype)
    (out,) = b.reduce_window([x], [zero], "add", window=[x.numel], padding=[(x.numel - 1, 0)])
    return out


def accumulate(b: Builder, scatter: Scatter, x: Value, updates: Value, kind: str) -> Value:
    """Run ``scatter(x, updates, kind)`` in float32 for half precision, rounded once at the end."""
    wide = opmath_dtype(x.dtype) if kind in ("add", "mul") else x.dtype
    out = scatter(b.convert(x, wide), b.convert(updates, wide), kind)
    return b.convert(out, x.dtype)
