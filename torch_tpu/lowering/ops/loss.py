"""Pointwise losses and their gradients: a table of (value, slope) pairs plus those with weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

NONE, MEAN, SUM = 0, 1, 2


def reduced(b: OpBuilder, x: Value, reduction: int) -> Value:
    """``x`` as it is, its mean or its sum; rounded to the result's dtype."""
    if reduction != NONE:
        count = x.numel
        x = b.reduce(x, "add", range(x.rank))
        if reduction == MEAN:
            x = b.mul(x, 1.0 / count if count else math.nan)
    return b.convert(x, b.out_dtype)


def spread(b: OpBuilder, grad: Value, shape: tuple[int, ...], reduction: int) -> Value:
    """The gradient of a reduced loss for each element of ``shape``."""
    grad = b.broadcast_to(grad, shape)
    if reduction == MEAN:
        count = math.prod(shape)
        return b.mul(grad, 1.0 / count if count else math.nan)
    return grad


def _aligned(b: OpBuilder, *values: Value) -> list[Value]:
    """Values in one common dtype to compute in, broadcast to one shape."""
    dtype = values[0].dtype
    for v in values[1:]:
        dtype = torch.promote_types(dtype, v.dtype)
    return b.broadcast(*(b.convert(v, opmath_dtype(dtype)) for v in values))


# -- losses of the difference ------------------------------------------------------------------

Rule = Callable[[OpBuilder, Value, Operand], Value]


def _square(b: OpBuilder, d: Value, _: Operand) -> Value:
    return b.mul(d, d)


def _square_slope(b: OpBuilder, d: Value, _: Operand) -> Value:
    return b.mul(d, 2.0)


def _smooth(b: OpBuilder, d: Value, beta: Operand) -> Value:
    size = b.abs(d)
    if not isinstance(beta, Value) and beta == 0:
        return size
    inner = b.div(b.mul(b.mul(d, d), 0.5), beta)
    return b.select(b.lt(size, beta), inner, b.sub(size, b.mul(b.as_value(beta, d.dtype), 0.5)))


def _smooth_slope(b: OpBuilder, d: Value, beta: Operand) -> Value:
    if not isinstance(beta, Value) and beta == 0:
        return b.sign(d)
    inner = b.div(d, beta)
    return b.select(b.lt(b.abs(d), beta), inner, b.sign(d))


def _huber(b: OpBuilder, d: Value, delta: Operand) -> Value:
    size = b.abs(d)
    width = b.as_value(delta, d.dtype)
    outer = b.mul(b.sub(size, b.mul(width, 0.5)), width)
    return b.select(b.le(size, width), b.mul(b.mul(d, d), 0.5), outer)


def _huber_slope(b: OpBuilder, d: Value, delta: Operand) -> Value:
    width = b.as_value(delta, d.dtype)
    outer = b.mul(b.sign(d), width)
    return b.select(b.le(b.abs(d), width), d, outer)


def _register_difference_loss(name: str, value: Rule, slope: Rule) -> None:
    """Register ``name`` and ``name``_backward, where the loss is a function of input - target."""

    @lower(f"aten.{name}")
    def forward(
        b: OpBuilder, x: Value, target: Value, reduction: int = MEAN, width: Operand = 1.0
    ) -> Value:
        x, target = _aligned(b, x, target)
        return reduced(b, value(b, b.sub(x, target), width), reduction)

    @lower(f"aten.{name}_backward")
    def backward(
        b: OpBuilder,
        grad: Value,
        x: Value,
        target: Value,
        reduction: int,
        width: Operand = 1.0,
    ) -> Value:
        x, target = _aligned(b, x, target)
        grad = b.convert(grad, x.dtype)
        local = slope(b, b.sub(x, target), width)
        return b.convert(b.mul(local, spread(b, grad, x.shape, reduction)), b.out_dtype)


for _name, _value, _slope in (
    ("mse_loss", _square, _square_slope),
    ("smooth_l1_loss", _smooth, _smooth_slope),
    ("huber_loss", _huber, _huber_slope),
):
    _register_difference_loss(_name, _value, _slope)


# -- margins and cross entropies ---------------------------------------------------------------


@lower("aten.soft_margin_loss")
def soft_margin_loss(b: OpBuilder, x: Value, target: Value, reduction: int = MEAN) -> Value:
    x, target = _aligned(b, x, target)
    return reduced(b, b.log1p(b.exp(b.neg(b.mul(target, x)))), reduction)


@lower("aten.soft_margin_loss_backward")
def soft_margin_loss_backward(
    b: OpBuilder, grad: Value, x: Value, target: Value, reduction: int
) -> Value:
    x, target = _aligned(b, x, target)
    grad = spread(b, b.convert(grad, x.dtype), x.shape, reduction)
    slope = b.neg(b.mul(target, b.sigmoid(b.neg(b.mul(target, x)))))
    return b.convert(b.mul(slope, grad), b.out_dtype)


@lower("aten.binary_cross_entropy")
def binary_cross_entropy(
    b: OpBuilder, x: Value, target: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    """-(t log x + (1 - t) log(1 - x)) with both logarithms bounded below by -100."""
    x, target = _aligned(b, x, target)
    outside = b.not_(b.and_(b.ge(x, 0), b.le(x, 1)))
    wrong = b.reduce(outside, "or", range(x.rank))
    b.note_assertion(wrong, "all elements of input should be between 0 and 1")
    log_x = b.maximum(b.log(x), -100)
    log_rest = b.maximum(b.log1p(b.neg(x)), -100)
    loss = b.sub(b.mul(b.sub(target, 1), log_rest), b.mul(target, log_x))
    if weight is not None:
        loss = b.mul(loss, b.broadcast_to(b.convert(weight, x.dtype), x.shape))
    return reduced(b, loss, reduction)


@lower("aten.binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    x, target = _aligned(b, x, target)
    grad = spread(b, b.convert(grad, x.dtype), x.shape, reduction)
    slope = b.div(b.sub(x, target), b.maximum(b.mul(b.sub(1, x), x), 1e-12))
    out = b.mul(grad, slope)
    if weight is not None:
        out = b.mul(out, b.broadcast_to(b.convert(weight, x.dtype), x.shape))
    return b.convert(out, b.out_dtype)


@lower("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    b: OpBuilder,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    x, target = _aligned(b, x, target)
    log_sigmoid = b.sub(b.minimum(x, 0), b.log1p(b.exp(b.neg(b.abs(x)))))
    rest = b.mul(b.sub(1, target), x)
    if pos_weight is not None:
        factor = b.broadcast_to(b.convert(pos_weight, x.dtype), x.shape)
        log_sigmoid = b.mul(log_sigmoid, b.add(b.mul(b.sub(factor, 1), target), 1))
    loss = b.sub(rest, log_sigmoid)
    if weight is not None:
        loss = b.mul(loss, b.broadcast_to(b.convert(weight, x.dtype), x.shape))
    return reduced(b, loss, reduction)
