"""Bins and sorted sequences: searchsorted, bucketize, histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value

# -- searching sorted sequences --------------------------------------------------------------


def _common_dtype(sequence: Value, value: Operand) -> torch.dtype:
    """The dtype in which a sequence meets the searched values (numbers adapt to the sequence)."""
    if isinstance(value, Value) and not value.weak and value.rank:
        return torch.promote_types(sequence.dtype, value.dtype)
    fractional = value.is_float if isinstance(value, Value) else isinstance(value, float)
    if fractional and not sequence.is_float:
        weak = not isinstance(value, Value) or value.weak
        return torch.get_default_dtype() if weak else value.dtype  # type: ignore[union-attr]
    return sequence.dtype


def lower_bound(b: OpBuilder, sequence: Value, value: Value, right: bool) -> Value:
    """Insertion positions (i32) of ``value`` [rows, m] in ``sequence`` [rows or 1, n], row by row.

    ``right`` puts equal values before the position, else after.
    """
    rows, n = value.shape[0], sequence.shape[1]
    passes = b.gt if right else b.ge
    if n == 0:
        return b.constant(0, torch.int32, value.shape)
    if n <= 256 and n * value.numel <= 1 << 20:
        full = (rows, value.shape[1], n)
        entries = b.broadcast_in_dim(sequence, full, [0, 2])
        before = b.not_(passes(entries, b.broadcast_in_dim(value, full, [0, 1])))
        return b.reduce(b.convert(before, torch.int32), "add", [2])

    def halve(_: Value, low: Value, high: Value, seq: Value, val: Value) -> list[Value]:
        middle = b.shift_right_arithmetic(b.add(low, high), 1)
        inside = b.minimum(middle, n - 1)
        entry = (
            b.take_rows(b.reshape(seq, (n,)), inside)
            if seq.shape[0] == 1
            else b.take_along(seq, 1, inside)
        )
        open_ = b.lt(low, high)
        up = b.not_(passes(entry, val))
        low = b.select(b.and_(open_, up), b.add(middle, 1), low)
        return [low, b.select(b.and_(open_, b.not_(up)), middle, high), seq, val]

    low = b.constant(0, torch.int32, value.shape)
    high = b.constant(n, torch.int32, value.shape)
    return b.fori(n.bit_length(), [low, high, sequence, value], halve)[0]


def _search(b: OpBuilder, sequence: Value, value: Operand, right: bool) -> Value:
    dtype = _common_dtype(sequence, value)
    wanted = b.as_value(value, dtype)
    n = sequence.shape[-1]
    rows = 1 if sequence.rank == 1 else math.prod(sequence.shape[:-1])
    table = b.reshape(b.convert(sequence, dtype), (rows, n))
    if wanted.is_bool:
        table, wanted = b.convert(table, torch.uint8), b.convert(wanted, torch.uint8)
    columns = wanted.numel // rows if rows else 0
    found = lower_bound(b, table, b.reshape(wanted, (rows, columns)), right)
    return b.convert(b.reshape(found, b.out_shape), b.out_dtype)


@lower("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    b: OpBuilder,
    sequence: Value,
    value: Operand,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        order = b.check_index(sorter, sequence.shape[-1])
        sequence = b.take_along(sequence, sequence.rank - 1, order)
    return _search(b, sequence, value, right or side == "right")


@lower("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(
    b: OpBuilder, value: Operand, sequence: Value, out_int32: bool = False, right: bool = False
) -> Value:
    if sequence.rank != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({sequence.rank})")
    return _search(b, sequence, value, right)


# -- counting --------------------------------------------------------------------------------


def tally(b: OpBuilder, cell: Value, weight: Value | None, cells: int, dtype: torch.dtype) -> Value:
    """How many entries (or how much weight) of the 1-d ``cell`` fall on each of ``cells``.

    Entries outside [0, cells) count nowhere. Few cells are compared with every entry, which
    vectorises; many are scattered into.
    """
    amount = b.constant(1, dtype, cell.shape) if weight is None else b.convert(weight, dtype)
    if cells * cell.numel <= 1 << 20:
        grid = (cell.numel, cells)
        hit = b.eq(b.broadcast_in_dim(cell, grid, [0]), b.iota(grid, 1, cell.dtype))
        return b.reduce(b.select(hit, b.broadcast_in_dim(amount, grid, [0]), 0), "add", [0])
    outside = b.or_(b.lt(cell, 0), b.ge(cell, cells))
    return b.scatter(
        b.constant(0, dtype, (cells,)),
        b.select(outside, cells, cell),
        amount,
        "add",
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        index_vector_dim=1,
    )


def linear_edges(b: OpBuilder, low: Value, high: Value, bins: int) -> Value:
    """``bins + 1`` equally spaced edges, counted from the nearer end as ``torch.linspace`` does."""
    i = b.iota((bins + 1,), 0, low.dtype)
    step = b.div(b.sub(high, low), bins)
    up = b.add(low, b.mul(i, step))
    down = b.sub(high, b.mul(b.sub(bins, i), step))
    return b.select(b.lt(i, (bins + 1) // 2), up, down)


def _inside(b: OpBuilder, x: Value, low: Value, high: Value) -> Value:
    return b.and_(b.ge(x, low), b.le(x, high))


def _linear_cell(b: OpBuilder, x: Value, low: Value, high: Value, bins: int) -> Value:
    """The bin of each element among equal bins (i32); -1 outside [low, high]."""
    inside = _inside(b, x, low, high)
    ratio = b.div(b.mul(b.sub(x, low), bins), b.sub(high, low))
    cell = b.convert(b.select(inside, ratio, 0), torch.int32)
    return b.select(inside, b.minimum(cell, bins - 1), -1)


def _edge_cell(b: OpBuilder, x: Value, edges: Value) -> Value:
    """The bin of each element between increasing edges (i32); the last bin is closed."""
    n = edges.shape[0]
    low, high = b.index_dim(edges, 0, 0), b.index_dim(edges, 0, n - 1)
    found = lower_bound(b, b.reshape(edges, (1, n)), b.reshape(x, (1, x.numel)), right=True)
    cell = b.minimum(b.sub(b.reshape(found, x.shape), 1), n - 2)
    return b.select(_inside(b, x, low, high), cell, -1)


def _data_range(b: OpBuilder, x: Value, spread: float) -> tuple[Value, Value]:
    """Smallest and largest element, widened by ``spread`` on both sides when they coincide."""
    if x.numel == 0:
        return b.constant(0, x.dtype), b.constant(1, x.dtype)
    low, high = b.reduce(x, "min", [0]), b.reduce(x, "max", [0])
    same = b.eq(low, high)
    return b.select(same, b.sub(low, spread), low), b.select(same, b.add(high, spread), high)


@lower("aten.histc", promote="result")
def histc(b: OpBuilder, x: Value, bins: int = 100, min: Operand = 0, max: Operand = 0) -> Value:
    x = b.reshape(x, (x.numel,))
    low, high = b.as_value(min, x.dtype), b.as_value(max, x.dtype)
    given = b.ne(low, high)
    if x.numel:
        low = b.select(given, low, b.reduce(x, "min", [0]))
        high = b.select(given, high, b.reduce(x, "max", [0]))
    same = b.eq(low, high)
    low = b.select(same, b.sub(low, 1), low)
    high = b.select(same, b.add(high, 1), high)
    return tally(b, _linear_cell(b, x, low, high, bins), None, bins, x.dtype)


def _range_edges(
    b: OpBuilder, x: Value, bins: Sequence[int], range: Sequence[float] | None
) -> list[Value]:
    """The edges of every column of ``x`` [n, d], from ``range`` or from the data."""
    edges = []
    for d, count in enumerate(bins):
        if range is None:
            low, high = _data_range(b, b.index_dim(x, 1, d), 0.5)
        else:
            first, last = range[2 * d], range[2 * d + 1]
            spread = 0.5 if first == last else 0.0
            low, high = b.constant(first - spread, x.dtype), b.constant(last + spread, x.dtype)
        edges.append(linear_edges(b, low, high, count))
    return edges


def _histogram(
    b: OpBuilder, x: Value, edges: Sequence[Value], weight: Value | None, density: bool
) -> Value:
    """Counts of the rows of ``x`` [n, d] over the grid that ``edges`` span."""
    bins = [e.shape[0] - 1 for e in edges]
    flat = b.constant(0, torch.int32, (x.shape[0],))
    outside = b.constant(False, torch.bool, (x.shape[0],))
    for d, edge in enumerate(edges):
        cell = _edge_cell(b, b.index_dim(x, 1, d), edge)
        outside = b.or_(outside, b.lt(cell, 0))
        flat = b.add(b.mul(flat, bins[d]), cell)
    if weight is not None:
        weight = b.reshape(weight, (weight.numel,))
    cells = math.prod(bins)
    counts = b.reshape(tally(b, b.select(outside, -1, flat), weight, cells, x.dtype), bins)
    if density:
        counts = b.div(counts, b.reduce(counts, "add", range(len(bins))))
        for d, edge in enumerate(edges):
            width = b.sub(b.slice_dim(edge, 0, 1, bins[d] + 1), b.slice_dim(edge, 0, 0, bins[d]))
            counts = b.div(counts, b.broadcast_in_dim(width, bins, [d]))
    return counts


def _rows(b: OpBuilder, x: Value) -> Value:
    """The last dim holds coordinates: [n, d]."""
    return b.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@lower(
    "aten.histogram.bin_ct",
    specs=lambda x, bins=100, *_: [((bins,), x.dtype), ((bins + 1,), x.dtype)],
)
def histogram_count(
    b: OpBuilder,
    x: Value,
    bins: int = 100,
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> tuple[Value, Value]:
    x = b.reshape(x, (x.numel, 1))
    edges = _range_edges(b, x, [bins], range)
    return _histogram(b, x, edges, weight, density), edges[0]


@lower(
    "aten.histogram.bins_tensor",
    specs=lambda x, bins, *_: [((bins.numel - 1,), x.dtype), (bins.shape, x.dtype)],
)
def histogram_edges(
    b: OpBuilder, x: Value, bins: Value, weight: Value | None = None, density: bool = False
) -> tuple[Value, Value]:
    return _histogram(b, b.reshape(x, (x.numel, 1)), [bins], weight, density), bins


def _one_count_a_dim(x: Value, bins: Sequence[object]) -> None:
    if len(bins) != x.shape[-1]:
        raise RuntimeError(
            "histogramdd: The size of bins must be equal to the innermost dimension of the input."
        )


@lower(
    "aten._histogramdd_bin_edges",
    specs=lambda x, bins, *_: [((n + 1,), x.dtype) for n in bins],
)
def histogramdd_bin_edges(
    b: OpBuilder,
    x: Value,
    bins: Sequence[int],
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> list[Value]:
    _one_count_a_dim(x, bins)
    return _range_edges(b, _rows(b, x), bins, range)


@lower("aten._histogramdd_from_bin_cts", specs=lambda x, bins, *_: [(tuple(bins), x.dtype)])
def histogramdd_from_bin_counts(
    b: OpBuilder,
    x: Value,
    bins: Sequence[int],
    range: Sequence[float] | None = None,
    weight: Value | None = None,
    density: bool = False,
) -> Value:
    _one_count_a_dim(x, bins)
    rows = _rows(b, x)
    return _histogram(b, rows, _range_edges(b, rows, bins, range), weight, density)


@lower(
    "aten._histogramdd_from_bin_tensors",
    specs=lambda x, bins, *_: [(tuple(e.shape[0] - 1 for e in bins), x.dtype)],
)
def histogramdd_from_bin_tensors(
    b: OpBuilder,
    x: Value,
    bins: Sequence[Value],
    weight: Value | None = None,
    density: bool = False,
) -> Value:
    _one_count_a_dim(x, bins)
    return _histogram(b, _rows(b, x), bins, weight, density)
