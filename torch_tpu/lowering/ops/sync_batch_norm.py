"""The parts of batch normalisation over several devices, between which statistics are exchanged.

Statistics are kept as mean and reciprocal deviation, float32 for half precision.
"""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.normalization import centred
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

_MOMENTUM = ("momentum",)
_Spec = tuple[tuple[int, ...], torch.dtype]


def _channels(x: Value) -> _Spec:
    return ((x.shape[1],), opmath_dtype(x.dtype))


def _others(x: Value) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _along(b: OpBuilder, x: Value, like: Value) -> Value:
    """A (C,) tensor spread over ``like``, in its dtype."""
    return b.broadcast_in_dim(b.convert(x, like.dtype), like.shape, [1])


@lower("aten.batch_norm_stats", specs=lambda x, eps: [_channels(x)] * 2)
def batch_norm_stats(b: OpBuilder, x: Value, eps: float) -> list[Value]:
    """Mean and reciprocal deviation per channel of one device's batch."""
    mean, _, variance = centred(b, b.convert(x, opmath_dtype(x.dtype)), _others(x))
    shape = (x.shape[1],)
    return [b.reshape(mean, shape), b.reshape(b.rsqrt(b.add(variance, eps)), shape)]


def _blend(b: OpBuilder, running: Value, new: Value, momentum: Operand) -> Value:
    rate = b.as_value(momentum, new.dtype)
    old = b.convert(running, new.dtype)
    moved = b.add(b.mul(old, b.sub(1, rate)), b.mul(new, rate))
    return b.convert(moved, running.dtype)


@lower(
    "aten.batch_norm_update_stats",
    specs=lambda x, *_: [_channels(x)] * 2,
    mutates=("running_mean", "running_var"),
    operand=_MOMENTUM,
)
def batch_norm_update_stats(
    b: OpBuilder,
    x: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
) -> list[Value]:
    """Mean and variance per channel; the running statistics move towards them."""
    dims = _others(x)
    count = math.prod(x.shape[d] for d in dims)
    mean, _, variance = centred(b, b.convert(x, opmath_dtype(x.dtype)), dims)
    shape = (x.shape[1],)
    mean, variance = b.reshape(mean, shape), b.reshape(variance, shape)
    out = [mean, variance]
    if running_mean is not None:
        out.append(_blend(b, running_mean, mean, momentum))
    if running_var is not None:
        unbiased = b.mul(variance, count / (count - 1) if count > 1 else math.nan)
        out.append(_blend(b, running_var, unbiased, momentum))
    return out


@lower(
    "aten.batch_norm_elemt",
    specs=lambda x, *_: [(x.shape, x.dtype)],
)
def batch_norm_elemt(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    invstd: Value,
    eps: float,
) -> Value:
    """(x - mean) * invstd * weight + bias."""
    wide = b.convert(x, opmath_dtype(x.dtype))
    out = b.mul(b.sub(wide, _along(b, mean, wide)), _along(b, invstd, wide))
    if weight is not None:
        out = b.mul(out, _along(b, weight, wide))
    if bias is not None:
        out = b.add(out, _along(b, bias, wide))
    return b.convert(out, x.dtype)


def _gather(
    b: OpBuilder,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: float,
    counts: Value,
) -> list[Value]:
    """Joint statistics of (devices, C) means and deviations over ``counts`` elements each."""
    dtype = opmath_dtype(mean.dtype)
    means = b.convert(mean, dtype)
    weights = b.broadcast_in_dim(b.convert(counts, dtype), means.shape, [0])
    total = b.reduce(b.convert(counts, dtype), "add", [0])
    deviation = b.convert(invstd, dtype)
    variances = b.sub(b.div(1, b.mul(deviation, deviation)), eps)
    joint = b.div(b.reduce(b.mul(means, weights), "add", [0]), total)
    off = b.sub(means, b.broadcast_to(joint, means.shape))
    squares = b.reduce(b.mul(weights, b.add(variances, b.mul(off, off))), "add", [0])
    out = [joint, b.rsqrt(b.add(b.div(squares, total), eps))]
    if running_mean is not None:
        out.append(_blend(b, running_mean, joint, momentum))
    if running_var is not None:
        out.append(_blend(b, running_var, b.div(squares, b.sub(total, 1)), momentum))
    return out


@lower(
    "aten.batch_norm_gather_stats_with_counts",
    specs=lambda x, *_: [_channels(x)] * 2,
    mutates=("running_mean", "running_var"),
    operand=_MOMENTUM,
)
def batch_norm_gather_stats_with_counts(
    b: OpBuilder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: float,
    counts: Value,
) -> list[Value]:
    """Joint statistics of all devices from each one's mean, deviation and count."""
    return _gather(b, mean, invstd, running_mean, running_var, momentum, eps, counts)


@lower(
    "aten.batch_norm_gather_stats",
    specs=lambda x, *_: [_channels(x)] * 2,
    mutates=("running_mean", "running_var"),
    operand=_MOMENTUM,
)
def batch_norm_gather_stats(
    b: OpBuilder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: float,
    count: int,
) -> list[Value]:
    """The same with one count for every device."""
    counts = b.constant(count, torch.int64, (mean.shape[0],))
    return _gather(b, mean, invstd, running_mean, running_var, momentum, eps, counts)


def _reduce_specs(
    grad: Value,
    x: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> list[_Spec | None]:
    sums = _channels(x) if input_g else None
    parameters = ((x.shape[1],), weight.dtype if weight is not None else opmath_dtype(x.dtype))
    return [sums, sums, parameters if weight_g else None, parameters if bias_g else None]


@lower("aten.batch_norm_backward_reduce", specs=_reduce_specs)
def batch_norm_backward_reduce(
    b: OpBuilder,
    grad: Value,
    x: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> list[Value]:
    """Per channel: sums of grad and of grad * (x - mean), and the parameters' gradients."""
    wide = b.convert(x, opmath_dtype(x.dtype))
    g = b.convert(grad, wide.dtype)
    total = b.reduce(g, "add", _others(x))
    products = b.reduce(b.mul(g, b.sub(wide, _along(b, mean, wide))), "add", _others(x))
    out = [total, products] if input_g else []
    parameters = weight.dtype if weight is not None else wide.dtype
    if weight_g:
        out.append(b.convert(b.mul(products, b.convert(invstd, wide.dtype)), parameters))
    if bias_g:
        out.append(b.convert(total, parameters))
    return out


@lower("aten.batch_norm_backward_elemt", specs=lambda grad, x, *_: [(x.shape, x.dtype)])
def batch_norm_backward_elemt(
    b: OpBuilder,
    grad: Value,
    x: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    sum_dy: Value,
    sum_dy_xmu: Value,
    count: Value,
) -> Value:
    """The gradient of x from the sums over all devices; ``count`` lists their elements."""
    wide = b.convert(x, opmath_dtype(x.dtype))
    dtype = wide.dtype
    share = b.div(1, b.reduce(b.convert(count, dtype), "add", list(range(count.rank))))
    deviation = b.convert(invstd, dtype)
    mean_grad = b.mul(b.convert(sum_dy, dtype), b.broadcast_to(share, sum_dy.shape))
    slope = b.mul(b.convert(sum_dy_xmu, dtype), b.broadcast_to(share, sum_dy.shape))
    slope = b.mul(slope, b.mul(deviation, deviation))
    off = b.sub(wide, _along(b, mean, wide))
    rest = b.sub(b.convert(grad, dtype), _along(b, mean_grad, wide))
    rest = b.sub(rest, b.mul(off, _along(b, slope, wide)))
    scale = deviation if weight is None else b.mul(deviation, b.convert(weight, dtype))
    return b.convert(b.mul(rest, _along(b, scale, wide)), x.dtype)
