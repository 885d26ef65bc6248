"""Pairwise distances between rows, products of three tensors, small reductions to one flag."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

# From this many rows on PyTorch takes 2-norms through a matrix product.
_PRODUCT_ROWS = 25


def _pairs(b: OpBuilder, x: Value, y: Value) -> Value:
    """Differences (…, P, R, M) of rows x (…, P, M) and y (…, R, M); fused into what reads them."""
    return b.sub(b.unsqueeze(x, -2), b.unsqueeze(y, -3))


def _norm(b: OpBuilder, difference: Value, p: float) -> Value:
    """The p-norm over the last dim."""
    last = [difference.rank - 1]
    size = b.abs(difference)
    if p == 0:
        return b.reduce(b.convert(b.ne(size, 0.0), size.dtype), "add", last)
    if p == 1:
        return b.reduce(size, "add", last)
    if p == 2:
        return b.sqrt(b.reduce(b.mul(size, size), "add", last))
    if math.isinf(p):
        return b.reduce(size, "max", last, init=0.0)
    return b.pow(b.reduce(b.pow(size, p), "add", last), 1.0 / p)


def _norm_gradient(b: OpBuilder, difference: Value, grad: Value, norm: Value, p: float) -> Value:
    """d norm / d difference times ``grad`` for each component; 0 where the norm is 0."""
    grad, norm = b.unsqueeze(grad, -1), b.unsqueeze(norm, -1)
    size = b.abs(difference)
    if p == 0:
        return b.constant(0, difference.dtype, difference.shape)
    if p == 1:
        return b.mul(b.sign(difference), grad)
    if math.isinf(p):
        return b.select(b.eq(size, norm), b.mul(b.sign(difference), grad), 0.0)
    usable = b.ne(norm, 0.0)
    safe = b.select(usable, norm, 1.0)
    if p == 2:
        out = b.mul(difference, b.div(grad, safe))
    elif p < 2:
        moved = b.ne(size, 0.0)
        power = b.pow(b.select(moved, size, 1.0), p - 1)
        slope = b.select(moved, b.mul(b.sign(difference), power), 0.0)
        out = b.mul(slope, b.div(grad, b.pow(safe, p - 1)))
    else:
        out = b.mul(b.mul(difference, b.pow(size, p - 2)), b.div(grad, b.pow(safe, p - 1)))
    return b.select(usable, out, 0.0)


def _euclidean(b: OpBuilder, x: Value, y: Value) -> Value:
    """2-norms by |x|² + |y|² - 2 x·y; the product is exact in float32 (cancellation)."""
    saved, b.matmul_precision = b.matmul_precision, "HIGHEST"
    lead = list(range(x.rank - 2))
    cross = b.dot_general(x, y, ([x.rank - 1], [y.rank - 1]), (lead, lead))
    b.matmul_precision = saved
    squares = [b.reduce(b.mul(v, v), "add", [v.rank - 1]) for v in (x, y)]
    total = b.add(b.unsqueeze(squares[0], -1), b.unsqueeze(squares[1], -2))
    return b.sqrt(b.maximum(b.sub(total, b.mul(cross, 2.0)), 0.0))


def _expand_batches(b: OpBuilder, x: Value, y: Value) -> tuple[Value, Value]:
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return (
        b.broadcast_to(x, (*batch, *x.shape[-2:])),
        b.broadcast_to(y, (*batch, *y.shape[-2:])),
    )


@lower("aten._cdist_forward")
def cdist(b: OpBuilder, x: Value, y: Value, p: float, compute_mode: int | None) -> Value:
    """Distances (…, P, R) of rows x (…, P, M), y (…, R, M); mode 1 forces the matrix product for
    the 2-norm, 2 forbids it."""
    x, y = _expand_batches(b, x, y)
    large = max(x.shape[-2], y.shape[-2]) > _PRODUCT_ROWS
    if x.shape[-1] == 0:
        return b.constant(0, b.out_dtype, b.out_shape)
    if p == 2 and (compute_mode == 1 or (not compute_mode and large)):
        return _euclidean(b, x, y)
    return _norm(b, _pairs(b, x, y), p)


@lower("aten._cdist_backward")
def cdist_backward(
    b: OpBuilder, grad: Value, x: Value, y: Value, p: float, distances: Value
) -> Value:
    x, y = _expand_batches(b, x, y)
    batch = x.shape[:-2]
    grad, distances = (b.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (grad, distances))
    if y.shape[-2] == 0 or 0 in batch:  # nothing to sum up: zeros like x before broadcasting
        return b.constant(0, b.out_dtype, b.out_shape)
    parts = _norm_gradient(b, _pairs(b, x, y), grad, distances, p)
    return b.reshape(b.reduce(parts, "add", [parts.rank - 2]), b.out_shape)


# -- distances within one set ----------------------------------------------------------------


def _pair_of(b: OpBuilder, n: int) -> tuple[Value, Value]:
    """Rows (i, j), i < j, of each place in the condensed order, computed from the place."""
    count = n * (n - 1) // 2
    place = b.iota((count,), 0, torch.int64)
    # Row i starts at i (2n - i - 1) / 2: solve for i, then repair the rounding of the root.
    span = 2 * n - 1
    inside = b.sub(float(span * span), b.mul(b.convert(place, torch.float64), 8.0))
    row = b.convert(b.floor(b.mul(b.sub(float(span), b.sqrt(inside)), 0.5)), torch.int64)

    def start(i: Value) -> Value:
        return b.div(b.mul(i, b.sub(span, i)), 2)

    row = b.select(b.gt(start(row), place), b.sub(row, 1), row)
    row = b.select(b.le(start(b.add(row, 1)), place), b.add(row, 1), row)
    return row, b.add(b.sub(place, start(row)), b.add(row, 1))


@lower("aten._pdist_forward")
def pdist(b: OpBuilder, x: Value, p: float = 2.0) -> Value:
    """Condensed distances (n (n - 1) / 2,) of the rows of x (n, m)."""
    n = x.shape[0]
    if x.shape[1] == 0:
        return b.constant(0, b.out_dtype, b.out_shape)
    square = _norm(b, _pairs(b, x, x), p)
    row, column = _pair_of(b, n)
    return b.take_rows(b.reshape(square, (n * n,)), b.add(b.mul(row, n), column))


@lower("aten._pdist_backward")
def pdist_backward(b: OpBuilder, grad: Value, x: Value, p: float, distances: Value) -> Value:
    n = x.shape[0]
    if n < 2 or grad.numel == 0:
        return b.constant(0, b.out_dtype, b.out_shape)
    row, column = (b.iota((n, n), d, torch.int64) for d in (0, 1))
    first, second = b.minimum(row, column), b.maximum(row, column)
    start = b.div(b.mul(first, b.sub(2 * n - 1, first)), 2)
    place = b.add(start, b.sub(b.sub(second, first), 1))
    other = b.ne(row, column)
    place = b.select(other, place, 0)
    square_grad = b.select(other, b.take_rows(grad, place), 0.0)
    square = b.select(other, b.take_rows(distances, place), 0.0)
    parts = _norm_gradient(b, _pairs(b, x, x), square_grad, square, p)
    return b.reduce(parts, "add", [1])


# -- attention input -------------------------------------------------------------------------


def _qkv_specs(qkv: Value, bias: Value, heads: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    batch, length, width = qkv.shape
    return [((batch, heads, length, width // 3 // heads), qkv.dtype)] * 3


@lower("aten._transform_bias_rescale_qkv", specs=_qkv_specs)
def transform_bias_rescale_qkv(b: OpBuilder, qkv: Value, bias: Value, heads: int) -> list[Value]:
    """(B, T, 3 D) plus bias as q / sqrt(D / heads), k, v of shape (B, heads, T, D / heads)."""
    batch, length, width = qkv.shape
    size = width // 3 // heads
    work = opmath_dtype(qkv.dtype)
    x = b.add(b.convert(qkv, work), b.convert(bias, work))
    x = b.transpose(b.reshape(x, (batch, length, 3, heads, size)), [2, 0, 3, 1, 4])
    q, k, v = (b.index_dim(x, 0, i) for i in range(3))
    q = b.mul(q, 1.0 / math.sqrt(size))
    return [b.convert(part, qkv.dtype) for part in (q, k, v)]


# -- products of three tensors ---------------------------------------------------------------


class _Labelled:
    """A tensor whose dims carry numbers of a common index space."""

    def __init__(self, b: OpBuilder, value: Value, labels: Sequence[int]) -> None:
        self.b, self.value, self.labels = b, value, list(labels)

    def summed(self, gone: set[int]) -> _Labelled:
        """Without the labels in ``gone``."""
        dims = [i for i, label in enumerate(self.labels) if label in gone]
        if not dims:
            return self
        kept = [label for label in self.labels if label not in gone]
        return _Labelled(self.b, self.b.reduce(self.value, "add", dims), kept)

    def times(self, other: _Labelled, gone: set[int]) -> _Labelled:
        """The product over common labels, those in ``gone`` contracted."""
        x, y = self.summed(gone - set(other.labels)), other.summed(gone - set(self.labels))
        common = [label for label in x.labels if label in y.labels]
        contract = [label for label in common if label in gone]
        batch = [label for label in common if label not in gone]
        value = self.b.dot_general(
            x.value,
            y.value,
            ([x.labels.index(c) for c in contract], [y.labels.index(c) for c in contract]),
            ([x.labels.index(c) for c in batch], [y.labels.index(c) for c in batch]),
        )
        free = [c for c in x.labels + y.labels if c not in common]
        return _Labelled(self.b, value, batch + free)


@lower("aten._trilinear")
def trilinear(
    b: OpBuilder,
    x: Value,
    y: Value,
    z: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """sum over ``sumdim`` of x * y * z, each with the dims of its ``expand`` list inserted."""
    rank = x.rank + len(expand1)
    gone = set(sumdim)
    work = opmath_dtype(b.out_dtype)

    def labelled(value: Value, expand: Sequence[int]) -> _Labelled:
        return _Labelled(b, b.convert(value, work), [d for d in range(rank) if d not in expand])

    first, second, third = labelled(x, expand1), labelled(y, expand2), labelled(z, expand3)
    pair = first.times(second, gone - set(third.labels))
    out = pair.times(third, gone)
    order = sorted(range(len(out.labels)), key=lambda i: out.labels[i])
    return b.convert(b.reshape(b.transpose(out.value, order), b.out_shape), b.out_dtype)


# -- one flag --------------------------------------------------------------------------------


@lower("aten._is_all_true")
def is_all_true(b: OpBuilder, x: Value) -> Value:
    return b.reduce(x, "and", range(x.rank))


@lower("aten._is_any_true")
def is_any_true(b: OpBuilder, x: Value) -> Value:
    return b.reduce(x, "or", range(x.rank))
