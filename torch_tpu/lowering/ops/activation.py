"""Activations and their gradients. Half precision computes in float32 and rounds once."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower, pointwise
from torch_tpu.lowering.types import Operand, Value, canonical_dim, opmath_dtype

_SQRT_HALF = math.sqrt(0.5)
_TANH_GELU_SCALE = math.sqrt(2.0 / math.pi)
_TANH_GELU_CUBIC = 0.044715


def _inside(b: OpBuilder, x: Value, low: Operand, high: Operand) -> Value:
    """low <= x <= high; False for NaN."""
    return b.and_(b.ge(x, low), b.le(x, high))


def negative(b: OpBuilder, x: Operand) -> Operand:
    """-x for a number or a value."""
    if not isinstance(x, Value):
        return -x
    return b.neg(b.convert(x, torch.int8) if x.is_bool else x)


# -- rectifiers and clamps ---------------------------------------------------------------------


@pointwise("aten.relu")
def relu(b: OpBuilder, x: Value) -> Value:
    if x.is_bool:
        raise RuntimeError("Boolean inputs not supported for relu")
    return b.maximum(x, 0)


@pointwise("aten.relu6")
def relu6(b: OpBuilder, x: Value) -> Value:
    return b.clamp(x, 0, 6)


@pointwise("aten.hardtanh")
def hardtanh(b: OpBuilder, x: Value, min_val: Operand = -1, max_val: Operand = 1) -> Value:
    return b.clamp(x, min_val, max_val)


@pointwise("aten.hardtanh_backward")
def hardtanh_backward(b: OpBuilder, grad: Value, x: Value, low: Operand, high: Operand) -> Value:
    return b.select(b.or_(b.le(x, low), b.ge(x, high)), 0, grad)


@pointwise("aten.threshold")
def threshold(b: OpBuilder, x: Value, limit: Operand, value: Operand) -> Value:
    return b.select(b.le(x, limit), b.as_value(value, x.dtype), x)


@pointwise("aten.threshold_backward")
def threshold_backward(b: OpBuilder, grad: Value, x: Value, limit: Operand) -> Value:
    return b.select(b.le(x, limit), 0, grad)


@pointwise("aten.leaky_relu")
def leaky_relu(b: OpBuilder, x: Value, slope: Operand = 0.01) -> Value:
    return b.select(b.gt(x, 0), x, b.mul(x, slope))


@pointwise("aten.leaky_relu_backward")
def leaky_relu_backward(
    b: OpBuilder, grad: Value, x: Value, slope: Operand, self_is_result: bool
) -> Value:
    return b.select(b.gt(x, 0), grad, b.mul(grad, slope))


@pointwise("aten._prelu_kernel")
def prelu_kernel(b: OpBuilder, x: Value, weight: Value) -> Value:
    return b.select(b.gt(x, 0), x, b.mul(x, weight))


@pointwise("aten._prelu_kernel_backward")
def prelu_kernel_backward(
    b: OpBuilder, grad: Value, x: Value, weight: Value
) -> tuple[Value, Value]:
    positive = b.gt(x, 0)
    return b.select(positive, grad, b.mul(grad, weight)), b.select(positive, 0, b.mul(grad, x))


@pointwise("aten.rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    noise: Value,
    lower_bound: Operand,
    upper_bound: Operand,
    training: bool,
    self_is_result: bool,
) -> Value:
    low, high = b.as_value(lower_bound, grad.dtype), b.as_value(upper_bound, grad.dtype)
    evaluated = b.select(b.gt(x, 0), grad, b.mul(grad, b.mul(b.add(low, high), 0.5)))
    if not training:
        return evaluated
    # A vanishing range of slopes counts as a leaky ReLU even in training.
    drawn = b.broadcast_to(b.gt(b.sub(high, low), 1e-6), grad.shape)
    return b.select(drawn, b.mul(noise, grad), evaluated)


@pointwise("aten.hardshrink")
def hardshrink(b: OpBuilder, x: Value, lambd: Operand = 0.5) -> Value:
    return b.select(_inside(b, x, negative(b, lambd), lambd), 0, x)


@pointwise("aten.hardshrink_backward", "aten.softshrink_backward")
def shrink_backward(b: OpBuilder, grad: Value, x: Value, lambd: Operand) -> Value:
    return b.select(_inside(b, x, negative(b, lambd), lambd), 0, grad)


@pointwise("aten.softshrink")
def softshrink(b: OpBuilder, x: Value, lambd: Operand = 0.5) -> Value:
    low = b.select(b.lt(x, negative(b, lambd)), b.add(x, lambd), b.mul(x, 0))
    return b.select(b.gt(x, lambd), b.sub(x, lambd), low)


# -- hard sigmoids -----------------------------------------------------------------------------


@pointwise("aten.hardsigmoid")
def hardsigmoid(b: OpBuilder, x: Value) -> Value:
    return b.div(b.clamp(b.add(x, 3), 0, 6), 6)


@pointwise("aten.hardsigmoid_backward")
def hardsigmoid_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    return b.select(b.and_(b.gt(x, -3), b.lt(x, 3)), b.div(grad, 6), 0)


@pointwise("aten.hardswish")
def hardswish(b: OpBuilder, x: Value) -> Value:
    return b.div(b.mul(x, b.clamp(b.add(x, 3), 0, 6)), 6)


@pointwise("aten.hardswish_backward")
def hardswish_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    inner = b.mul(grad, b.add(b.div(x, 3), 0.5))
    return b.select(b.le(x, -3), 0, b.select(b.lt(x, 3), inner, grad))


# -- exponential units -------------------------------------------------------------------------


def _scaled(b: OpBuilder, x: Operand, factor: Operand) -> Operand:
    """x * factor for any mix of numbers and values."""
    if not isinstance(x, Value) and not isinstance(factor, Value):
        return x * factor
    return b.mul(x, factor)


@pointwise("aten.elu")
def elu(
    b: OpBuilder, x: Value, alpha: Operand = 1, scale: Operand = 1, input_scale: Operand = 1
) -> Value:
    below = b.mul(b.expm1(b.mul(x, input_scale)), _scaled(b, alpha, scale))
    return b.select(b.lt(x, 0), below, b.mul(x, scale))


@pointwise("aten.elu_backward")
def elu_backward(
    b: OpBuilder,
    grad: Value,
    alpha: Operand,
    scale: Operand,
    input_scale: Operand,
    is_result: bool,
    x: Value,
) -> Value:
    factor = _scaled(b, alpha, scale)
    if is_result:
        below = b.mul(b.mul(grad, input_scale), b.add(x, factor))
    else:
        slope = b.mul(b.exp(b.mul(x, input_scale)), _scaled(b, factor, input_scale))
        below = b.mul(grad, slope)
    return b.select(b.le(x, 0), below, b.mul(grad, scale))


@pointwise("aten.celu")
def celu(b: OpBuilder, x: Value, alpha: Operand = 1.0) -> Value:
    if not isinstance(alpha, Value) and alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return b.select(b.lt(x, 0), b.mul(b.expm1(b.div(x, alpha)), alpha), x)


@pointwise("aten.softplus")
def softplus(b: OpBuilder, x: Value, beta: Operand = 1, limit: Operand = 20) -> Value:
    z = b.mul(x, beta)
    return b.select(b.gt(z, limit), x, b.div(b.log1p(b.exp(z)), beta))


@pointwise("aten.softplus_backward")
def softplus_backward(b: OpBuilder, grad: Value, x: Value, beta: Operand, limit: Operand) -> Value:
    z = b.mul(x, beta)
    return b.select(b.gt(z, limit), grad, b.mul(grad, b.sigmoid(z)))


@pointwise("aten.mish")
def mish(b: OpBuilder, x: Value) -> Value:
    return b.mul(x, b.tanh(b.log1p(b.exp(x))))


@pointwise("aten.mish_backward")
def mish_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    t = b.tanh(b.log1p(b.exp(x)))
    slope = b.mul(b.mul(x, b.sigmoid(x)), b.sub(1, b.mul(t, t)))
    return b.mul(grad, b.add(t, slope))


# -- logistic units ----------------------------------------------------------------------------


@pointwise("aten.silu")
def silu(b: OpBuilder, x: Value) -> Value:
    return b.mul(x, b.sigmoid(x))


@pointwise("aten.silu_backward")
def silu_backward(b: OpBuilder, grad: Value, x: Value) -> Value:
    s = b.sigmoid(x)
    slope = b.mul(s, b.add(b.mul(x, b.sub(1, s)), 1))
    return b.mul(grad, b.conj(slope))


@pointwise("aten.sigmoid_backward")
def sigmoid_backward(b: OpBuilder, grad: Value, y: Value) -> Value:
    return b.mul(grad, b.conj(b.mul(b.sub(1, y), y)))


@pointwise("aten.tanh_backward")
def tanh_backward(b: OpBuilder, grad: Value, y: Value) -> Value:
    return b.mul(grad, b.conj(b.sub(1, b.mul(y, y))))


@pointwise("aten.logit_backward")
def logit_backward(b: OpBuilder, grad: Value, x: Value, eps: float | None = None) -> Value:
    """Outside [eps, 1 - eps] the gradient is 0; without eps it is NaN outside [0, 1]."""
    bounded = eps is not None and eps >= 0
    low = eps if eps is not None and bounded else 0.0
    slope = b.div(grad, b.mul(x, b.sub(1, x)))
    if not bounded:
        slope = b.select(b.or_(b.eq(x, 0), b.eq(x, 1)), b.mul(grad, math.inf), slope)
    outside = b.or_(b.lt(x, low), b.gt(x, 1 - low))
    return b.select(outside, 0.0 if bounded else math.nan, slope)


@lower("aten.log_sigmoid_forward")
def log_sigmoid_forward(b: OpBuilder, x: Value) -> tuple[Value, Value]:
    """Returns (output, buffer); the buffer is exp(-|x|) as the CPU keeps it."""
    wide = b.convert(x, opmath_dtype(x.dtype))
    z = b.exp(b.neg(b.abs(wide)))
    out = b.convert(b.sub(b.minimum(wide, 0), b.log1p(z)), x.dtype)
    shape, dtype = b.results[1]
    buffer = b.convert(z, dtype) if shape == x.shape else b.constant(0, dtype, shape)
    return out, buffer


# The buffer may be empty, as on CUDA; recomputing it costs less than reading it.
@pointwise("aten.log_sigmoid_backward", keep=("buffer",))
def log_sigmoid_backward(b: OpBuilder, grad: Value, x: Value, buffer: Value) -> Value:
    return b.mul(grad, b.sigmoid(b.neg(x)))


def _halves(b: OpBuilder, x: Value, dim: int) -> tuple[Value, Value]:
    half = x.shape[dim] // 2
    return b.slice_dim(x, dim, 0, half), b.slice_dim(x, dim, half, 2 * half)


def _wide(b: OpBuilder, *values: Value) -> list[Value]:
    return [b.convert(v, opmath_dtype(v.dtype)) for v in values]


@lower("aten.glu")
def glu(b: OpBuilder, x: Value, dim: int = -1) -> Value:
    (wide,) = _wide(b, x)
    first, second = _halves(b, wide, canonical_dim(dim, x.rank))
    return b.convert(b.mul(first, b.sigmoid(second)), x.dtype)


@lower("aten.glu_backward")
def glu_backward(b: OpBuilder, grad: Value, x: Value, dim: int) -> Value:
    dim = canonical_dim(dim, x.rank)
    g, wide = _wide(b, grad, x)
    first, second = _halves(b, wide, dim)
    s = b.sigmoid(second)
    left = b.mul(g, s)
    right = b.mul(b.mul(left, b.sub(1, s)), first)
    return b.convert(b.concatenate([left, right], dim), x.dtype)


@lower("aten.glu_jvp", specs=lambda out, *_: [(out.shape, out.dtype)])
def glu_jvp(b: OpBuilder, out: Value, x: Value, dx: Value, dim: int) -> Value:
    dim = canonical_dim(dim, x.rank)
    y, wide, dwide = _wide(b, out, x, dx)
    _, second = _halves(b, wide, dim)
    dfirst, dsecond = _halves(b, dwide, dim)
    s = b.sigmoid(second)
    tangent = b.add(b.mul(dfirst, s), b.mul(y, b.mul(dsecond, b.sub(1, s))))
    return b.convert(tangent, out.dtype)


# -- Gaussian error linear units ---------------------------------------------------------------


def gelu_value(b: OpBuilder, x: Value, approximate: str) -> Value:
    """GELU of a value whose dtype is already the one to compute in."""
    if approximate == "tanh":
        inner = b.mul(b.add(x, b.mul(b.mul(b.mul(x, x), x), _TANH_GELU_CUBIC)), _TANH_GELU_SCALE)
        return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1))
    if approximate != "none":
        raise RuntimeError("approximate argument must be either none or tanh.")
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, _SQRT_HALF)), 1))


@pointwise("aten.gelu")
def gelu(b: OpBuilder, x: Value, *, approximate: str = "none") -> Value:
    """Gaussian error linear unit (Hendrycks and Gimpel, 2016), by erf or its tanh form."""
    return gelu_value(b, x, approximate)


@pointwise("aten.gelu_backward")
def gelu_backward(b: OpBuilder, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        square = b.mul(x, x)
        inner = b.mul(b.add(x, b.mul(b.mul(square, x), _TANH_GELU_CUBIC)), _TANH_GELU_SCALE)
        t = b.tanh(inner)
        slope = b.mul(b.add(b.mul(square, 3 * _TANH_GELU_CUBIC), 1), _TANH_GELU_SCALE)
        right = b.mul(b.mul(x, 0.5), b.mul(b.sub(1, b.mul(t, t)), slope))
        return b.mul(grad, b.add(b.mul(b.add(t, 1), 0.5), right))
    cdf = b.mul(b.add(b.erf(b.mul(x, _SQRT_HALF)), 1), 0.5)
    pdf = b.mul(b.exp(b.mul(b.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.mul(grad, b.add(cdf, b.mul(x, pdf)))
