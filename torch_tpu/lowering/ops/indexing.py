"""Advanced indexing, and reads and writes of whole slices along one dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import (
    Scatter,
    accumulate,
    checked_index,
    cumulative_sum,
    gather_rows,
    gather_windows,
    index_dtype,
    linear_address,
    scatter_flat,
    scatter_rows,
)
from torch_tpu.lowering.ops.data_dependent import nonzero_padded
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, broadcast_shapes, canonical_dim

# -- x[i, :, j] ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Advanced indices of a value: the indexed dims and their broadcast, wrapped coordinates.

    valid   False where an entry stands for nothing (the padding of an expanded mask), or None
    """

    dims: tuple[int, ...]
    parts: tuple[Value, ...]
    valid: Value | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def adjacent(self) -> bool:
        return self.dims == tuple(range(self.dims[0], self.dims[0] + len(self.dims)))

    @property
    def position(self) -> int:
        """Where the batch dims stand in the result: in place if adjacent, else in front."""
        return self.dims[0] if self.adjacent else 0

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        rest = [n for d, n in enumerate(shape) if d not in self.dims]
        return (*rest[: self.position], *self.batch, *rest[self.position :])

    def window_dims(self, rank: int) -> list[int]:
        """The result's dims that are not batch dims."""
        size = rank - len(self.dims) + len(self.batch)
        batch = range(self.position, self.position + len(self.batch))
        return [d for d in range(size) if d not in batch]


def _is_mask(index: Value | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _selection(
    b: OpBuilder,
    x: Value,
    dims: Sequence[int],
    indices: Sequence[Value],
    check: bool,
    valid: Value | None = None,
) -> Selection:
    """Wrap, check and broadcast integer indices of ``dims``."""
    parts = []
    for dim, index in zip(dims, indices, strict=True):
        size = x.shape[dim]
        if check:
            parts.append(checked_index(b, index, size, wrap=True))
        else:
            wrapped = b.select(b.lt(index, 0), b.add(index, size), index)
            parts.append(b.convert(wrapped, index_dtype(size)))
    shape = broadcast_shapes(*(p.shape for p in parts))
    parts = [b.broadcast_to(p, shape) for p in parts]
    if valid is not None:
        valid = b.broadcast_to(valid, shape)
    return Selection(tuple(dims), tuple(parts), valid)


def _merge_adjacent(b: OpBuilder, x: Value, at: Selection) -> tuple[Value, Value]:
    """View adjacent indexed dims as one dim; returns the value and addresses along that dim."""
    first, last = at.dims[0], at.dims[-1] + 1
    sizes = x.shape[first:last]
    merged = b.reshape(x, (*x.shape[:first], math.prod(sizes), *x.shape[last:]))
    return merged, linear_address(b, at.parts, sizes, at.valid)


def _gather_at(b: OpBuilder, x: Value, at: Selection) -> Value:
    if len(at.dims) == 1:
        return gather_rows(b, x, at.dims[0], at.parts[0])
    if x.numel == 0:
        return b.constant(0, x.dtype, at.result_shape(x.shape))
    dtype = max((p.dtype for p in at.parts), key=lambda d: d.itemsize)
    where = b.stack([b.convert(p, dtype) for p in at.parts], len(at.batch))
    if at.adjacent:
        return gather_windows(b, x, at.dims[0], where)
    return b.gather(
        x,
        where,
        offset_dims=at.window_dims(x.rank),
        collapsed=at.dims,
        start_index_map=at.dims,
        index_vector_dim=len(at.batch),
        slice_sizes=[1 if d in at.dims else n for d, n in enumerate(x.shape)],
    )


def _scatter_at(b: OpBuilder, x: Value, at: Selection, updates: Value, kind: str) -> Value:
    """Combine ``updates`` (shaped like the gather's result) into ``x``."""
    if at.adjacent:
        merged, address = _merge_adjacent(b, x, at)
        out = scatter_rows(b, merged, at.dims[0], address, updates, kind)
        return b.reshape(out, x.shape)
    parts = [b.convert(p, torch.int64) for p in at.parts]
    if at.valid is not None:
        parts = [b.select(at.valid, p, x.shape[d]) for p, d in zip(parts, at.dims, strict=True)]
    return b.scatter(
        x,
        b.stack(parts, len(at.batch)),
        updates,
        kind,
        update_window_dims=at.window_dims(x.rank),
        inserted=at.dims,
        scatter_dims=at.dims,
        index_vector_dim=len(at.batch),
    )


def _index(b: OpBuilder, x: Value, indices: Sequence[Value | None], check: bool) -> Value:
    if any(_is_mask(i) for i in indices):
        raise NotImplementedError("index: the size of a result picked by a mask is data-dependent")
    dims = [d for d, i in enumerate(indices) if i is not None]
    if not dims:
        return x
    return _gather_at(b, x, _selection(b, x, dims, [i for i in indices if i is not None], check))


@lower("aten.index.Tensor")
def index(b: OpBuilder, x: Value, indices: Sequence[Value | None]) -> Value:
    return _index(b, x, indices, check=True)


@lower("aten._unsafe_index.Tensor")
def unsafe_index(b: OpBuilder, x: Value, indices: Sequence[Value | None]) -> Value:
    return _index(b, x, indices, check=False)


# -- x[i, :, j] = values ---------------------------------------------------------------------


@lower("aten.index_put.default", "aten._index_put_impl.default")
def index_put(
    b: OpBuilder,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Value:
    """Masks need no data-dependent shape here: a write through a mask has the shape of ``x``."""
    values = b.convert(values, x.dtype)
    given = [i for i in indices if i is not None]
    if len(given) == 1 and _is_mask(given[0]):
        dim = next(d for d, i in enumerate(indices) if i is not None)
        return _put_masked(b, x, dim, b.convert(given[0], torch.bool), values, accumulate)
    if not given:
        values = b.broadcast_to(values, x.shape)
        return b.add(x, values) if accumulate else values
    at = _expand_masks(b, x, indices, values, check=not unsafe)
    if x.numel == 0 or 0 in at.batch:
        return x
    values = b.broadcast_to(values, at.result_shape(x.shape))
    return _combine(b, x, values, accumulate, at)


def _combine(b: OpBuilder, x: Value, values: Value, add: bool, at: Selection) -> Value:
    return accumulate(
        b, lambda v, u, kind: _scatter_at(b, v, at, u, kind), x, values, "add" if add else "set"
    )


@lower("aten._unsafe_index_put.default")
def unsafe_index_put(
    b: OpBuilder,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    return index_put(b, x, indices, values, accumulate, unsafe=True)


def _put_masked(b: OpBuilder, x: Value, dim: int, mask: Value, values: Value, add: bool) -> Value:
    """``x[:, mask] = values`` where the mask covers the dims from ``dim`` on: a selection.

    Values with one entry per True are read at the running count of True entries.
    """
    after = x.rank - dim - mask.rank
    picked = values.shape[-(after + 1)] if values.rank > after else 1
    total = x.shape[:dim] + (1,) * mask.rank + x.shape[dim + mask.rank :]
    if picked == 1:
        if values.rank > after:
            cut = values.rank - after
            ones = (1,) * mask.rank
            values = b.reshape(values, (*values.shape[: cut - 1], *ones, *values.shape[cut:]))
    else:
        flat = b.reshape(mask, (mask.numel,))
        order = cumulative_sum(b, b.convert(flat, index_dtype(mask.numel)))
        count = b.index_dim(order, 0, -1) if mask.numel else b.constant(0, torch.int32)
        b.note_bad_index(b.ne(count, picked))
        if picked == 0 or mask.numel == 0:
            return x
        place = b.reshape(b.clamp(b.sub(order, 1), 0, picked - 1), mask.shape)
        values = b.broadcast_to(values, (*total[:dim], picked, *total[dim + mask.rank :]))
        values = gather_rows(b, values, dim, place)
    values = b.broadcast_to(values, x.shape)
    hit = b.broadcast_in_dim(mask, x.shape, range(dim, dim + mask.rank))
    return b.select(hit, b.add(x, values) if add else values, x)


def _expand_masks(
    b: OpBuilder, x: Value, indices: Sequence[Value | None], values: Value, check: bool
) -> Selection:
    """Integer indices for a write; a mask becomes the coordinates of its True entries.

    Their number is that of the other indices or of the values if these say it; otherwise there are
    as many as the mask has elements, and the surplus is marked invalid.
    """
    dims: list[int] = []
    parts: list[Value] = []
    masks: list[tuple[int, Value]] = []
    dim = 0
    for i in indices:
        if i is None:
            dim += 1
        elif _is_mask(i):
            masks.append((dim, b.convert(i, torch.bool)))
            dim += i.rank
        else:
            dims.append(dim)
            parts.append(i)
            dim += 1
    if not masks:
        return _selection(b, x, dims, parts, check)
    others = broadcast_shapes(*(p.shape for p in parts)) if parts else ()
    covered = sorted(dims + [d + k for d, m in masks for k in range(m.rank)])
    length = others[-1] if others else 1
    if length == 1:
        position = covered[0] if covered == list(range(covered[0], covered[-1] + 1)) else 0
        after = x.rank - len(covered) - position
        length = values.shape[-(after + 1)] if values.rank > after else 1
    exact = length != 1
    if not exact:
        length = max(m.numel for _, m in masks)
    expanded = [nonzero_padded(b, mask) for _, mask in masks]
    for (start, mask), (where, count) in zip(masks, expanded, strict=True):
        single = b.eq(count, 1)
        if exact:
            b.note_bad_index(b.not_(b.or_(single, b.eq(count, length))))
        where = b.slice_dim(where, 0, 0, min(length, where.shape[0]))
        where = b.pad_dim(where, 0, 0, 0, length - where.shape[0])
        if where.numel:
            # A single True entry broadcasts against the other indices.
            where = b.select(single, b.slice_dim(where, 0, 0, 1), where)
        for k in range(mask.rank):
            dims.append(start + k)
            parts.append(b.index_dim(where, 1, k))
    valid = None
    if not exact:
        counts = b.stack([count for _, count in expanded], 0)
        longest, shortest = b.reduce(counts, "max", [0]), b.reduce(counts, "min", [0])
        used = b.select(b.eq(shortest, 0), 0, longest)
        valid = b.lt(b.iota((length,), 0), used)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    return _selection(b, x, [dims[i] for i in order], [parts[i] for i in order], check, valid)


# -- slices along one dim --------------------------------------------------------------------


@lower("aten.index_select.default", lift_0d=True)
def index_select(b: OpBuilder, x: Value, dim: int, index: Value) -> Value:
    dim = canonical_dim(dim, x.rank)
    return gather_rows(b, x, dim, checked_index(b, index, x.shape[dim]))


def _slice_updates(b: OpBuilder, x: Value, dim: int, index: Value, source: Value) -> Value:
    """``source`` with the slice shape that a write at ``index`` needs."""
    return b.reshape(source, (*x.shape[:dim], index.numel, *x.shape[dim + 1 :]))


@lower("aten.index_add.default", lift_0d=True)
def index_add(
    b: OpBuilder, x: Value, dim: int, index: Value, source: Value, *, alpha: Operand = 1
) -> Value:
    dim = canonical_dim(dim, x.rank)
    if index.numel == 0 or source.numel == 0:
        return x
    at = checked_index(b, index, x.shape[dim])
    source = _slice_updates(b, x, dim, index, source)
    if isinstance(alpha, Value) or alpha != 1:
        source = b.mul(source, alpha)
    return accumulate(b, lambda v, u, kind: scatter_rows(b, v, dim, at, u, kind), x, source, "add")


@lower("aten.index_copy.default", lift_0d=True)
def index_copy(b: OpBuilder, x: Value, dim: int, index: Value, source: Value) -> Value:
    dim = canonical_dim(dim, x.rank)
    if index.numel == 0 or source.numel == 0:
        return x
    at = checked_index(b, index, x.shape[dim])
    return scatter_rows(b, x, dim, at, _slice_updates(b, x, dim, index, source), "set")


@lower("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor", lift_0d=True)
def index_fill(b: OpBuilder, x: Value, dim: int, index: Value, value: Operand) -> Value:
    """A mask along ``dim`` selects: only ``x.shape[dim]`` flags are scattered."""
    dim = canonical_dim(dim, x.rank)
    if index.numel == 0:
        return x
    at = checked_index(b, index, x.shape[dim], wrap=True)
    none = b.constant(False, torch.bool, (x.shape[dim],))
    hit = scatter_flat(b, none, at, b.constant(True, torch.bool, at.shape), "set")
    if isinstance(value, Value):
        value = b.reshape(b.convert(value, x.dtype), ())
    return b.select(b.broadcast_in_dim(hit, x.shape, [dim]), value, x)


@lower("aten.index_reduce.default", lift_0d=True)
def index_reduce(
    b: OpBuilder,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    dim = canonical_dim(dim, x.rank)
    if index.numel == 0 or source.numel == 0:
        return x
    at = checked_index(b, index, x.shape[dim])
    source = _slice_updates(b, x, dim, index, source)
    flags = b.constant(0, torch.int32, (x.shape[dim],))
    ones = b.constant(1, torch.int32, at.shape)
    counts = scatter_flat(b, flags, at, ones, "add")
    counts = b.broadcast_in_dim(counts, x.shape, [dim])
    return reduce_into(
        b,
        lambda v, u, kind: scatter_rows(b, v, dim, at, u, kind),
        x,
        source,
        counts,
        reduce,
        include_self,
    )


REDUCTIONS = {
    "sum": "add",
    "add": "add",
    "prod": "mul",
    "multiply": "mul",
    "mean": "add",
    "amax": "max",
    "amin": "min",
}


def reduce_into(
    b: OpBuilder,
    scatter: Scatter,
    x: Value,
    source: Value,
    counts: Value | None,
    reduce: str,
    include_self: bool,
) -> Value:
    """Scatter ``source`` into ``x`` by a named reduction.

    ``counts`` tells how many entries each element of ``x`` receives (needed for mean and for
    ``include_self=False``, where a written element starts from the identity).
    """
    kind = REDUCTIONS[reduce]
    base = x
    if not include_self:
        assert counts is not None
        base = b.select(b.gt(counts, 0), b.identity(kind, x.dtype), x)
    if reduce != "mean":
        return accumulate(b, scatter, base, source, kind)
    assert counts is not None
    total = accumulate(b, scatter, base, source, kind)
    terms = b.add(counts, 1) if include_self else b.maximum(counts, 1)
    if x.is_float or x.is_complex:
        return b.div(total, b.convert(terms, x.dtype))
    terms = b.convert(terms, x.dtype)
    quotient = b.div(total, terms)
    if x.is_unsigned:
        return quotient
    inexact = b.ne(b.mul(quotient, terms), total)
    return b.select(b.and_(inexact, b.lt(total, 0)), b.sub(quotient, 1), quotient)


# -- flat addresses --------------------------------------------------------------------------


@lower("aten.take.default")
def take(b: OpBuilder, x: Value, index: Value) -> Value:
    at = checked_index(b, index, x.numel, wrap=True)
    return gather_rows(b, b.reshape(x, (x.numel,)), 0, at)


@lower("aten.put.default")
def put(b: OpBuilder, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    if index.numel == 0:
        return x
    at = checked_index(b, index, x.numel, wrap=True)
    source = b.reshape(source, index.shape)
    if x.numel == 0:
        return x
    return _put_flat(b, x, at, source, "add" if accumulate else "set")


def _put_flat(b: OpBuilder, x: Value, at: Value, source: Value, kind: str) -> Value:
    return accumulate(b, lambda v, u, k: scatter_flat(b, v, at, u, k), x, source, kind)
