"""Embedding tables: lookup, bags of rows, their gradients."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import (
    address_along,
    checked_index,
    cumulative_sum,
    gather_rows,
    index_dtype,
    scatter_flat,
    scatter_rows,
)
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

SUM, MEAN, MAX = 0, 1, 2


@lower("aten.embedding.default")
def embedding(
    b: OpBuilder,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return gather_rows(b, weight, 0, checked_index(b, indices, weight.shape[0]))


def _frequency(b: OpBuilder, index: Value, rows: int) -> Value:
    """How often each entry's own index occurs in ``index``, i32, shape of ``index``."""
    none = b.constant(0, torch.int32, (rows,))
    counts = scatter_flat(b, none, index, b.constant(1, torch.int32, index.shape), "add")
    return gather_rows(b, counts, 0, index)


def _table_gradient(
    b: OpBuilder, rows: Value, index: Value, size: int, padding_idx: int, by_frequency: bool
) -> Value:
    """Sum gradient ``rows`` [n, d] into a table [size, d]; the padding row gets none."""
    if by_frequency:
        counts = b.convert(_frequency(b, index, size), rows.dtype)
        rows = b.div(rows, b.broadcast_in_dim(counts, rows.shape, [0]))
    if 0 <= padding_idx < size:
        index = b.select(b.eq(index, padding_idx), size, index)
    table = b.constant(0, rows.dtype, (size, rows.shape[1]))
    return scatter_rows(b, table, 0, index, rows, "add")


@lower("aten.embedding_dense_backward.default")
def embedding_dense_backward(
    b: OpBuilder,
    grad: Value,
    indices: Value,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    if indices.numel == 0:
        return b.constant(0, grad.dtype, b.out_shape)
    rows = b.reshape(b.convert(grad, opmath_dtype(grad.dtype)), (indices.numel, b.out_shape[1]))
    index = b.reshape(checked_index(b, indices, num_weights), (indices.numel,))
    table = _table_gradient(b, rows, index, num_weights, padding_idx, scale_grad_by_freq)
    return b.convert(table, grad.dtype)


@lower("aten.embedding_renorm.default")
def embedding_renorm(
    b: OpBuilder, weight: Value, indices: Value, max_norm: float, norm_type: float
) -> Value:
    """Rows named by ``indices`` are scaled down to ``max_norm``; equal rows get equal values."""
    if indices.numel == 0 or weight.numel == 0:
        return weight
    index = b.reshape(checked_index(b, indices, weight.shape[0]), (indices.numel,))
    rows = gather_rows(b, weight, 0, index)
    wide = b.abs(b.convert(rows, opmath_dtype(weight.dtype)))
    if norm_type == float("inf"):
        norm = b.reduce(wide, "max", [1])
    elif norm_type == 0:
        norm = b.reduce(b.convert(b.ne(wide, 0), wide.dtype), "add", [1])
    elif norm_type == 1:
        norm = b.reduce(wide, "add", [1])
    elif norm_type == 2:
        norm = b.sqrt(b.reduce(b.mul(wide, wide), "add", [1]))
    else:
        norm = b.pow(b.reduce(b.pow(wide, norm_type), "add", [1]), 1.0 / norm_type)
    scale = b.select(b.gt(norm, max_norm), b.div(max_norm, b.add(norm, 1e-7)), 1.0)
    scale = b.broadcast_in_dim(b.convert(scale, weight.dtype), rows.shape, [0])
    return scatter_rows(b, weight, 0, index, b.mul(rows, scale), "set")


@lower("aten.one_hot.default")
def one_hot(b: OpBuilder, x: Value, num_classes: int = -1) -> Value:
    index = checked_index(b, x, num_classes)
    shape = b.out_shape
    index = b.broadcast_in_dim(index, shape, range(index.rank))
    return b.convert(b.eq(index, b.iota(shape, x.rank, index.dtype)), torch.int64)


# -- bags ------------------------------------------------------------------------------------


def _bag_of_entry(b: OpBuilder, offsets: Value, entries: int) -> Value:
    """[entries] i32/i64: the bag an entry lies in, counted from the ascending bag offsets."""
    dtype = index_dtype(max(entries, offsets.numel))
    steps = b.constant(0, dtype, (entries,))
    ones = b.constant(1, dtype, offsets.shape)
    starts = scatter_flat(b, steps, offsets, ones, "add")
    return b.sub(cumulative_sum(b, starts), 1)


def _bag_rows(b: OpBuilder, bag: Value, bags: int, values: Value, kind: str, start: Value) -> Value:
    """Combine ``values`` [n, …] into ``start`` [bags, …] by bag; entries past the last bag drop."""
    return scatter_rows(b, start, 0, bag, values, kind, sorted_indices=True)


def _padding_mask(b: OpBuilder, index: Value, rows: int, padding_idx: int) -> Value | None:
    """True for entries that count; None if all do."""
    if not 0 <= padding_idx < rows:
        return None
    return b.ne(index, padding_idx)


@lower("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    b: OpBuilder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> list[Value]:
    """Reduce bags of rows: the bags, each entry's bag, the bag sizes, the rows of the maxima."""
    (bags, width), _ = b.results[0]
    (bag_shape, bag_type), (size_shape, size_type), (max_shape, max_type) = b.results[1:]
    entries = indices.shape[0]
    compute = opmath_dtype(weight.dtype)
    if entries == 0 or bags == 0:
        return [
            b.constant(0, weight.dtype, (bags, width)),
            b.constant(0, bag_type, bag_shape),
            b.constant(0, size_type, size_shape),
            b.constant(0, max_type, max_shape),
        ]
    index = checked_index(b, indices, weight.shape[0])
    bag = _bag_of_entry(b, offsets, entries)
    counted = _padding_mask(b, index, weight.shape[0], padding_idx)
    ones = b.constant(1, torch.int32, (entries,))
    if counted is not None:
        ones = b.convert(counted, torch.int32)
    sizes = _bag_rows(b, bag, bags, ones, "add", b.constant(0, torch.int32, (bags,)))
    rows = b.convert(gather_rows(b, weight, 0, index), compute)
    maxima = b.constant(0, max_type, max_shape)
    if mode == MAX:
        out, maxima = _bag_maximum(b, rows, index, bag, counted, sizes, max_shape)
        maxima = b.convert(maxima, max_type)
    else:
        if per_sample_weights is not None:
            scale = b.convert(per_sample_weights, compute)
            rows = b.mul(rows, b.broadcast_in_dim(scale, rows.shape, [0]))
        if counted is not None:
            rows = b.select(b.broadcast_in_dim(counted, rows.shape, [0]), rows, 0)
        out = _bag_rows(b, bag, bags, rows, "add", b.constant(0, compute, (bags, width)))
        if mode == MEAN:
            terms = b.convert(b.maximum(sizes, 1), compute)
            out = b.div(out, b.broadcast_in_dim(terms, out.shape, [0]))
    # With a last offset the size table has one unused entry.
    sizes = b.pad_dim(sizes, 0, 0, 0, size_shape[0] - bags)
    bag = bag if bag_shape == (entries,) else b.constant(0, bag.dtype, bag_shape)
    return [
        b.convert(out, weight.dtype),
        b.convert(bag, bag_type),
        b.convert(sizes, size_type),
        maxima,
    ]


def _bag_maximum(
    b: OpBuilder,
    rows: Value,
    index: Value,
    bag: Value,
    counted: Value | None,
    sizes: Value,
    shape: tuple[int, ...],
) -> tuple[Value, Value]:
    """Per bag and column: the largest entry (0 for an empty bag) and the table row it stands in."""
    entries, width = rows.shape
    bags = sizes.shape[0]
    lowest = b.identity("max", rows.dtype)
    if counted is not None:
        counted = b.broadcast_in_dim(counted, rows.shape, [0])
        rows = b.select(counted, rows, lowest)
    start = b.broadcast_to(lowest, (bags, width))
    out = _bag_rows(b, bag, bags, rows, "max", start)
    # The first entry that equals its bag's maximum.
    own = gather_rows(b, out, 0, b.minimum(bag, bags - 1))
    place = b.iota((entries, width), 0, torch.int32)
    hit = b.or_(b.eq(rows, own), b.is_nan(rows))
    if counted is not None:
        hit = b.and_(hit, counted)
    place = b.select(hit, place, entries)
    first = _bag_rows(b, bag, bags, place, "min", b.constant(entries, torch.int32, (bags, width)))
    table_row = gather_rows(b, index, 0, b.minimum(first, entries - 1))
    filled = b.broadcast_in_dim(b.gt(sizes, 0), out.shape, [0])
    return b.select(filled, out, 0), b.reshape(b.select(filled, table_row, 0), shape)


@lower("aten._embedding_bag_dense_backward.default")
def embedding_bag_dense_backward(
    b: OpBuilder,
    grad: Value,
    indices: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    """Gradient of the table [num_weights, d] from the gradient of the bags."""
    if indices.numel == 0 or grad.numel == 0:
        return b.constant(0, grad.dtype, b.out_shape)
    wide = b.convert(grad, opmath_dtype(grad.dtype))
    bags = grad.shape[0]
    sizes = b.slice_dim(bag_size, 0, 0, bags)
    if mode == MAX:
        filled = b.broadcast_in_dim(b.gt(sizes, 0), grad.shape, [0])
        table = b.constant(0, wide.dtype, b.out_shape)
        address = address_along(b, b.out_shape, 0, maximum_indices)
        out = scatter_flat(b, table, address, b.select(filled, wide, 0), "add")
        return b.convert(out, grad.dtype)
    if mode == MEAN:
        terms = b.convert(b.maximum(sizes, 1), wide.dtype)
        wide = b.div(wide, b.broadcast_in_dim(terms, wide.shape, [0]))
    rows = gather_rows(b, wide, 0, offset2bag)
    if per_sample_weights is not None:
        scale = b.convert(per_sample_weights, wide.dtype)
        rows = b.mul(rows, b.broadcast_in_dim(scale, rows.shape, [0]))
    index = b.convert(indices, index_dtype(num_weights))
    out = _table_gradient(b, rows, index, num_weights, padding_idx, scale_grad_by_freq)
    return b.convert(out, grad.dtype)


def embedding_bag_backward(
    b: OpBuilder,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    """The same where the forward pass has not kept each entry's bag."""
    if offset2bag.numel != indices.numel:
        offset2bag = _bag_of_entry(b, offsets, indices.numel)
    return embedding_bag_dense_backward(
        b,
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lower("aten._embedding_bag_per_sample_weights_backward.default")
def embedding_bag_per_sample_weights_backward(
    b: OpBuilder,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int = -1,
) -> Value:
    """Each entry's weight gradient: its row of the table times the gradient of its bag."""
    entries = indices.numel
    if grad.numel == 0 or weight.numel == 0:
        return b.constant(0, grad.dtype, (entries,))
    if offset2bag.numel != entries:
        offset2bag = _bag_of_entry(b, offsets, entries)
    index = checked_index(b, indices, weight.shape[0])
    wide = opmath_dtype(grad.dtype)
    bags = b.convert(gather_rows(b, grad, 0, offset2bag), wide)
    rows = b.convert(gather_rows(b, weight, 0, index), wide)
    out = b.reduce(b.mul(bags, rows), "add", [1])
    counted = _padding_mask(b, index, weight.shape[0], padding_idx)
    if counted is not None:
        out = b.select(counted, out, 0)
    return b.convert(out, grad.dtype)


@lower("aten._embedding_bag_backward.default")
def aten_embedding_bag_backward(
    b: OpBuilder,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    """Inside a graph; a call of its own is composed in ``eager/read_back.py``."""
    if sparse:
        raise NotImplementedError("_embedding_bag_backward: no sparse gradients inside a program")
    return embedding_bag_backward(
        b,
        grad,
        indices,
        offsets,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )
