"""Reductions over segments, and jagged rows to padded ones and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, canonical_dim, opmath_dtype

_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_COMBINE = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min"}


def _bounds(b: OpBuilder, lengths: Value | None, offsets: Value | None) -> Value:
    """Segment bounds (batch, segments + 1) from lengths (…, segments) or offsets."""
    if offsets is not None:
        return b.reshape(b.convert(offsets, torch.int64), (-1, offsets.shape[-1]))
    if lengths is None:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined")
    n = lengths.shape[-1]
    counts = b.reshape(b.convert(lengths, torch.int64), (-1, n))
    (ends,) = b.reduce_window(
        [counts],
        [b.constant(0, torch.int64)],
        "add",
        window=[1, n],
        padding=[(0, 0), (n - 1, 0)],
    )
    return b.pad_dim(ends, 1, 0, 1, 0)


def _segment_of(b: OpBuilder, bounds: Value, length: int) -> Value:
    """The segment (batch, length) of each position by binary search; -1 or the number of
    segments for positions outside all of them."""
    batch, n = bounds.shape
    place = b.iota((batch, length), 1, torch.int64)
    passed = b.constant(0, torch.int64, (batch, length))
    for bit in reversed(range(n.bit_length())):
        further = b.add(passed, 1 << bit)
        probe = b.minimum(b.sub(further, 1), n - 1)
        here = b.le(b.take_along(bounds, 1, probe), place)
        passed = b.select(b.and_(here, b.le(further, n)), further, passed)
    return b.sub(passed, 1)


class _Segments:
    """Data of shape (batch, length, inner) with the segment of every position."""

    def __init__(
        self, b: OpBuilder, data: Value, axis: int, lengths: Value | None, offsets: Value | None
    ) -> None:
        self.b = b
        axis = canonical_dim(axis, data.rank)
        self.axis, self.shape = axis, data.shape
        self.batch, self.length = math.prod(data.shape[:axis]), data.shape[axis]
        self.inner = math.prod(data.shape[axis + 1 :])
        self.bounds = _bounds(b, lengths, offsets)
        self.count = self.bounds.shape[1] - 1
        segment = _segment_of(b, self.bounds, self.length)
        self.inside = b.and_(b.ge(segment, 0), b.lt(segment, self.count))
        first = b.mul(b.iota(segment.shape, 0, torch.int64), self.count)
        # Rows that belong to no segment point past the end, where a scatter drops them.
        self.rows = b.select(self.inside, b.add(segment, first), self.batch * self.count)

    def flat(self, x: Value) -> Value:
        """(…, length or segments, …) as (batch * that, inner)."""
        return self.b.reshape(x, (-1, self.inner))

    def reduce(self, x: Value, kind: str, start: Operand) -> Value:
        """Combine rows (batch * length, inner) by segment: (batch * segments, inner)."""
        b = self.b
        out = b.full((self.batch * self.count, self.inner), start, x.dtype)
        rows = b.reshape(self.rows, (self.batch * self.length, 1))
        return b.scatter(
            out,
            rows,
            x,
            kind,
            update_window_dims=[1],
            inserted=[0],
            scatter_dims=[0],
            index_vector_dim=1,
        )

    def spread(self, x: Value) -> Value:
        """Values by segment (batch * segments, inner) to the rows of each segment."""
        b = self.b
        rows = b.minimum(b.reshape(self.rows, (-1,)), max(self.batch * self.count - 1, 0))
        return b.take_rows(x, rows)

    def sizes(self, dtype: torch.dtype) -> Value:
        """Segment lengths (batch * segments, 1)."""
        b, n = self.b, self.count
        ends = b.slice_dim(self.bounds, 1, 1, n + 1)
        sizes = b.sub(ends, b.slice_dim(self.bounds, 1, 0, n))
        return b.reshape(b.convert(sizes, dtype), (-1, 1))


@lower("aten.segment_reduce")
def segment_reduce(
    b: OpBuilder,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    indices: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Operand | None = None,
) -> Value:
    """Reduce data (…, length, …) along ``axis`` over consecutive segments."""
    if indices is not None:
        raise RuntimeError("segment_reduce(): indices based reduction is not supported yet.")
    work = opmath_dtype(data.dtype)
    segments = _Segments(b, data, axis, lengths, offsets)
    x = segments.flat(b.convert(data, work))
    start = _START[reduce] if initial is None else b.as_value(initial, work)
    out = segments.reduce(x, _COMBINE[reduce], start)
    if reduce == "mean":
        sizes = segments.sizes(work)
        empty = b.constant(math.nan, work) if initial is None else b.as_value(initial, work)
        out = b.select(b.gt(sizes, 0.0), b.div(out, b.maximum(sizes, 1.0)), empty)
    return b.convert(b.reshape(out, b.out_shape), b.out_dtype)


@lower("aten._segment_reduce_backward")
def segment_reduce_backward(
    b: OpBuilder,
    grad: Value,
    output: Value,
    data: Value,
    reduce: str,
    *,
    lengths: Value | None = None,
    offsets: Value | None = None,
    axis: int = 0,
    initial: Operand | None = None,
) -> Value:
    """The gradient of the data. As in PyTorch, equal extrema share it evenly if it is positive and
    get all of it each if it is negative."""
    work = opmath_dtype(data.dtype)
    segments = _Segments(b, data, axis, lengths, offsets)
    g, out, x = (segments.flat(b.convert(v, work)) for v in (grad, output, data))
    if reduce == "mean":
        g = b.div(g, segments.sizes(work))
    if reduce in ("max", "min"):
        best = segments.spread(out)
        hit = b.or_(b.eq(x, best), b.and_(b.is_nan(x), b.is_nan(best)))
        ties = segments.reduce(b.convert(hit, work), "add", 0.0)
        shared = b.select(b.gt(g, 0.0), b.div(g, b.maximum(ties, 1.0)), g)
        part = b.select(hit, segments.spread(shared), 0.0)
    elif reduce == "prod":
        start = 1.0 if initial is None else b.as_value(initial, work)
        part = b.mul(segments.spread(g), _others(b, segments, x, out, start))
    else:
        part = segments.spread(g)
    inside = b.reshape(segments.inside, (-1, 1))
    part = b.select(inside, part, 0.0)
    return b.convert(b.reshape(part, data.shape), data.dtype)


def _others(b: OpBuilder, segments: _Segments, x: Value, out: Value, start: Operand) -> Value:
    """The product of a segment without this element; zeros and NaNs are counted, not divided by."""
    nan, zero = b.is_nan(x), b.eq(x, 0.0)
    special = b.or_(nan, zero)
    rest = segments.spread(segments.reduce(b.select(special, 1.0, x), "mul", start))

    def more(flag: Value) -> Value:
        """Whether another element of the segment has the flag too."""
        own = b.convert(flag, x.dtype)
        return b.gt(segments.spread(segments.reduce(own, "add", 0.0)), own)

    without = b.select(more(nan), math.nan, b.select(more(zero), 0.0, rest))
    return b.select(special, without, b.div(segments.spread(out), b.select(special, 1.0, x)))


# -- jagged rows -----------------------------------------------------------------------------


def _only(name: str, offsets: Sequence[Value]) -> Value:
    if len(offsets) != 1:
        raise NotImplementedError(f"{name}: {len(offsets)} jagged dims; only one is supported")
    return offsets[0]


@lower("aten._jagged_to_padded_dense_forward", operand=("padding_value",))
def jagged_to_padded_dense(
    b: OpBuilder,
    values: Value,
    offsets: Sequence[Value],
    max_lengths: Sequence[int],
    padding_value: Operand = 0.0,
) -> Value:
    """Rows (total, …) as (batch, max length, …); what is longer is cut."""
    bounds = b.convert(_only("_jagged_to_padded_dense_forward", offsets), torch.int64)
    batch, length = bounds.shape[0] - 1, max_lengths[0]
    starts = b.reshape(b.slice_dim(bounds, 0, 0, batch), (batch, 1))
    ends = b.reshape(b.slice_dim(bounds, 0, 1, batch + 1), (batch, 1))
    rows = b.add(starts, b.iota((batch, length), 1, torch.int64))
    fill = b.as_value(padding_value, values.dtype)
    if values.shape[0] == 0:
        return b.broadcast_to(fill, b.out_shape)
    inside = b.lt(rows, b.broadcast_to(ends, rows.shape))
    gathered = b.take_rows(values, b.minimum(rows, values.shape[0] - 1))
    inside = b.reshape(inside, (batch, length, *[1] * (values.rank - 1)))
    return b.select(inside, gathered, fill)


def padded_dense_to_jagged(
    b: OpBuilder, dense: Value, offsets: Sequence[Value], total: int
) -> Value:
    """(batch, max length, …) as rows (total, …); rows beyond the padding are 0."""
    bounds = b.convert(_only("_padded_dense_to_jagged_forward", offsets), torch.int64)
    count = b.out_shape[0]
    segment = b.reshape(_segment_of(b, b.reshape(bounds, (1, -1)), count), (count,))
    batch, length = dense.shape[:2]
    owner = b.maximum(b.minimum(segment, batch - 1), 0)
    place = b.sub(b.iota((count,), 0, torch.int64), b.take_rows(bounds, owner))
    inside = b.and_(b.lt(segment, batch), b.lt(place, length))
    flat = b.reshape(dense, (batch * length, *dense.shape[2:]))
    source = b.add(b.mul(owner, length), b.maximum(b.minimum(place, length - 1), 0))
    inside = b.reshape(inside, (count, *[1] * (dense.rank - 2)))
    return b.select(inside, b.take_rows(flat, source), b.constant(0, dense.dtype))
