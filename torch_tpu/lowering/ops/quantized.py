"""Scaled float8 matrix products; fake quantisation for quantisation-aware training.

int4 packed products are not here: their packed layouts belong to a CPU's vector width or to CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, canonical_dim, opmath_dtype

# -- products --------------------------------------------------------------------------------


def _scaled_product(
    b: OpBuilder,
    x: Value,
    y: Value,
    scale_x: Value,
    scale_y: Value,
    bias: Value | None,
) -> Value:
    """float8 (m, k) @ (k, n) with scales for the tensor (one element) or for rows and columns."""
    out = b.matmul(b.convert(x, torch.float32), b.convert(y, torch.float32))
    for scale, rows in ((scale_x, True), (scale_y, False)):
        if scale.numel == 1:
            scale = b.reshape(scale, ())
        elif scale.numel == (out.shape[0] if rows else out.shape[1]):
            scale = b.reshape(scale, (-1, 1) if rows else (1, -1))
        else:
            raise NotImplementedError(
                f"_scaled_mm_v2: scales of shape {scale.shape} for a product of shape {out.shape}; "
                "expected one scale for the tensor or one for each row or column"
            )
        out = b.mul(out, b.convert(scale, torch.float32))
    if bias is not None:
        out = b.add(out, b.convert(bias, torch.float32))
    return b.convert(out, b.out_dtype)


def _v2_specs(x: Value, y: Value, *values: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    dtype = values[7]
    return [((x.shape[0], y.shape[1]), dtype if isinstance(dtype, torch.dtype) else x.dtype)]


# PyTorch's own rule asks for a column-major second operand; a value has no strides.
@lower("aten._scaled_mm_v2", specs=_v2_specs)
def scaled_mm_v2(
    b: OpBuilder,
    x: Value,
    y: Value,
    scale_a: Sequence[Value],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Value],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Value | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Value:
    """Recipes 0 (tensor-wise) and 1 (row-wise)."""
    if not {*recipe_a, *recipe_b} <= {0, 1} or len(scale_a) != 1 or len(scale_b) != 1:
        raise NotImplementedError(
            "_scaled_mm_v2: only tensor-wise and row-wise scales are supported"
        )
    return _scaled_product(b, x, y, scale_a[0], scale_b[0], bias)


# -- fake quantisation -----------------------------------------------------------------------


def _along(b: OpBuilder, x: Value, rank: int, axis: int | None) -> Value:
    """A parameter as a broadcastable float32 tensor: one number, or one for each channel."""
    x = b.convert(x, torch.float32)
    if axis is None:
        return b.reshape(x, ())
    return b.reshape(x, [-1 if d == axis else 1 for d in range(rank)])


class _Grid:
    """The quantisation grid of ``x``: scale and zero point broadcast against it, in float32."""

    def __init__(
        self,
        b: OpBuilder,
        x: Value,
        scale: Value,
        zero_point: Value,
        limits: tuple[int, int],
        fractional: bool = False,
    ) -> None:
        self.b, self.scale, self.zero_point = b, scale, zero_point
        self.low, self.high = float(limits[0]), float(limits[1])
        self.work = opmath_dtype(x.dtype)
        self.x = b.convert(x, self.work)
        self.scale = b.convert(scale, self.work)
        self.zero_point = b.convert(zero_point, self.work)
        scaled = b.mul(self.x, b.div(1.0, self.scale))
        if fractional:
            level = b.round_even(b.add(scaled, self.zero_point))
        else:
            level = b.add(b.round_even(scaled), self.zero_point)
        # A NaN is below the grid, as the CPU's integer conversion has it.
        self.level = b.select(b.is_nan(level), -float("inf"), level)
        self.inside = b.and_(b.ge(self.level, self.low), b.le(self.level, self.high))

    def output(self) -> Value:
        clamped = self.b.clamp(self.level, self.low, self.high)
        return self.b.mul(self.b.sub(clamped, self.zero_point), self.scale)

    def gradients(self, grad: Value, factor: float) -> tuple[Value, Value, Value]:
        """Gradients by element for x, scale and zero point (straight-through)."""
        b = self.b
        grad = b.convert(grad, self.work)
        low, high = (b.constant(v, self.work) for v in (self.low, self.high))
        edge = b.select(b.lt(self.level, self.low), low, high)
        error = b.div(b.sub(self.output(), self.x), self.scale)
        by_scale = b.select(self.inside, error, b.sub(edge, self.zero_point))
        by_zero = b.select(self.inside, 0.0, b.neg(self.scale))
        return (
            b.select(self.inside, grad, 0.0),
            b.mul(b.mul(grad, by_scale), factor),
            b.mul(b.mul(grad, by_zero), factor),
        )


def _like_with_mask(x: Value, *_: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(x.shape, x.dtype), (x.shape, torch.bool)]


@lower(
    "aten.fake_quantize_per_tensor_affine_cachemask",
    operand=("scale", "zero_point"),
    specs=_like_with_mask,
)
def fake_quantize_tensor(
    b: OpBuilder, x: Value, scale: Operand, zero_point: Operand, low: int, high: int
) -> list[Value]:
    f32 = torch.float32
    grid = _Grid(b, x, b.as_value(scale, f32), b.as_value(zero_point, f32), (low, high))
    return [b.convert(grid.output(), x.dtype), grid.inside]


@lower("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams", specs=_like_with_mask)
def fake_quantize_tensor_parameters(
    b: OpBuilder, x: Value, scale: Value, zero_point: Value, enabled: Value, low: int, high: int
) -> list[Value]:
    grid = _Grid(
        b, x, _along(b, scale, x.rank, None), _along(b, zero_point, x.rank, None), (low, high)
    )
    on = b.ne(b.reshape(enabled, ()), 0)
    mask = b.or_(grid.inside, b.not_(on))
    return [b.select(on, b.convert(grid.output(), x.dtype), x), mask]


@lower("aten.fake_quantize_per_channel_affine_cachemask", specs=_like_with_mask)
def fake_quantize_channel(
    b: OpBuilder, x: Value, scale: Value, zero_point: Value, axis: int, low: int, high: int
) -> list[Value]:
    axis = canonical_dim(axis, x.rank)
    scales, zeros = _along(b, scale, x.rank, axis), _along(b, zero_point, x.rank, axis)
    grid = _Grid(b, x, scales, zeros, (low, high), fractional=zero_point.is_float)
    return [b.convert(grid.output(), x.dtype), grid.inside]


def _learnt_zero(
    b: OpBuilder, zero_point: Value, rank: int, axis: int | None, low: int, high: int
) -> Value:
    """A learnt zero point, rounded and clamped to the grid."""
    zero = _along(b, zero_point, rank, axis)
    return b.clamp(b.round_even(zero), float(low), float(high))


@lower("aten._fake_quantize_learnable_per_tensor_affine", specs=lambda x, *_: [(x.shape, x.dtype)])
def fake_quantize_learnable_tensor(
    b: OpBuilder,
    x: Value,
    scale: Value,
    zero_point: Value,
    low: int,
    high: int,
    factor: float = 1.0,
) -> Value:
    zero = _learnt_zero(b, zero_point, x.rank, None, low, high)
    grid = _Grid(b, x, _along(b, scale, x.rank, None), zero, (low, high))
    return b.convert(grid.output(), x.dtype)


@lower("aten._fake_quantize_learnable_per_channel_affine", specs=lambda x, *_: [(x.shape, x.dtype)])
def fake_quantize_learnable_channel(
    b: OpBuilder,
    x: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    low: int,
    high: int,
    factor: float = 1.0,
) -> Value:
    axis = canonical_dim(axis, x.rank)
    zero = _learnt_zero(b, zero_point, x.rank, axis, low, high)
    grid = _Grid(b, x, _along(b, scale, x.rank, axis), zero, (low, high))
    return b.convert(grid.output(), x.dtype)


def _learnable_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    scale: Value,
    zero_point: Value,
    axis: int | None,
    limits: tuple[int, int],
    factor: float,
) -> list[Value]:
    if axis is None:
        # PyTorch rounds halves up here and to even elsewhere.
        zero = b.add(_along(b, zero_point, x.rank, None), 0.5)
        zero = b.trunc(b.clamp(zero, float(limits[0]), float(limits[1])))
    else:
        zero = _learnt_zero(b, zero_point, x.rank, axis, *limits)
    grid = _Grid(b, x, _along(b, scale, x.rank, axis), zero, limits)
    by_x, by_scale, by_zero = grid.gradients(grad, factor)
    dims = [d for d in range(x.rank) if d != axis]
    sums = [
        b.convert(b.reshape(b.reduce(part, "add", dims), parameter.shape), parameter.dtype)
        for part, parameter in ((by_scale, scale), (by_zero, zero_point))
    ]
    return [b.convert(by_x, x.dtype), *sums]


def _learnable_specs(
    grad: Value, x: Value, scale: Value, zero_point: Value, *_: object
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(v.shape, v.dtype) for v in (x, scale, zero_point)]


@lower("aten._fake_quantize_learnable_per_tensor_affine_backward", specs=_learnable_specs)
def fake_quantize_learnable_tensor_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    scale: Value,
    zero_point: Value,
    low: int,
    high: int,
    factor: float = 1.0,
) -> list[Value]:
    return _learnable_backward(b, grad, x, scale, zero_point, None, (low, high), factor)


@lower("aten._fake_quantize_learnable_per_channel_affine_backward", specs=_learnable_specs)
def fake_quantize_learnable_channel_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    scale: Value,
    zero_point: Value,
    axis: int,
    low: int,
    high: int,
    factor: float = 1.0,
) -> list[Value]:
    axis = canonical_dim(axis, x.rank)
    return _learnable_backward(b, grad, x, scale, zero_point, axis, (low, high), factor)
