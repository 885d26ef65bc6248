"""Layer, group, RMS, weight and max-norm normalisation; statistics in float32 for half inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, canonical_dim, opmath_dtype


def mean_of(b: OpBuilder, x: Value, dims: Sequence[int]) -> Value:
    """Mean over ``dims``, which stay as size 1; NaN over nothing."""
    count = math.prod(x.shape[d] for d in dims)
    total = b.reduce(x, "add", dims, keepdim=True)
    return b.mul(total, 1.0 / count if count else math.nan)


def centred(b: OpBuilder, x: Value, dims: Sequence[int]) -> tuple[Value, Value, Value]:
    """(mean, x - mean, biased variance); mean and variance keep ``dims`` as size 1."""
    mean = mean_of(b, x, dims)
    rest = b.sub(x, b.broadcast_to(mean, x.shape))
    return mean, rest, mean_of(b, b.mul(rest, rest), dims)


def standardised_gradient(
    b: OpBuilder, grad: Value, normal: Value, rstd: Value, dims: Sequence[int]
) -> Value:
    """Gradient through (x - mean) * rstd over ``dims``, from the normalised values."""
    mean_grad = b.broadcast_to(mean_of(b, grad, dims), grad.shape)
    mean_product = b.broadcast_to(mean_of(b, b.mul(grad, normal), dims), grad.shape)
    inner = b.sub(b.sub(grad, mean_grad), b.mul(normal, mean_product))
    return b.mul(inner, b.broadcast_to(rstd, grad.shape))


def _wide(b: OpBuilder, x: Value | None, dtype: torch.dtype) -> Value | None:
    return None if x is None else b.convert(x, dtype)


def _spec(b: OpBuilder, x: Value, index: int) -> Value:
    """``x`` in the shape and dtype of result ``index``."""
    shape, dtype = b.results[index]
    return b.convert(b.reshape(x, shape), dtype)


# -- layer norm --------------------------------------------------------------------------------


@lower("aten.native_layer_norm")
def layer_norm(
    b: OpBuilder,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Layer normalisation (Ba et al., 2016); also returns mean and reciprocal deviation."""
    dims = range(x.rank - len(normalized_shape), x.rank)
    wide = b.convert(x, opmath_dtype(x.dtype))
    mean, rest, variance = centred(b, wide, dims)
    rstd = b.rsqrt(b.add(variance, eps))
    out = b.mul(rest, b.broadcast_to(rstd, x.shape))
    if weight is not None:
        out = b.mul(out, b.broadcast_to(b.convert(weight, wide.dtype), x.shape))
    if bias is not None:
        out = b.add(out, b.broadcast_to(b.convert(bias, wide.dtype), x.shape))
    return b.convert(out, x.dtype), _spec(b, mean, 1), _spec(b, rstd, 2)


def _statistics(b: OpBuilder, x: Value, rank: int, dtype: torch.dtype) -> Value:
    """Saved statistics with trailing size-1 dims up to ``rank``."""
    return b.reshape(b.convert(x, dtype), (*x.shape, *[1] * (rank - x.rank)))


@lower("aten.native_layer_norm_backward")
def layer_norm_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> list[Value]:
    """Gradients of x, weight and bias; those not asked for, or of absent tensors, are left out."""
    axis = x.rank - len(normalized_shape)
    inner, outer = range(axis, x.rank), range(axis)
    dtype = opmath_dtype(x.dtype)
    g, wide = b.convert(grad, dtype), b.convert(x, dtype)
    scale = _statistics(b, rstd, x.rank, dtype)
    centre = b.broadcast_to(_statistics(b, mean, x.rank, dtype), x.shape)
    normal = b.mul(b.sub(wide, centre), b.broadcast_to(scale, x.shape))
    out: list[Value] = []
    if output_mask[0]:
        scaled = g
        if weight is not None:
            scaled = b.mul(g, b.broadcast_to(b.convert(weight, dtype), x.shape))
        out.append(b.convert(standardised_gradient(b, scaled, normal, scale, inner), x.dtype))
    if output_mask[1] and weight is not None:
        out.append(b.convert(b.reduce(b.mul(g, normal), "add", outer), weight.dtype))
    if output_mask[2] and bias is not None:
        out.append(b.convert(b.reduce(g, "add", outer), bias.dtype))
    return out


# -- RMS norm ----------------------------------------------------------------------------------


@lower("aten._fused_rms_norm")
def rms_norm(
    b: OpBuilder,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    eps: float | None,
) -> tuple[Value, Value]:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019); also returns 1 / rms."""
    dims = range(x.rank - len(normalized_shape), x.rank)
    wide = b.convert(x, opmath_dtype(x.dtype))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = b.rsqrt(b.add(mean_of(b, b.mul(wide, wide), dims), eps))
    out = b.mul(wide, b.broadcast_to(rstd, x.shape))
    if weight is not None:
        out = b.mul(out, b.broadcast_to(b.convert(weight, wide.dtype), x.shape))
    return b.convert(out, b.out_dtype), _spec(b, rstd, 1)


@lower("aten._fused_rms_norm_backward")
def rms_norm_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[int],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> list[Value]:
    axis = x.rank - len(normalized_shape)
    inner, outer = range(axis, x.rank), range(axis)
    dtype = opmath_dtype(x.dtype)
    g, wide = b.convert(grad, dtype), b.convert(x, dtype)
    scale = b.broadcast_to(_statistics(b, rstd, x.rank, dtype), x.shape)
    normal = b.mul(wide, scale)
    out: list[Value] = []
    if output_mask[0]:
        scaled = g
        if weight is not None:
            scaled = b.mul(g, b.broadcast_to(b.convert(weight, dtype), x.shape))
        along = b.broadcast_to(mean_of(b, b.mul(normal, scaled), inner), x.shape)
        out.append(b.convert(b.mul(b.sub(scaled, b.mul(normal, along)), scale), b.out_dtype))
    if output_mask[1] and weight is not None:
        total = b.reduce(b.mul(g, normal), "add", outer)
        out.append(b.convert(total, b.results[len(out)][1]))
    return out


# -- group norm --------------------------------------------------------------------------------


@lower("aten.native_group_norm")
def group_norm(
    b: OpBuilder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Group normalisation (Wu and He, 2018); mean and reciprocal deviation are (N, groups)."""
    dtype = opmath_dtype(x.dtype)
    shape = (batch, groups, channels // groups, area)
    wide = b.reshape(b.convert(x, dtype), shape)
    mean, rest, variance = centred(b, wide, (2, 3))
    rstd = b.rsqrt(b.add(variance, eps))
    out = b.mul(rest, b.broadcast_to(rstd, shape))
    if weight is not None:
        out = b.mul(out, _per_channel(b, weight, shape, dtype))
    if bias is not None:
        out = b.add(out, _per_channel(b, bias, shape, dtype))
    return b.convert(b.reshape(out, x.shape), x.dtype), _spec(b, mean, 1), _spec(b, rstd, 2)


def _per_channel(b: OpBuilder, x: Value, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """A (C,) parameter over (N, groups, C / groups, area)."""
    return b.broadcast_to(b.reshape(b.convert(x, dtype), (1, shape[1], shape[2], 1)), shape)


@lower("aten.native_group_norm_backward")
def group_norm_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    batch: int,
    channels: int,
    area: int,
    groups: int,
    output_mask: Sequence[bool],
) -> list[Value]:
    dtype = opmath_dtype(x.dtype)
    shape = (batch, groups, channels // groups, area)
    g = b.reshape(b.convert(grad, dtype), shape)
    wide = b.reshape(b.convert(x, dtype), shape)
    scale = _statistics(b, rstd, 4, dtype)
    centre = b.broadcast_to(_statistics(b, mean, 4, dtype), shape)
    normal = b.mul(b.sub(wide, centre), b.broadcast_to(scale, shape))
    out: list[Value] = []

    def deliver(value: Value) -> None:
        out.append(_spec(b, value, len(out)))

    if output_mask[0]:
        scaled = g if weight is None else b.mul(g, _per_channel(b, weight, shape, dtype))
        deliver(standardised_gradient(b, scaled, normal, scale, (2, 3)))
    if output_mask[1]:
        deliver(b.reduce(b.mul(g, normal), "add", (0, 3)))
    if output_mask[2]:
        deliver(b.reduce(g, "add", (0, 3)))
    return out


# -- weight norm and renorm --------------------------------------------------------------------


def _all_but(rank: int, dim: int) -> list[int]:
    return [d for d in range(rank) if d != dim]


@lower("aten._weight_norm_interface")
def weight_norm(b: OpBuilder, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    """g * v / ||v|| with the norm over all dims but ``dim``; also returns the norms."""
    dim = canonical_dim(dim, v.rank)
    dtype = opmath_dtype(v.dtype)
    wide = b.convert(v, dtype)
    norm = b.sqrt(b.reduce(b.mul(wide, wide), "add", _all_but(v.rank, dim), keepdim=True))
    ratio = b.broadcast_to(b.div(b.convert(g, dtype), norm), v.shape)
    return b.convert(b.mul(wide, ratio), b.out_dtype), _spec(b, norm, 1)


@lower("aten._weight_norm_interface_backward")
def weight_norm_backward(
    b: OpBuilder, grad: Value, v: Value, g: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    dim = canonical_dim(dim, v.rank)
    dtype = opmath_dtype(v.dtype)
    dw, wide, norm = (b.convert(t, dtype) for t in (grad, v, norms))
    along = b.reduce(b.mul(dw, wide), "add", _all_but(v.rank, dim), keepdim=True)
    grad_g = b.div(along, norm)
    pull = b.broadcast_to(b.div(along, b.mul(norm, norm)), v.shape)
    ratio = b.broadcast_to(b.div(b.convert(g, dtype), norm), v.shape)
    grad_v = b.mul(ratio, b.sub(dw, b.mul(wide, pull)))
    return b.convert(grad_v, b.out_dtype), b.convert(grad_g, b.results[1][1])


def _vector_norm(b: OpBuilder, x: Value, p: float, dims: Sequence[int]) -> Value:
    """The p-norm over ``dims``, kept as size 1, in x's (real) dtype."""
    if p == 0:
        return b.reduce(b.convert(b.ne(x, 0), x.dtype), "add", dims, keepdim=True)
    size = b.abs(x)
    if math.isinf(p):
        return b.reduce(size, "max" if p > 0 else "min", dims, keepdim=True)
    if p == 1:
        return b.reduce(size, "add", dims, keepdim=True)
    if p == 2:
        return b.sqrt(b.reduce(b.mul(size, size), "add", dims, keepdim=True))
    return b.pow(b.reduce(b.pow(size, p), "add", dims, keepdim=True), 1.0 / p)


@lower("aten.renorm", static=("p",))
def renorm(b: OpBuilder, x: Value, p: float, dim: int, maxnorm: Operand) -> Value:
    """Scale the slices along ``dim`` whose p-norm exceeds ``maxnorm`` down to it."""
    dim = canonical_dim(dim, x.rank)
    dtype = opmath_dtype(x.dtype)
    wide = b.convert(x, dtype)
    norm = _vector_norm(b, b.abs(wide), float(p), _all_but(x.rank, dim))
    limit = b.as_value(maxnorm, norm.dtype)
    # The small constant is PyTorch's own guard against a division by a tiny norm.
    factor = b.select(b.gt(norm, limit), b.div(limit, b.add(norm, 1e-7)), 1)
    return b.convert(b.mul(wide, b.broadcast_to(b.convert(factor, dtype), x.shape)), x.dtype)
