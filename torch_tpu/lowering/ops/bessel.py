"""Bessel functions of order 0 and 1, modified and spherical ones, and the Airy function Ai."""

from __future__ import annotations

import math

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops import approximations as table
from torch_tpu.lowering.ops.approximations import chebyshev
from torch_tpu.lowering.registry import pointwise
from torch_tpu.lowering.types import Value

# -- modified, first kind ----------------------------------------------------------------------


def _i_scaled(b: OpBuilder, order: int, x: Value) -> Value:
    """exp(-|x|) I_order(|x|)."""
    x = b.abs(x)
    small_table, large_table = (
        (table.I0_SMALL, table.I0_LARGE) if order == 0 else (table.I1_SMALL, table.I1_LARGE)
    )
    near = b.minimum(x, 8.0)
    small = chebyshev(b, small_table, b.sub(b.mul(near, 0.25), 1.0))
    if order == 1:
        small = b.mul(small, near)
    far = b.maximum(x, 8.0)
    ratio = b.sub(b.div(b.constant(16.0, x.dtype), far), 1.0)
    large = b.div(chebyshev(b, large_table, ratio), b.sqrt(far))
    return b.select(b.le(x, 8.0), small, large)


def _odd(b: OpBuilder, x: Value, of_magnitude: Value) -> Value:
    return b.select(b.lt(x, 0), b.neg(of_magnitude), of_magnitude)


@pointwise("aten.special_i0e", "prims.bessel_i0e")
def i0e(b: OpBuilder, x: Value) -> Value:
    return _i_scaled(b, 0, x)


@pointwise("aten.special_i1e", "prims.bessel_i1e")
def i1e(b: OpBuilder, x: Value) -> Value:
    return _odd(b, x, _i_scaled(b, 1, x))


@pointwise("aten.i0", "aten.special_modified_bessel_i0", "prims.bessel_i0")
def i0(b: OpBuilder, x: Value) -> Value:
    return b.mul(b.exp(b.abs(x)), _i_scaled(b, 0, x))


@pointwise("aten.special_i1", "aten.special_modified_bessel_i1", "prims.bessel_i1")
def i1(b: OpBuilder, x: Value) -> Value:
    return _odd(b, x, b.mul(b.exp(b.abs(x)), _i_scaled(b, 1, x)))


# -- modified, second kind ---------------------------------------------------------------------


def _k(b: OpBuilder, order: int, x: Value, scaled: bool) -> Value:
    """K_order(x), times exp(x) if ``scaled``: inf at 0, NaN below."""
    near = b.minimum(x, 2.0)
    t = b.sub(b.mul(b.mul(near, near), 0.5), 1.0)
    bessel_i = b.mul(_i_scaled(b, order, near), b.exp(near))
    logarithm = b.mul(b.log(b.mul(near, 0.5)), bessel_i)
    if order == 0:
        small = b.sub(chebyshev(b, table.K0_SMALL, t), logarithm)
    else:
        small = b.add(b.div(chebyshev(b, table.K1_SMALL, t), near), logarithm)
    if scaled:
        small = b.mul(small, b.exp(near))
    far = b.maximum(x, 2.0)
    ratio = b.sub(b.div(b.constant(4.0, x.dtype), far), 1.0)
    large = chebyshev(b, table.K0_LARGE if order == 0 else table.K1_LARGE, ratio)
    large = b.div(large, b.sqrt(far))
    if not scaled:
        large = b.mul(large, b.exp(b.neg(far)))
    out = b.select(b.le(x, 2.0), small, large)
    out = b.select(b.eq(x, 0), math.inf, out)
    return b.select(b.lt(x, 0), math.nan, out)


@pointwise("aten.special_modified_bessel_k0")
def k0(b: OpBuilder, x: Value) -> Value:
    return _k(b, 0, x, scaled=False)


@pointwise("aten.special_modified_bessel_k1")
def k1(b: OpBuilder, x: Value) -> Value:
    return _k(b, 1, x, scaled=False)


@pointwise("aten.special_scaled_modified_bessel_k0")
def scaled_k0(b: OpBuilder, x: Value) -> Value:
    return _k(b, 0, x, scaled=True)


@pointwise("aten.special_scaled_modified_bessel_k1")
def scaled_k1(b: OpBuilder, x: Value) -> Value:
    return _k(b, 1, x, scaled=True)


# -- oscillating -------------------------------------------------------------------------------


def _wave(b: OpBuilder, order: int, x: Value) -> tuple[Value, Value]:
    """J and Y for x >= 8: sqrt(2/(pi x)) times P, Q rotated by x - (order/2 + 1/4) pi.

    Sums of sin(x) and cos(x) stand for the shifted phase, which would round x.
    """
    t = b.sub(b.div(b.constant(128.0, x.dtype), b.mul(x, x)), 1.0)
    p = chebyshev(b, table.P0 if order == 0 else table.P1, t)
    q = chebyshev(b, table.Q0 if order == 0 else table.Q1, t)
    q = b.div(b.mul(q, 8.0), x)
    s, c = b.sin(x), b.cos(x)
    plus, minus = b.add(s, c), b.sub(s, c)
    cosine, sine = (plus, minus) if order == 0 else (minus, b.neg(plus))
    scale = b.div(b.constant(1.0, x.dtype), b.sqrt(b.mul(x, math.pi)))
    j = b.mul(scale, b.sub(b.mul(p, cosine), b.mul(q, sine)))
    y = b.mul(scale, b.add(b.mul(p, sine), b.mul(q, cosine)))
    return j, y


def _near_squared(b: OpBuilder, x: Value) -> Value:
    """The series' variable over [0, 8]."""
    return b.sub(b.div(b.mul(x, x), 32.0), 1.0)


def _j_small(b: OpBuilder, order: int, near: Value) -> Value:
    t = _near_squared(b, near)
    if order == 0:
        return chebyshev(b, table.J0_SMALL, t)
    return b.mul(near, chebyshev(b, table.J1_SMALL, t))


def _j(b: OpBuilder, order: int, x: Value) -> Value:
    size = b.abs(x)
    small = _j_small(b, order, b.minimum(size, 8.0))
    large, _ = _wave(b, order, b.maximum(size, 8.0))
    out = b.select(b.le(size, 8.0), small, large)
    return _odd(b, x, out) if order == 1 else out


def _y(b: OpBuilder, order: int, x: Value) -> Value:
    """-inf at 0, NaN below."""
    near = b.minimum(x, 8.0)
    t = _near_squared(b, near)
    singular = b.mul(b.log(near), _j_small(b, order, near))
    if order == 0:
        small = b.add(b.mul(singular, 2.0 / math.pi), chebyshev(b, table.Y0_SMALL, t))
    else:
        singular = b.sub(singular, b.div(b.constant(1.0, x.dtype), near))
        regular = b.mul(near, chebyshev(b, table.Y1_SMALL, t))
        small = b.add(b.mul(singular, 2.0 / math.pi), regular)
    _, large = _wave(b, order, b.maximum(x, 8.0))
    out = b.select(b.le(x, 8.0), small, large)
    out = b.select(b.eq(x, 0), -math.inf, out)
    return b.select(b.lt(x, 0), math.nan, out)


@pointwise("aten.special_bessel_j0", "prims.bessel_j0")
def j0(b: OpBuilder, x: Value) -> Value:
    return _j(b, 0, x)


@pointwise("aten.special_bessel_j1", "prims.bessel_j1")
def j1(b: OpBuilder, x: Value) -> Value:
    return _j(b, 1, x)


@pointwise("aten.special_bessel_y0")
def y0(b: OpBuilder, x: Value) -> Value:
    return _y(b, 0, x)


@pointwise("aten.special_bessel_y1")
def y1(b: OpBuilder, x: Value) -> Value:
    return _y(b, 1, x)


@pointwise("aten.special_spherical_bessel_j0", "prims.spherical_bessel_j0")
def spherical_j0(b: OpBuilder, x: Value) -> Value:
    """sin(x) / x; 1 at 0 and 0 at infinity."""
    out = b.div(b.sin(x), x)
    series = b.sub(b.constant(1.0, x.dtype), b.div(b.mul(x, x), 6.0))
    out = b.select(b.lt(b.abs(x), 1e-4), series, out)
    return b.select(b.is_inf(x), 0, out)


@pointwise("aten.special_airy_ai")
def airy_ai(b: OpBuilder, x: Value) -> Value:
    """Ai(x); NaN at both infinities, as PyTorch."""
    size = b.abs(x)
    middle = b.clamp(x, -4.0, 2.0)
    inner = chebyshev(b, table.AIRY_MIDDLE, b.div(b.add(middle, 1.0), 3.0))

    def phase(magnitude: Value) -> Value:
        return b.mul(b.mul(magnitude, b.sqrt(magnitude)), 2.0 / 3.0)

    right = b.maximum(size, 2.0)
    z = phase(right)
    t = b.sub(b.div(b.constant(2.0 * (2.0 / 3.0) * 2.0**1.5, x.dtype), z), 1.0)
    decay = b.mul(b.exp(b.neg(z)), chebyshev(b, table.AIRY_POSITIVE, t))
    decay = b.div(decay, b.mul(b.sqrt(b.sqrt(right)), 2.0 * math.sqrt(math.pi)))

    left = b.maximum(size, 4.0)
    z = phase(left)
    ratio = b.div(b.constant(16.0 / 3.0, x.dtype), z)
    t = b.sub(b.mul(b.mul(ratio, ratio), 2.0), 1.0)
    p = chebyshev(b, table.AIRY_P, t)
    q = b.div(chebyshev(b, table.AIRY_Q, t), z)
    s, c = b.sin(z), b.cos(z)
    wave = b.add(b.mul(p, b.add(s, c)), b.mul(q, b.sub(s, c)))
    wave = b.div(wave, b.mul(b.sqrt(b.sqrt(left)), math.sqrt(2.0 * math.pi)))

    out = b.select(b.gt(x, 2.0), decay, b.select(b.lt(x, -4.0), wave, inner))
    return b.select(b.is_inf(x), math.nan, out)
