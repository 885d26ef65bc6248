"""Max and average pooling over the last one to three dims, forward and backward.

Small windows are written as a fused sum (or maximum) of shifted slices, large ones as
``reduce_window``. Gradients run the other way: a window of stride s covers cells of s elements, so
its value is repeated over the cells it touches and shifted into place, without a scatter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.regions import lowest
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

Ints = Sequence[int]

# Windows of at most this many elements are unrolled.
_UNROLLED = 64


def expand(values: Ints, n: int, default: Ints = ()) -> tuple[int, ...]:
    """Options may be empty (the default) or one number for all pooled dims."""
    values = list(values) or list(default)
    return tuple(values * n if len(values) == 1 else values)


@dataclass(frozen=True)
class Windows:
    """Windows over the last ``n`` dims of sizes ``sizes``, one per element of ``out``."""

    sizes: tuple[int, ...]
    out: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.sizes)

    @property
    def area(self) -> int:
        return math.prod(self.window)

    def pads(self) -> list[tuple[int, int]]:
        """Padding (negative: cropping) after which the windows fit exactly."""
        return [
            (p, (m - 1) * s + (k - 1) * d + 1 - size - p)
            for size, m, k, s, p, d in zip(
                self.sizes,
                self.out,
                self.window,
                self.stride,
                self.padding,
                self.dilation,
                strict=True,
            )
        ]

    def offsets(self) -> list[tuple[int, ...]]:
        """Window offsets in row-major order."""
        return list(itertools.product(*(range(k) for k in self.window)))


def _windows(
    x_sizes: Ints,
    out: Ints,
    window: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    n: int,
) -> Windows:
    size = expand(window, n)
    return Windows(
        tuple(x_sizes[-n:]),
        tuple(out[-n:]),
        size,
        expand(stride, n, size),
        expand(padding, n),
        expand(dilation, n),
    )


def _padded(b: OpBuilder, x: Value, w: Windows, fill: float) -> Value:
    lead = [0] * (x.rank - w.n)
    pads = w.pads()
    return b.pad(x, fill, lead + [lo for lo, _ in pads], lead + [hi for _, hi in pads])


def _slices(b: OpBuilder, padded: Value, w: Windows) -> list[Value]:
    """For each window offset the elements it meets, in the shape of the result."""
    lead = padded.shape[: -w.n]
    out = []
    for offset in w.offsets():
        start = [o * d for o, d in zip(offset, w.dilation, strict=True)]
        limit = [a + (m - 1) * s + 1 for a, m, s in zip(start, w.out, w.stride, strict=True)]
        steps = [1] * len(lead) + list(w.stride)
        out.append(b.slice(padded, [0] * len(lead) + start, [*lead, *limit], steps))
    return out


def _full(values: Ints, rank: int, n: int) -> list[int]:
    return [1] * (rank - n) + list(values)


def flat_positions(b: OpBuilder, sizes: Ints) -> Value:
    """Row-major positions 0, 1, 2 … in the shape ``sizes`` (i32)."""
    return b.reshape(b.iota((math.prod(sizes),), 0, torch.int32), sizes)


# -- max pooling -------------------------------------------------------------------------------


def larger(b: OpBuilder, best: Value, at: Value, value: Value, where: Value) -> Value:
    """Whether (value, where) replaces (best, at): PyTorch takes the first maximum, the last NaN.

    Written for combiners of unspecified order.
    """
    first = b.and_(b.eq(value, best), b.lt(where, at))
    wins = b.or_(b.gt(value, best), first)
    if not value.is_float:
        return wins
    nan, best_nan = b.is_nan(value), b.is_nan(best)
    last = b.and_(nan, b.or_(b.not_(best_nan), b.gt(where, at)))
    return b.or_(b.and_(wins, b.not_(best_nan)), last)


def _starts(b: OpBuilder, w: Windows, first_valid: bool) -> Value:
    """Flat input position of each window's first element (or first one inside the input)."""
    total = b.constant(0, torch.int32, w.out)
    step = 1
    for axis in reversed(range(w.n)):
        start = b.sub(b.mul(b.iota(w.out, axis, torch.int32), w.stride[axis]), w.padding[axis])
        if first_valid and w.padding[axis]:
            d = w.dilation[axis]
            missing = b.div(b.add(b.maximum(b.neg(start), 0), d - 1), d)
            start = b.add(start, b.mul(missing, d))
        total = b.add(total, b.mul(start, step))
        step *= w.sizes[axis]
    return total


def _offset_position(w: Windows, offset: Ints) -> int:
    position, step = 0, 1
    for axis in reversed(range(w.n)):
        position += offset[axis] * w.dilation[axis] * step
        step *= w.sizes[axis]
    return position


def max_with_positions(b: OpBuilder, x: Value, w: Windows) -> tuple[Value, Value]:
    """(maxima, i32 flat positions in the pooled dims) of all windows."""
    fill = lowest(x.dtype)
    if w.area > _UNROLLED:
        places = b.broadcast_to(flat_positions(b, w.sizes), x.shape)
        x, places = _padded_crop(b, x, w), _padded_crop(b, places, w)
        pads = [(0, 0)] * (x.rank - w.n) + [(lo, max(hi, 0)) for lo, hi in w.pads()]
        best, at = b.reduce_window(
            [x, places],
            [b.constant(fill, x.dtype), b.constant(2**31 - 1, torch.int32)],
            lambda m, i, v, j: _pick(b, m, i, v, j),
            window=_full(w.window, x.rank, w.n),
            strides=_full(w.stride, x.rank, w.n),
            padding=pads,
            window_dilation=_full(w.dilation, x.rank, w.n),
        )
        return best, at
    shape = (*x.shape[: -w.n], *w.out)
    start = b.broadcast_to(_starts(b, w, False), shape)
    best = b.constant(fill, x.dtype, shape)
    at = b.broadcast_to(_starts(b, w, True), shape)
    for offset, value in zip(w.offsets(), _slices(b, _padded(b, x, w, fill), w), strict=True):
        take = b.gt(value, best)
        if value.is_float:
            take = b.or_(take, b.is_nan(value))
        best = b.select(take, value, best)
        at = b.select(take, b.add(start, _offset_position(w, offset)), at)
    return best, at


def _pick(b: OpBuilder, m: Value, i: Value, v: Value, j: Value) -> tuple[Value, Value]:
    take = larger(b, m, i, v, j)
    return b.select(take, v, m), b.select(take, j, i)


def _padded_crop(b: OpBuilder, x: Value, w: Windows) -> Value:
    """Drop what no window reaches; reduce_window takes no negative padding."""
    lead = [0] * (x.rank - w.n)
    return b.pad(x, 0, [0] * x.rank, lead + [min(hi, 0) for _, hi in w.pads()])


def _register_max_pool(n: int) -> None:
    @lower(f"aten.max_pool{n}d_with_indices")
    def forward(
        b: OpBuilder,
        x: Value,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = (0,),
        dilation: Ints = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Value, Value]:
        w = _windows(x.shape, b.out_shape, kernel_size, stride, padding, dilation, n)
        best, at = max_with_positions(b, x, w)
        return best, b.convert(at, b.results[1][1])

    @lower(f"aten.max_pool{n}d_with_indices_backward")
    def backward(
        b: OpBuilder,
        grad: Value,
        x: Value,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        w = _windows(x.shape, grad.shape, kernel_size, stride, padding, dilation, n)
        wide = b.convert(grad, opmath_dtype(grad.dtype))
        at = b.convert(indices, torch.int32)
        here = b.broadcast_to(flat_positions(b, w.sizes), x.shape)
        total = None
        for shift in _cell_shifts(w):
            placed = _cells(b, wide, w, shift, 0)
            chosen = b.eq(_cells(b, at, w, shift, -1), here)
            part = b.select(chosen, placed, 0)
            total = part if total is None else b.add(total, part)
        return b.convert(_or_zero(b, total, x), b.out_dtype)


def _or_zero(b: OpBuilder, total: Value | None, like: Value) -> Value:
    return b.constant(0, opmath_dtype(like.dtype), like.shape) if total is None else total


def _cell_shifts(w: Windows) -> list[tuple[int, ...]]:
    """By how many cells of one stride a window may reach beyond its own, in each dim."""
    spans = [(k - 1) * d + 1 for k, d in zip(w.window, w.dilation, strict=True)]
    return list(
        itertools.product(*(range(-(-span // s)) for span, s in zip(spans, w.stride, strict=True)))
    )


def _cells(b: OpBuilder, x: Value, w: Windows, shift: Ints, fill: float) -> Value:
    """Each window's value repeated over its cell, ``shift`` cells on, in the input's shape."""
    lead = x.shape[: -w.n]
    rank = len(lead)
    shape = [*lead, *itertools.chain(*zip(w.out, w.stride, strict=True))]
    dims = [*range(rank), *range(rank, rank + 2 * w.n, 2)]
    x = b.broadcast_in_dim(x, shape, dims)
    x = b.reshape(x, [*lead, *(m * s for m, s in zip(w.out, w.stride, strict=True))])
    low = [a * s - p for a, s, p in zip(shift, w.stride, w.padding, strict=True)]
    high = [size - m * s - lo for size, m, s, lo in zip(w.sizes, w.out, w.stride, low, strict=True)]
    return b.pad(x, fill, [0] * rank + low, [0] * rank + high)


# -- average pooling ---------------------------------------------------------------------------


def _counts(w: Windows, axis: int, count_include_pad: bool) -> list[int]:
    """Elements that the divisor counts, per window along one dim."""
    out = []
    size, pad = w.sizes[axis], w.padding[axis]
    for i in range(w.out[axis]):
        start = i * w.stride[axis] - pad
        end = min(start + w.window[axis], size + pad)
        if not count_include_pad:
            start, end = max(start, 0), min(end, size)
        out.append(end - start)
    return out


def _divided(
    b: OpBuilder, x: Value, w: Windows, count_include_pad: bool, divisor: int | None
) -> Value:
    """Window sums (or their gradients) over the number of elements of each window."""
    if divisor is not None:
        return b.div(x, divisor)
    uniform = 1
    for axis in range(w.n):
        counts = _counts(w, axis, count_include_pad)
        if len(set(counts)) == 1:
            uniform *= counts[0]
    factor: Value | int = uniform
    for axis in range(w.n):
        counts = _counts(w, axis, count_include_pad)
        if len(set(counts)) > 1:
            row = b.constant_array(counts, x.dtype)
            row = b.broadcast_in_dim(row, x.shape, [x.rank - w.n + axis])
            factor = b.mul(row, factor)
    return b.div(x, factor)


def _window_sums(b: OpBuilder, x: Value, w: Windows) -> Value:
    if w.area <= _UNROLLED:
        slices = _slices(b, _padded(b, x, w, 0), w)
        total = slices[0]
        for value in slices[1:]:
            total = b.add(total, value)
        return total
    x = _padded_crop(b, x, w)
    if w.window == w.sizes == x.shape[-w.n :] and set(w.out) == {1} and not any(w.padding):
        return b.reduce(x, "add", range(x.rank - w.n, x.rank), keepdim=True)
    (total,) = b.reduce_window(
        [x],
        [b.constant(0, x.dtype)],
        "add",
        window=_full(w.window, x.rank, w.n),
        strides=_full(w.stride, x.rank, w.n),
        padding=[(0, 0)] * (x.rank - w.n) + [(lo, max(hi, 0)) for lo, hi in w.pads()],
    )
    return total


def _spread_sums(b: OpBuilder, grad: Value, w: Windows) -> Value:
    """The adjoint of :func:`_window_sums`."""
    total = None
    for shift in _cell_shifts(w):
        # A window that is no multiple of its stride ends inside the last cell.
        shape = [*grad.shape[: -w.n], *(m * s for m, s in zip(w.out, w.stride, strict=True))]
        plain = [0] * w.n
        part = _cells(
            b,
            grad,
            Windows(tuple(shape[-w.n :]), w.out, w.window, w.stride, tuple(plain), w.dilation),
            plain,
            0,
        )
        for axis in range(w.n):
            reach = w.window[axis] - shift[axis] * w.stride[axis]
            if reach < w.stride[axis]:
                place = b.remainder(
                    b.iota(part.shape, part.rank - w.n + axis, torch.int32), w.stride[axis]
                )
                part = b.select(b.lt(place, reach), part, 0)
        low = [a * s - p for a, s, p in zip(shift, w.stride, w.padding, strict=True)]
        high = [n - m - lo for n, m, lo in zip(w.sizes, shape[-w.n :], low, strict=True)]
        lead = [0] * (grad.rank - w.n)
        part = b.pad(part, 0, lead + low, lead + high)
        total = part if total is None else b.add(total, part)
    assert total is not None
    return total


def _register_avg_pool(n: int) -> None:
    def windows(sizes: Ints, out: Ints, kernel_size: Ints, stride: Ints, padding: Ints) -> Windows:
        return _windows(sizes, out, kernel_size, stride, padding, (1,), n)

    @lower(f"aten.avg_pool{n}d")
    def forward(
        b: OpBuilder,
        x: Value,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        w = windows(x.shape, b.out_shape, kernel_size, stride, padding)
        total = _window_sums(b, b.convert(x, opmath_dtype(x.dtype)), w)
        return b.convert(_divided(b, total, w, count_include_pad, divisor_override), x.dtype)

    @lower(f"aten.avg_pool{n}d_backward")
    def backward(
        b: OpBuilder,
        grad: Value,
        x: Value,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        w = windows(x.shape, grad.shape, kernel_size, stride, padding)
        wide = b.convert(grad, opmath_dtype(grad.dtype))
        share = _divided(b, wide, w, count_include_pad, divisor_override)
        return b.convert(_spread_sums(b, share, w), b.out_dtype)


for _n in (2, 3):
    _register_max_pool(_n)
    _register_avg_pool(_n)
