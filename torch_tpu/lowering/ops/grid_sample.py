"""Sampling an image or a volume at the points of a grid, with both gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.upsample import cubic_weights
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

LINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


# -- coordinates: values come with their slope with respect to the grid ------------------------


def _unnormalised(b: OpBuilder, g: Value, size: int, align: bool) -> tuple[Value, float]:
    """[-1, 1] to pixel positions, and the constant slope."""
    if align:
        slope = (size - 1) / 2.0
        return b.mul(b.add(g, 1), slope), slope
    return b.mul(b.sub(b.mul(b.add(g, 1), size), 1), 0.5), size / 2.0


def _reflected(b: OpBuilder, x: Value, size: int, align: bool) -> tuple[Value, Value]:
    """Reflect into the image; the slope is 1 or -1."""
    low, high = (0.0, 2.0 * (size - 1)) if align else (-1.0, 2.0 * size - 1)
    if low == high:
        zero = b.constant(0, x.dtype, x.shape)
        return zero, zero
    start, span = low / 2, (high - low) / 2
    away = b.sub(x, start)
    negative = b.lt(away, 0)
    away = b.abs(away)
    extra = b.remainder(away, span)
    flips = b.floor(b.div(away, span))
    even = b.eq(b.remainder(flips, 2.0), 0)
    value = b.select(even, b.add(extra, start), b.add(b.sub(span, extra), start))
    slope = b.select(b.xor(even, negative), b.constant(1, x.dtype), b.constant(-1, x.dtype))
    return value, slope


def _clipped(b: OpBuilder, x: Value, size: int) -> tuple[Value, Value]:
    """Clamp to the image; the slope is 1 strictly inside, else 0."""
    inside = b.and_(b.gt(x, 0), b.lt(x, size - 1))
    return b.clamp(x, 0, size - 1), b.convert(inside, x.dtype)


def _padded(b: OpBuilder, x: Value, size: int, padding: int, align: bool) -> tuple[Value, Value]:
    slope = b.constant(1, x.dtype, x.shape)
    if padding == REFLECTION:
        x, slope = _reflected(b, x, size, align)
    if padding != ZEROS:
        x, inside = _clipped(b, x, size)
        slope = b.mul(slope, inside)
    return x, slope


class _Image:
    """Rows of channels at integer positions: x (N, C, *sizes) seen as (N, prod(sizes), C)."""

    def __init__(self, b: OpBuilder, x: Value) -> None:
        self.b = b
        self.sizes = x.shape[2:]
        self.batch, self.channels = x.shape[:2]
        flat = b.reshape(x, (self.batch, self.channels, math.prod(self.sizes)))
        self.rows = b.transpose(flat, [0, 2, 1])

    def locate(self, place: Sequence[Value]) -> tuple[Value, Value]:
        """(flat index, whether it lies inside) of float positions (N, P) per dim."""
        b = self.b
        inside = b.constant(True, torch.bool, place[0].shape)
        flat = b.constant(0, torch.int32, place[0].shape)
        for p, size in zip(place, self.sizes, strict=True):
            within = b.and_(b.ge(p, 0), b.le(p, size - 1))
            inside = b.and_(inside, within)
            safe = b.select(within, p, 0)
            flat = b.add(b.mul(flat, size), b.convert(safe, torch.int32))
        return flat, inside

    def read(self, place: Sequence[Value]) -> Value:
        """(N, P, C) values, 0 outside."""
        b = self.b
        flat, inside = self.locate(place)
        values = b.gather(
            self.rows,
            b.unsqueeze(flat, 2),
            offset_dims=[2],
            collapsed=[1],
            start_index_map=[1],
            index_vector_dim=2,
            slice_sizes=[1, 1, self.channels],
            operand_batching=[0],
            indices_batching=[0],
        )
        return b.select(_column(b, inside, values), values, 0)

    def add(self, total: Value, place: Sequence[Value], updates: Value) -> Value:
        """``total`` (N, prod(sizes), C) with updates (N, P, C) added where inside."""
        b = self.b
        flat, inside = self.locate(place)
        return b.scatter(
            total,
            b.unsqueeze(flat, 2),
            b.select(_column(b, inside, updates), updates, 0),
            "add",
            update_window_dims=[2],
            inserted=[1],
            scatter_dims=[1],
            index_vector_dim=2,
            operand_batching=[0],
            indices_batching=[0],
        )

    def from_rows(self, rows: Value) -> Value:
        flat = self.b.transpose(rows, [0, 2, 1])
        return self.b.reshape(flat, (self.batch, self.channels, *self.sizes))


def _column(b: OpBuilder, x: Value, like: Value) -> Value:
    """(N, P) over (N, P, C)."""
    return b.broadcast_in_dim(x, like.shape, [0, 1])


# A sampled point is a sum of taps: integer positions, a weight, and the weight's slope with
# respect to each of the point's positions.
Tap = tuple[list[Value], Value, list[Value]]


def _taps(
    b: OpBuilder,
    points: Sequence[Value],
    sizes: Sequence[int],
    mode: int,
    padding: int,
    align: bool,
) -> tuple[list[Tap], list[Value]]:
    """Taps of all points (N, P) per dim, and the slope of each position with the grid."""
    raw = [_unnormalised(b, g, size, align) for g, size in zip(points, sizes, strict=True)]
    if mode == CUBIC:
        slopes = [b.constant(s, x.dtype, x.shape) for x, s in raw]
        bases = [b.floor(x) for x, _ in raw]
        parts = [b.sub(x, base) for (x, _), base in zip(raw, bases, strict=True)]
        weights = [cubic_weights(b, t) for t in parts]
        rises = [_cubic_slopes(b, t) for t in parts]
        columns = [
            [_padded(b, b.add(base, i - 1), size, padding, align)[0] for i in range(4)]
            for base, size in zip(bases, sizes, strict=True)
        ]
        return _products(b, columns, weights, rises), slopes
    positions, slopes = [], []
    for (x, slope), size in zip(raw, sizes, strict=True):
        x, inner = _padded(b, x, size, padding, align)
        positions.append(x)
        slopes.append(b.mul(inner, slope))
    if mode == NEAREST:
        one = b.constant(1, points[0].dtype, points[0].shape)
        none = [b.constant(0, one.dtype, one.shape)] * len(sizes)
        return [([b.round_even(x) for x in positions], one, none)], slopes
    columns, weights, rises = [], [], []
    for x in positions:
        base = b.floor(x)
        t = b.sub(x, base)
        one = b.constant(1, x.dtype, x.shape)
        columns.append([base, b.add(base, 1)])
        weights.append([b.sub(1, t), t])
        rises.append([b.neg(one), one])
    return _products(b, columns, weights, rises), slopes


def _cubic_slopes(b: OpBuilder, t: Value, a: float = -0.75) -> list[Value]:
    """Derivatives of :func:`cubic_weights` with respect to t."""

    def near(x: Value) -> Value:
        return b.mul(b.sub(b.mul(x, 3 * (a + 2)), 2 * (a + 3)), x)

    def far(x: Value) -> Value:
        return b.add(b.mul(b.sub(b.mul(x, 3 * a), 10 * a), x), 8 * a)

    rest = b.sub(1, t)
    return [far(b.add(t, 1)), near(t), b.neg(near(rest)), b.neg(far(b.add(rest, 1)))]


def _products(
    b: OpBuilder,
    columns: Sequence[Sequence[Value]],
    weights: Sequence[Sequence[Value]],
    rises: Sequence[Sequence[Value]],
) -> list[Tap]:
    """The tensor product of one-dimensional taps."""
    n = len(columns)
    taps = []
    for choice in itertools.product(*(range(len(c)) for c in columns)):
        place = [columns[d][i] for d, i in enumerate(choice)]
        factors = [weights[d][i] for d, i in enumerate(choice)]
        slopes = []
        for d in range(n):
            slope = rises[d][choice[d]]
            for other in range(n):
                slope = slope if other == d else b.mul(slope, factors[other])
            slopes.append(slope)
        weight = factors[0]
        for factor in factors[1:]:
            weight = b.mul(weight, factor)
        taps.append((place, weight, slopes))
    return taps


def _points(b: OpBuilder, grid: Value, dtype: torch.dtype) -> list[Value]:
    """Grid (N, *out, n) as one (N, P) value per dim, slowest dim first (grids store x first)."""
    n = grid.shape[-1]
    flat = b.reshape(b.convert(grid, dtype), (grid.shape[0], math.prod(grid.shape[1:-1]), n))
    return [b.index_dim(flat, 2, n - 1 - d) for d in range(n)]


@lower("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(
    b: OpBuilder, x: Value, grid: Value, mode: int, padding: int, align_corners: bool
) -> Value:
    """x (N, C, *s) sampled at grid (N, *out, n) -> (N, C, *out)."""
    dtype = opmath_dtype(x.dtype)
    image = _Image(b, b.convert(x, dtype))
    taps, _ = _taps(b, _points(b, grid, dtype), image.sizes, mode, padding, align_corners)
    total: Value | None = None
    for place, weight, _ in taps:
        values = image.read(place)
        part = b.mul(values, _column(b, weight, values))
        total = part if total is None else b.add(total, part)
    assert total is not None
    return b.convert(b.reshape(b.transpose(total, [0, 2, 1]), b.out_shape), x.dtype)


@lower("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sampler_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    grid: Value,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> list[Value]:
    """Gradients of x (if asked for) and grid; PyTorch's shape rule always delivers the latter."""
    dtype = opmath_dtype(x.dtype)
    image = _Image(b, b.convert(x, dtype))
    points = _points(b, grid, dtype)
    taps, slopes = _taps(b, points, image.sizes, mode, padding, align_corners)
    flat = b.reshape(b.convert(grad, dtype), (*grad.shape[:2], math.prod(grad.shape[2:])))
    rows = b.transpose(flat, [0, 2, 1])
    want_x = output_mask[0]
    total = b.constant(0, dtype, image.rows.shape)
    sums = [b.constant(0, dtype, p.shape) for p in points]
    for place, weight, rises in taps:
        if want_x:
            total = image.add(total, place, b.mul(rows, _column(b, weight, rows)))
        if mode != NEAREST:
            along = b.reduce(b.mul(image.read(place), rows), "add", [2])
            sums = [b.add(s, b.mul(along, r)) for s, r in zip(sums, rises, strict=True)]
    out = [b.convert(image.from_rows(total), x.dtype)] if want_x else []
    if len(b.results) > len(out):
        scaled = [b.mul(s, slope) for s, slope in zip(sums, slopes, strict=True)]
        grid_grad = b.reshape(b.stack(scaled[::-1], 2), grid.shape)
        out.append(b.convert(grid_grad, grid.dtype))
    return out
