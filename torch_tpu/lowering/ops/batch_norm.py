"""Batch normalisation (Ioffe and Szegedy, 2015): statistics over every dim but the channel's.

In training the running statistics are written: forms whose schema hides that declare it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.normalization import centred, standardised_gradient
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

_MOMENTUM = ("momentum",)


def _other_dims(x: Value) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _per_channel(b: OpBuilder, x: Value, like: Value, dtype: torch.dtype) -> Value:
    """A (C,) tensor with size-1 dims around the channel."""
    shape = [1] * like.rank
    shape[1] = like.shape[1]
    return b.reshape(b.convert(x, dtype), shape)


def _affine(
    b: OpBuilder, rest: Value, rstd: Value, weight: Value | None, bias: Value | None
) -> Value:
    """(x - mean) * rstd * weight + bias with the per-channel factors joined first."""
    scale = rstd
    if weight is not None:
        scale = b.mul(rstd, _per_channel(b, weight, rest, rest.dtype))
    out = b.mul(rest, b.broadcast_to(scale, rest.shape))
    if bias is not None:
        out = b.add(out, b.broadcast_to(_per_channel(b, bias, rest, rest.dtype), rest.shape))
    return out


def _moved(b: OpBuilder, running: Value, batch: Value, momentum: Operand) -> Value:
    """momentum * batch + (1 - momentum) * running in running's dtype."""
    dtype = opmath_dtype(running.dtype)
    rate = b.as_value(momentum, dtype)
    old, new = b.convert(running, dtype), b.convert(b.reshape(batch, running.shape), dtype)
    return b.convert(b.add(b.mul(new, rate), b.mul(old, b.sub(1, rate))), running.dtype)


def _save(b: OpBuilder, x: Value, index: int) -> Value:
    """Saved statistics in the shape PyTorch expects: (C,), or empty where none are kept."""
    shape, dtype = b.results[index]
    if math.prod(shape) == 0:
        return b.constant(0, dtype, shape)
    return b.convert(b.reshape(x, shape), dtype)


def _typed(b: OpBuilder, values: Sequence[Value], first: int) -> list[Value]:
    """New running statistics in the dtypes of the results that start at ``first``."""
    return [b.convert(v, b.results[first + i][1]) for i, v in enumerate(values)]


def _normalise(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Operand,
    eps: float,
) -> tuple[list[Value], list[Value]]:
    """([output, saved mean, saved reciprocal deviation], new running statistics)."""
    dtype = opmath_dtype(x.dtype)
    wide = b.convert(x, dtype)
    updated: list[Value] = []
    if training:
        dims = _other_dims(x)
        mean, rest, variance = centred(b, wide, dims)
        count = math.prod(x.shape[d] for d in dims)
        if running_mean is not None:
            updated.append(_moved(b, running_mean, mean, momentum))
        if running_var is not None:
            unbiased = b.mul(variance, count / (count - 1) if count > 1 else math.nan)
            updated.append(_moved(b, running_var, unbiased, momentum))
    else:
        if running_mean is None or running_var is None:
            raise RuntimeError("batch_norm: evaluation needs running_mean and running_var")
        mean = _per_channel(b, running_mean, x, dtype)
        variance = _per_channel(b, running_var, x, dtype)
        rest = b.sub(wide, b.broadcast_to(mean, x.shape))
        updated = [running_mean, running_var]
    rstd = b.rsqrt(b.add(variance, eps))
    out = b.convert(_affine(b, rest, rstd, weight, bias), b.out_dtype)
    return [out, _save(b, mean, 1), _save(b, rstd, 2)], updated


@lower("aten.native_batch_norm", mutates=("running_mean", "running_var"), operand=_MOMENTUM)
def native_batch_norm(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    outs, updated = _normalise(
        b, x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return outs + _typed(b, updated, 3)


@lower("aten._native_batch_norm_legit_functional", operand=_MOMENTUM)
def batch_norm_functional(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    outs, updated = _normalise(
        b, x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return outs + _typed(b, updated, 3)


@lower("aten._native_batch_norm_legit.no_stats", operand=_MOMENTUM)
def batch_norm_no_stats(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    return _normalise(b, x, weight, bias, None, None, training, momentum, eps)[0]


@lower("aten._native_batch_norm_legit_no_training", operand=_MOMENTUM)
def batch_norm_no_training(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    return _normalise(b, x, weight, bias, running_mean, running_var, False, momentum, eps)[0]


def _reserve(b: OpBuilder) -> Value:
    """The cuDNN workspace slot, which holds nothing here."""
    shape, dtype = b.results[3]
    return b.constant(0, dtype, shape)


@lower("aten._batch_norm_with_update_functional", operand=_MOMENTUM)
def batch_norm_with_update(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    outs, updated = _normalise(b, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return [*outs, _reserve(b), *_typed(b, updated, 4)]


@lower("aten._batch_norm_no_update", operand=_MOMENTUM)
def batch_norm_no_update(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Operand,
    eps: float,
) -> list[Value]:
    outs, _ = _normalise(b, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return [*outs, _reserve(b)]


@lower("aten.native_batch_norm_backward")
def native_batch_norm_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> list[Value]:
    """Gradients of x, weight and bias. PyTorch's shape rule always delivers that of x."""
    dtype = opmath_dtype(x.dtype)
    dims = _other_dims(x)
    g, wide = b.convert(grad, dtype), b.convert(x, dtype)
    if train:
        if save_mean is None or save_invstd is None:
            raise RuntimeError("batch_norm_backward: training needs the saved statistics")
        mean = _per_channel(b, save_mean, x, dtype)
        rstd = _per_channel(b, save_invstd, x, dtype)
    else:
        if running_mean is None or running_var is None:
            raise RuntimeError("batch_norm_backward: evaluation needs the running statistics")
        mean = _per_channel(b, running_mean, x, dtype)
        rstd = b.rsqrt(b.add(_per_channel(b, running_var, x, dtype), eps))
    scale = rstd if weight is None else b.mul(rstd, _per_channel(b, weight, x, dtype))
    normal = b.mul(b.sub(wide, b.broadcast_to(mean, x.shape)), b.broadcast_to(rstd, x.shape))
    if train:
        grad_x = standardised_gradient(b, g, normal, scale, dims)
    else:
        grad_x = b.mul(g, b.broadcast_to(scale, x.shape))
    sums = {1: lambda: b.reduce(b.mul(g, normal), "add", dims), 2: lambda: b.reduce(g, "add", dims)}
    out = [b.convert(grad_x, b.out_dtype)] if len(b.results) > sum(output_mask[1:]) else []
    for i, total in sums.items():
        if output_mask[i]:
            out.append(b.convert(total(), b.results[len(out)][1]))
    return out


@lower("aten.batch_norm_backward")
def batch_norm_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_var: Value | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Value,
) -> list[Value]:
    return native_batch_norm_backward(
        b,
        grad,
        x,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
        update,
        eps,
        output_mask,
    )
