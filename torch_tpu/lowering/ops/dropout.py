"""Dropout and randomised leaky ReLU."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.random import bernoulli_mask, compute_dtype, uniform_values
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype


def _scaled(b: OpBuilder, x: Value, mask: Value, scale: Operand) -> Value:
    """``x * mask * scale`` in the compute dtype, rounded once (NaN and inf times 0 stay NaN)."""
    dtype = b.out_dtype  # that of x, or a float where x is integral
    work = opmath_dtype(dtype)
    kept = b.mul(b.convert(x, work), b.convert(mask, work))
    return b.convert(b.mul(kept, b.as_value(scale, work)), dtype)


def _drop(b: OpBuilder, x: Value, p: Operand) -> tuple[Value, Value]:
    """The scaled values and the i1 mask of what was kept."""
    keep = b.sub(1.0, b.as_value(p, torch.float64))
    scale = b.select(b.eq(keep, 0.0), 0.0, b.div(1.0, keep))
    mask = bernoulli_mask(b, x.shape, b.convert(keep, torch.float32))
    return _scaled(b, x, mask, scale), mask


@lower("aten.native_dropout", operand=("p",))
def native_dropout(b: OpBuilder, x: Value, p: Operand, train: bool | None) -> list[Value]:
    if train is False:
        return [b.convert(x, b.out_dtype), b.constant(True, torch.bool, x.shape)]
    return list(_drop(b, x, p))


@lower("aten.native_dropout_backward", operand=("scale",))
def native_dropout_backward(b: OpBuilder, grad: Value, mask: Value, scale: Operand) -> Value:
    return _scaled(b, grad, mask, scale)


@lower("aten._fused_dropout", operand=("p",))
def fused_dropout(b: OpBuilder, x: Value, keep: Operand) -> list[Value]:
    """``p`` is the probability to keep; the mask is uint8."""
    mask = bernoulli_mask(b, x.shape, keep)
    scale = b.div(1.0, b.as_value(keep, torch.float64))
    return [_scaled(b, x, mask, scale), b.convert(mask, torch.uint8)]


@lower("aten._masked_scale", operand=("scale",))
def masked_scale(b: OpBuilder, x: Value, mask: Value, scale: Operand) -> Value:
    return _scaled(b, x, mask, scale)


@lower("aten.rrelu_with_noise_functional")
def rrelu_with_noise(
    b: OpBuilder,
    x: Value,
    noise: Value,
    lower_bound: Operand = 0.125,
    upper_bound: Operand = 1 / 3,
    training: bool = False,
) -> list[Value]:
    """The output and the new noise: the slope of each element (1 where x > 0)."""
    work = compute_dtype(x.dtype)
    wide = b.convert(x, work)
    positive = b.gt(wide, 0.0)
    if training:
        slopes = b.convert(uniform_values(b, x.shape, work, lower_bound, upper_bound), x.dtype)
        slopes = b.select(b.le(wide, 0.0), slopes, 1.0)
        out = b.mul(wide, b.convert(slopes, work))
        return [b.convert(out, x.dtype), b.convert(slopes, noise.dtype)]
    total = b.add(b.as_value(lower_bound, work), b.as_value(upper_bound, work))
    out = b.select(positive, wide, b.mul(wide, b.mul(total, 0.5)))
    return [b.convert(out, x.dtype), noise]
