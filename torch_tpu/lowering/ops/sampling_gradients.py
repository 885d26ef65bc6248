"""Pathwise gradients of gamma and Dirichlet samples.

For a sample z with distribution F(z; a) and density f, dz/da = -(dF/da) / f(z). Both integrals
behind dF/da are taken over the tail on z's own side, in logarithmic distance s from z, where the
integrand is smooth, without cancellation, and falls off exponentially.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.random import compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value

# Nodes of the double exponential rule u = exp(t - exp(-t)) for integrands that decay as exp(-u).
_FIRST, _LAST = -4.0, 4.2


def _quadrature(
    b: OpBuilder,
    scale: Value,
    parameters: list[Value],
    integrand: str,
) -> Value:
    """The integral over s in (0, inf) of the named integrand, whose width is about ``scale``
    (Takahasi and Mori, "Double exponential formulas for numerical integration", 1974)."""
    dtype = scale.dtype
    nodes = 128 if dtype is torch.float64 else 48
    width = (_LAST - _FIRST) / (nodes - 1)

    def add_node(i: Value, total: Value, scale: Value, *fixed: Value) -> list[Value]:
        t = b.add(b.mul(b.convert(i, dtype), width), _FIRST)
        falling = b.exp(b.neg(t))
        u = b.exp(b.sub(t, falling))
        weight = b.mul(b.mul(u, b.add(falling, 1.0)), width)
        s = b.mul(scale, u)
        value = _INTEGRANDS[integrand](b, s, *fixed)
        return [b.add(total, b.mul(b.mul(value, weight), scale)), scale, *fixed]

    start = b.constant(0, dtype, scale.shape)
    return b.fori(nodes, [start, scale, *parameters], add_node)[0]


def _gamma_integrand(b: OpBuilder, s: Value, a: Value, z: Value, gap: Value, side: Value) -> Value:
    """(gap + s) exp(±a s - z |1 - exp(±s)|); side is -1 below a, +1 above."""
    moved = b.mul(s, side)
    return b.mul(b.add(gap, s), b.exp(b.sub(b.mul(a, moved), b.mul(z, b.expm1(moved)))))


def _beta_integrand(
    b: OpBuilder, s: Value, near: Value, far: Value, x: Value, shift: Value, below: Value
) -> Value:
    """The tail of a beta distribution at distance s: near is the exponent on this side, x the
    distance of the sample from this side's end."""
    left = b.mul(x, b.exp(b.neg(s)))
    ratio = b.sub(b.log1p(b.neg(left)), b.log1p(b.neg(x)))
    density = b.exp(b.sub(b.mul(b.sub(far, 1.0), ratio), b.mul(near, s)))
    # log t of the integration variable, which runs from the sample to this side's end.
    log_t = b.select(b.gt(below, 0.0), b.sub(b.log(x), s), b.log1p(b.neg(left)))
    return b.mul(b.add(log_t, shift), density)


_INTEGRANDS: dict[str, Callable[..., Value]] = {"gamma": _gamma_integrand, "beta": _beta_integrand}


def _log_less_digamma(b: OpBuilder, a: Value) -> Value:
    """log(a) - digamma(a), from the asymptotic series where the difference would cancel."""
    large = b.gt(a, 16.0)
    inverse = b.div(1.0, b.select(large, a, 16.0))
    square = b.mul(inverse, inverse)
    tail = b.add(b.mul(square, -1.0 / 252.0), 1.0 / 120.0)
    tail = b.sub(1.0 / 12.0, b.mul(square, tail))
    series = b.add(b.mul(inverse, 0.5), b.mul(square, tail))
    return b.select(large, series, b.sub(b.log(a), b.digamma(a)))


@lower("aten._standard_gamma_grad", specs=lambda alpha, *_: [(alpha.shape, alpha.dtype)])
def standard_gamma_grad(b: OpBuilder, alpha: Value, sample: Value) -> Value:
    """dz / d alpha for a sample z of Gamma(alpha, 1)."""
    work = compute_dtype(alpha.dtype)
    a = b.convert(alpha, work)
    drawn = b.convert(sample, work)
    positive = b.gt(drawn, 0.0)
    z = b.select(positive, drawn, 1.0)
    below = b.lt(z, a)
    side = b.select(below, b.constant(-1.0, work), b.constant(1.0, work))
    offset = b.div(b.sub(z, a), a)
    near = b.lt(b.abs(offset), 0.5)
    log_ratio = b.select(near, b.log1p(b.select(near, offset, 0.0)), b.sub(b.log(z), b.log(a)))
    gap = b.mul(side, b.add(log_ratio, _log_less_digamma(b, a)))
    scale = b.div(1.0, b.add(b.abs(b.sub(a, z)), b.sqrt(z)))
    # A small sample has no bell to either side: below it the density falls as exp(-a s), above it
    # is cut off where exp(s) reaches 1 / z.
    cut = b.minimum(scale, b.log1p(b.div(1.0, z)))
    scale = b.select(b.lt(z, 1.0), b.select(below, b.div(1.0, a), cut), scale)
    integral = _quadrature(b, scale, [a, z, gap, side], "gamma")
    return b.convert(b.select(positive, b.mul(z, integral), 0.0), alpha.dtype)


@lower("aten._dirichlet_grad", specs=lambda x, *_: [(x.shape, x.dtype)])
def dirichlet_grad(b: OpBuilder, x: Value, alpha: Value, total: Value) -> Value:
    """-(d/d alpha cdf) / pdf / (1 - x) of Beta(alpha, total - alpha) at the sample x."""
    work = compute_dtype(x.dtype)
    v, a, whole = b.broadcast(*(b.convert(p, work) for p in (x, alpha, total)))
    rest = b.sub(whole, a)
    shift = b.sub(b.digamma(whole), b.digamma(a))
    below = b.lt(b.mul(v, whole), a)
    near, far = b.select(below, a, rest), b.select(below, rest, a)
    distance = b.select(below, v, b.sub(1.0, v))
    odds = b.div(distance, b.sub(1.0, distance))
    excess = b.maximum(b.sub(far, 1.0), 0.0)
    slope = b.abs(b.sub(near, b.mul(excess, odds)))
    curvature = b.sqrt(b.div(b.mul(excess, odds), b.sub(1.0, distance)))
    scale = b.div(1.0, b.add(slope, curvature))
    flag = b.convert(below, work)
    integral = _quadrature(b, scale, [near, far, distance, shift, flag], "beta")
    lower_side = b.neg(b.mul(odds, integral))
    return b.convert(b.select(below, lower_side, integral), x.dtype)
