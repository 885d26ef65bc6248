"""Resizing of the last one to three dims: nearest, linear, cubic and antialiased, with gradients.

Every mode is separable and linear: along one dim it is a matrix (out, in) with a few entries a row.
A resize multiplies by these matrices, its gradient by their transposes; long dims gather instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.banded import banded_product
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

Ints = Sequence[int]
Tap = tuple[Value, Value]

# Beyond this input length a dense matrix costs more than gathering the few rows it names.
_LONGEST_MATRIX = 128


@dataclass(frozen=True)
class _Axis:
    """One resized dim. ``scale`` is the user's factor (out / in), if given."""

    size: int
    out: int
    scale: float | None
    align_corners: bool
    dtype: torch.dtype

    @property
    def step(self) -> float:
        """Input elements per output element."""
        if self.align_corners:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        if self.scale is not None and self.scale > 0:
            return 1.0 / self.scale
        return self.size / self.out

    def source(self, b: OpBuilder) -> Value:
        """Where each output element's centre falls in the input, (out,)."""
        place = b.iota((self.out,), 0, self.dtype)
        if self.align_corners:
            return b.mul(b.as_value(self.step, self.dtype), place)
        return b.sub(b.mul(b.as_value(self.step, self.dtype), b.add(place, 0.5)), 0.5)


# -- taps: which input elements an output element reads, and with what weight -------------------


def _linear_taps(b: OpBuilder, axis: _Axis) -> list[Tap]:
    source = b.maximum(axis.source(b), 0)
    low = b.minimum(b.convert(b.floor(source), torch.int32), axis.size - 1)
    high = b.minimum(b.add(low, 1), axis.size - 1)
    part = b.minimum(b.maximum(b.sub(source, b.convert(low, axis.dtype)), 0), 1)
    return [(low, b.sub(1, part)), (high, part)]


def cubic_weights(b: OpBuilder, t: Value, a: float = -0.75) -> list[Value]:
    """Keys' cubic convolution (1981): weights of the elements at -1, 0, 1, 2 for 0 <= t < 1."""

    def near(x: Value) -> Value:
        return b.add(b.mul(b.mul(b.sub(b.mul(x, a + 2), a + 3), x), x), 1)

    def far(x: Value) -> Value:
        return b.sub(b.mul(b.add(b.mul(b.sub(b.mul(x, a), 5 * a), x), 8 * a), x), 4 * a)

    rest = b.sub(1, t)
    return [far(b.add(t, 1)), near(t), near(rest), far(b.add(rest, 1))]


def _cubic_taps(b: OpBuilder, axis: _Axis) -> list[Tap]:
    source = axis.source(b)
    base = b.floor(source)
    weights = cubic_weights(b, b.sub(source, base))
    first = b.convert(base, torch.int32)
    return [(b.clamp(b.add(first, i - 1), 0, axis.size - 1), w) for i, w in enumerate(weights)]


def _matrix_of_taps(b: OpBuilder, taps: Sequence[Tap], axis: _Axis) -> Value:
    shape = (axis.out, axis.size)
    column = b.iota(shape, 1, torch.int32)
    total: Value | None = None
    for index, weight in taps:
        here = b.eq(column, b.broadcast_in_dim(index, shape, [0]))
        part = b.select(here, b.broadcast_in_dim(weight, shape, [0]), 0)
        total = part if total is None else b.add(total, part)
    assert total is not None
    return total


# -- antialiasing filters ----------------------------------------------------------------------


def _triangle(b: OpBuilder, x: Value) -> Value:
    return b.maximum(b.sub(1, b.abs(x)), 0)


def _keys(b: OpBuilder, x: Value) -> Value:
    a = -0.5
    size = b.abs(x)
    near = b.add(b.mul(b.mul(b.sub(b.mul(size, a + 2), a + 3), size), size), 1)
    far = b.sub(b.mul(b.add(b.mul(b.sub(b.mul(size, a), 5 * a), size), 8 * a), size), 4 * a)
    return b.select(b.lt(size, 1), near, b.select(b.lt(size, 2), far, 0))


def _lanczos(b: OpBuilder, x: Value) -> Value:
    def sinc(y: Value) -> Value:
        angle = b.mul(y, math.pi)
        safe = b.select(b.eq(angle, 0), 1, angle)
        return b.select(b.eq(angle, 0), 1, b.div(b.sin(safe), safe))

    inside = b.and_(b.ge(x, -3), b.lt(x, 3))
    return b.select(inside, b.mul(sinc(x), sinc(b.div(x, 3))), 0)


def _filter_matrix(
    b: OpBuilder, axis: _Axis, rule: Callable[[OpBuilder, Value], Value], width: int
) -> Value:
    """Rows of filter weights around each output's centre, stretched when shrinking, sum 1."""
    shape, dtype = (axis.out, axis.size), axis.dtype
    stretch = max(axis.step, 1.0)
    support = width * 0.5 * stretch
    centre = b.mul(b.add(b.iota((axis.out,), 0, dtype), 0.5), axis.step)
    start = b.maximum(b.convert(b.add(b.sub(centre, support), 0.5), torch.int32), 0)
    end = b.minimum(b.convert(b.add(b.add(centre, support), 0.5), torch.int32), axis.size)
    longest = math.ceil(support) * 2 + 1
    end = b.minimum(end, b.add(start, longest))
    column = b.iota(shape, 1, torch.int32)

    def rows(x: Value) -> Value:
        return b.broadcast_in_dim(x, shape, [0])

    inside = b.and_(b.ge(column, rows(start)), b.lt(column, rows(end)))
    distance = b.add(b.sub(b.convert(column, dtype), rows(centre)), 0.5)
    weights = b.select(inside, rule(b, b.mul(distance, 1.0 / stretch)), 0)
    total = b.reduce(weights, "add", [1], keepdim=True)
    total = b.select(b.eq(total, 0), 1, total)
    return b.div(weights, b.broadcast_to(total, shape))


# -- resizing ----------------------------------------------------------------------------------


def _contract(b: OpBuilder, x: Value, dim: int, matrix: Value, side: int) -> Value:
    """Contract x's ``dim`` with the matrix's ``side``; the matrix's other dim takes its place."""
    lead, tail = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    size, out = x.shape[dim], matrix.shape[1 - side]
    saved, b.matmul_precision = b.matmul_precision, "HIGHEST"
    if b.target != "cpu":
        # The TPU compiler takes three times as long over a formula fused into the product.
        (matrix,) = b.optimization_barrier(matrix)
        y = b.dot_general(b.reshape(x, (lead, size, tail)), matrix, ([1], [side]))
        y = b.transpose(y, [0, 2, 1])
    elif tail == 1:
        y = b.dot_general(b.reshape(x, (lead, size)), matrix, ([1], [side]))
    else:
        wide = b.broadcast_in_dim(matrix, (lead, *matrix.shape), [1, 2])
        y = b.dot_general(wide, b.reshape(x, (lead, size, tail)), ([1 + side], [1]), ([0], [0]))
    b.matmul_precision = saved
    return b.reshape(y, (*x.shape[:dim], out, *x.shape[dim + 1 :]))


def _take(b: OpBuilder, x: Value, dim: int, index: Value) -> Value:
    return b.gather(
        x,
        index,
        offset_dims=[d for d in range(x.rank) if d != dim],
        collapsed=[dim],
        start_index_map=[dim],
        index_vector_dim=1,
        slice_sizes=[1 if d == dim else n for d, n in enumerate(x.shape)],
    )


def _gathered(b: OpBuilder, x: Value, dim: int, taps: Sequence[Tap]) -> Value:
    total: Value | None = None
    for index, weight in taps:
        part = _take(b, x, dim, index)
        part = b.mul(part, b.broadcast_in_dim(weight, part.shape, [dim]))
        total = part if total is None else b.add(total, part)
    assert total is not None
    return total


@dataclass(frozen=True)
class _Mode:
    """How one family of ops fills its matrices; filters take precedence over taps."""

    taps: Callable[[OpBuilder, _Axis], list[Tap]] | None = None
    filter: Callable[[OpBuilder, Value], Value] | None = None
    width: int = 0

    def matrix(self, b: OpBuilder, axis: _Axis) -> Value:
        if self.filter is not None:
            return _filter_matrix(b, axis, self.filter, self.width)
        assert self.taps is not None
        return _matrix_of_taps(b, self.taps(b, axis), axis)


def _axes(
    sizes: Ints, out: Ints, scales: Sequence[float | None], align: bool, dtype: torch.dtype
) -> list[_Axis]:
    return [
        _Axis(size, count, scale, align, dtype)
        for size, count, scale in zip(sizes, out, scales, strict=True)
    ]


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    return opmath_dtype(dtype) if dtype.is_floating_point else torch.float32


def _contract_bytes(b: OpBuilder, x: Value, dim: int, matrix: Value) -> Value:
    """A pass over bytes (as i32) in PyTorch's fixed point: 16-bit weights, rounded and saturated.

    The weights get as many fractional bits, up to 22, as keep the largest below 2**15.
    """
    top = b.reduce(matrix, "max", [0, 1])
    bits = b.constant_array([2**p for p in range(1, 23)], torch.float32)
    fits = b.lt(b.floor(b.add(b.mul(bits, b.broadcast_to(top, bits.shape)), 0.5)), 2**15)
    shift = b.reduce(b.convert(fits, torch.int32), "add", [0])
    unit = b.shift_left(b.constant(1, torch.int32), shift)
    scaled = b.mul(matrix, b.broadcast_to(b.convert(unit, torch.float32), matrix.shape))
    half = b.select(b.lt(scaled, 0), b.constant(-0.5, torch.float32), 0.5)
    weights = b.convert(b.trunc(b.add(scaled, half)), torch.int32)
    total = _contract(b, x, dim, weights, 1)
    rounded = b.add(total, b.broadcast_to(b.div(unit, 2), total.shape))
    shifted = b.shift_right_arithmetic(rounded, b.broadcast_to(shift, total.shape))
    return b.clamp(shifted, 0, 255)


def _product(b: OpBuilder, x: Value, dim: int, mode: _Mode, axis: _Axis) -> Value:
    matrix, reading = mode.matrix(b, axis), None
    if mode.taps is not None:
        taps = mode.taps(b, axis)

        def reading() -> Value:
            return _gathered(b, x, dim, taps)

    return banded_product(b, x, dim, matrix, 1, lambda: _contract(b, x, dim, matrix, 1), reading)


def _resize(
    b: OpBuilder, x: Value, mode: _Mode, align: bool, scales: Sequence[float | None]
) -> Value:
    n = len(scales)
    dtype = _working_dtype(x.dtype)
    fixed = x.dtype is torch.uint8 and n == 2
    y = b.convert(x, torch.int32 if fixed else dtype)
    axes = _axes(x.shape[-n:], b.out_shape[-n:], scales, align, dtype)
    for i, axis in reversed(list(enumerate(axes))):
        dim = x.rank - n + i
        if axis.size == axis.out and mode.taps is _linear_taps:
            continue
        if fixed:
            y = _contract_bytes(b, y, dim, mode.matrix(b, axis))
        elif mode.taps is not None and axis.size > _LONGEST_MATRIX:
            y = _gathered(b, y, dim, mode.taps(b, axis))
        else:
            y = _product(b, y, dim, mode, axis)
    return b.convert(y, x.dtype)


def _gradient_product(b: OpBuilder, grad: Value, dim: int, matrix: Value) -> Value:
    return banded_product(b, grad, dim, matrix, 0, lambda: _contract(b, grad, dim, matrix, 0))


def _resize_gradient(
    b: OpBuilder,
    grad: Value,
    input_size: Ints,
    mode: _Mode,
    align: bool,
    scales: Sequence[float | None],
) -> Value:
    n = len(scales)
    dtype = _working_dtype(grad.dtype)
    y = b.convert(grad, dtype)
    axes = _axes(input_size[-n:], grad.shape[-n:], scales, align, dtype)
    for i, axis in enumerate(axes):
        if axis.size == axis.out and mode.taps is _linear_taps:
            continue
        y = _gradient_product(b, y, grad.rank - n + i, mode.matrix(b, axis))
    return b.convert(y, grad.dtype)


def _register(name: str, mode: _Mode, backward: bool = True) -> None:
    @lower(f"aten.{name}.default")
    def forward(
        b: OpBuilder,
        x: Value,
        output_size: Ints,
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _resize(b, x, mode, align_corners, scales)

    if not backward:
        return

    @lower(f"aten.{name}_backward")
    def gradient(
        b: OpBuilder,
        grad: Value,
        output_size: Ints,
        input_size: Ints,
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        return _resize_gradient(b, grad, input_size, mode, align_corners, scales)


_LINEAR = _Mode(taps=_linear_taps)

for _name, _mode in (
    ("upsample_linear1d", _LINEAR),
    ("upsample_bilinear2d", _LINEAR),
    ("upsample_trilinear3d", _LINEAR),
    ("upsample_bicubic2d", _Mode(taps=_cubic_taps)),
    ("_upsample_bilinear2d_aa", _Mode(filter=_triangle, width=2)),
    ("_upsample_bicubic2d_aa", _Mode(filter=_keys, width=4)),
):
    _register(_name, _mode)
_register("_upsample_lanczos2d_aa", _Mode(filter=_lanczos, width=6), backward=False)


# -- nearest -----------------------------------------------------------------------------------


def _f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32).item())


def _nearest_positions(axis: _Axis, exact: bool) -> list[int]:
    """The input element of each output element, in the float32 arithmetic PyTorch uses."""
    step = _f32(axis.step)
    if not exact and axis.out == axis.size:
        return list(range(axis.out))
    if not exact and axis.out == 2 * axis.size:
        return [i // 2 for i in range(axis.out)]
    shift = 0.5 if exact else 0.0
    return [min(math.floor(_f32((i + shift) * step)), axis.size - 1) for i in range(axis.out)]


def _repeat(axis: _Axis, positions: Sequence[int]) -> int:
    """How often each input element repeats if that is uniform, else 0."""
    times = axis.out // axis.size
    uniform = times * axis.size == axis.out
    return times if uniform and list(positions) == [i // times for i in range(axis.out)] else 0


def _nearest(b: OpBuilder, x: Value, exact: bool, scales: Sequence[float | None]) -> Value:
    n = len(scales)
    axes = _axes(x.shape[-n:], b.out_shape[-n:], scales, False, torch.float32)
    for i, axis in enumerate(axes):
        dim = x.rank - n + i
        positions = _nearest_positions(axis, exact)
        times = _repeat(axis, positions)
        if times == 1:
            continue
        if times:
            shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
            wide = b.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != dim + 1])
            x = b.reshape(wide, (*x.shape[:dim], axis.out, *x.shape[dim + 1 :]))
        else:
            x = _take(b, x, dim, b.constant_array(positions, torch.int32))
    return x


def _nearest_gradient(
    b: OpBuilder, grad: Value, input_size: Ints, exact: bool, scales: Sequence[float | None]
) -> Value:
    n = len(scales)
    dtype = _working_dtype(grad.dtype)
    y = b.convert(grad, dtype)
    axes = _axes(input_size[-n:], grad.shape[-n:], scales, False, dtype)
    for i, axis in enumerate(axes):
        dim = grad.rank - n + i
        positions = _nearest_positions(axis, exact)
        times = _repeat(axis, positions)
        if times == 1:
            continue
        if times:
            y = b.reshape(y, (*y.shape[:dim], axis.size, times, *y.shape[dim + 1 :]))
            y = b.reduce(y, "add", [dim + 1])
        else:
            index = b.constant_array(positions, torch.int32)
            ones = b.constant(1, dtype, (axis.out,))
            y = _contract(b, y, dim, _matrix_of_taps(b, [(index, ones)], axis), 0)
    return b.convert(y, grad.dtype)


def _register_nearest(name: str, exact: bool) -> None:
    @lower(f"aten.{name}.default")
    def forward(b: OpBuilder, x: Value, output_size: Ints, *scales: float | None) -> Value:
        return _nearest(b, x, exact, scales)

    @lower(f"aten.{name}_backward")
    def gradient(
        b: OpBuilder, grad: Value, output_size: Ints, input_size: Ints, *scales: float | None
    ) -> Value:
        return _nearest_gradient(b, grad, input_size, exact, scales)


for _n in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_n}d", exact=False)
    _register_nearest(f"_upsample_nearest_exact{_n}d", exact=True)
