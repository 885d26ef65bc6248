"""Softmax and log-softmax with their gradients; every reduction runs in float32 for half inputs."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim, opmath_dtype


def shifted(b: OpBuilder, x: Value, dim: int) -> Value:
    """x minus its maximum along ``dim``."""
    return b.sub(x, b.broadcast_to(b.reduce(x, "max", [dim], keepdim=True), x.shape))


def softmax_value(b: OpBuilder, x: Value, dim: int) -> Value:
    """Softmax along ``dim`` in x's own dtype (rank 1 or more)."""
    e = b.exp(shifted(b, x, dim))
    return b.div(e, b.broadcast_to(b.reduce(e, "add", [dim], keepdim=True), x.shape))


def softmax_gradient(b: OpBuilder, grad: Value, y: Value, dim: int) -> Value:
    """Gradient of softmax from its output, in y's own dtype."""
    product = b.mul(grad, y)
    total = b.broadcast_to(b.reduce(product, "add", [dim], keepdim=True), y.shape)
    return b.mul(b.sub(grad, total), y)


@lower("aten._softmax", lift_0d=True)
def softmax(b: OpBuilder, x: Value, dim: int, half_to_float: bool) -> Value:
    wide = b.convert(x, opmath_dtype(x.dtype))
    return b.convert(softmax_value(b, wide, canonical_dim(dim, x.rank)), b.out_dtype)


@lower("aten._log_softmax", lift_0d=True)
def log_softmax(b: OpBuilder, x: Value, dim: int, half_to_float: bool) -> Value:
    dim = canonical_dim(dim, x.rank)
    z = shifted(b, b.convert(x, opmath_dtype(x.dtype)), dim)
    total = b.log(b.reduce(b.exp(z), "add", [dim], keepdim=True))
    return b.convert(b.sub(z, b.broadcast_to(total, z.shape)), b.out_dtype)


@lower("aten._softmax_backward_data", lift_0d=True)
def softmax_backward(
    b: OpBuilder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    dtype = opmath_dtype(grad.dtype)
    g, y = b.convert(grad, dtype), b.convert(output, dtype)
    return b.convert(softmax_gradient(b, g, y, canonical_dim(dim, output.rank)), b.out_dtype)


@lower("aten._log_softmax_backward_data", lift_0d=True)
def log_softmax_backward(
    b: OpBuilder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    dtype = opmath_dtype(grad.dtype)
    dim = canonical_dim(dim, output.rank)
    g, y = b.convert(grad, dtype), b.convert(output, dtype)
    total = b.broadcast_to(b.reduce(g, "add", [dim], keepdim=True), y.shape)
    return b.convert(b.sub(g, b.mul(b.exp(y), total)), b.out_dtype)


@lower("aten._safe_softmax", lift_0d=True)
def safe_softmax(b: OpBuilder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax whose fully masked rows (all -inf) are zero instead of NaN."""
    dim = canonical_dim(dim, x.rank)
    wide = b.convert(x, opmath_dtype(b.out_dtype))
    top = b.reduce(wide, "max", [dim], keepdim=True)
    masked = b.broadcast_to(b.eq(top, -math.inf), wide.shape)
    return b.convert(b.select(masked, 0, softmax_value(b, wide, dim)), b.out_dtype)


def _mask_like(b: OpBuilder, x: Value, mask: Value, mask_type: int | None) -> Value:
    """The mask in x's shape; type 0 is (L, L), type 1 is (B, L) for x of (B, H, L, L)."""
    mask = b.convert(mask, torch.bool)
    if mask.shape == x.shape:
        return mask
    if mask_type == 1:
        mask = b.reshape(mask, (x.shape[0], 1, 1, x.shape[-1]))
    return b.broadcast_to(mask, x.shape)


@lower("aten._masked_softmax", lift_0d=True, specs=lambda x, *_: [(x.shape, x.dtype)])
def masked_softmax(
    b: OpBuilder, x: Value, mask: Value, dim: int | None = None, mask_type: int | None = None
) -> Value:
    """Softmax over the elements whose mask is False; masked elements are zero."""
    dim = canonical_dim(-1 if dim is None else dim, x.rank)
    hidden = _mask_like(b, x, mask, mask_type)
    wide = b.select(hidden, -math.inf, b.convert(x, opmath_dtype(x.dtype)))
    return b.convert(softmax_value(b, wide, dim), x.dtype)


@lower(
    "aten._masked_softmax_backward", lift_0d=True, specs=lambda grad, *_: [(grad.shape, grad.dtype)]
)
def masked_softmax_backward(
    b: OpBuilder, grad: Value, output: Value, mask: Value, dim: int | None = None
) -> Value:
    dim = canonical_dim(-1 if dim is None else dim, output.rank)
    hidden = _mask_like(b, output, mask, None)
    dtype = opmath_dtype(grad.dtype)
    g, y = b.convert(grad, dtype), b.convert(output, dtype)
    g, y = b.select(hidden, 0, g), b.select(hidden, 0, y)
    return b.convert(softmax_gradient(b, g, y, dim), grad.dtype)
