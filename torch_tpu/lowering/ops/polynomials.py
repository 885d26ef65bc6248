"""Orthogonal polynomials of a per-element degree, by their three-term recurrences.

Every op takes (x, n), either of which may be a number. Degrees truncate to integers; negative ones
give 0. Reference: DLMF 18.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import pointwise
from torch_tpu.lowering.types import Operand, Value

# (b, x) -> the polynomial of degree 1
First = Callable[[OpBuilder, Value], Value]
# (b, k, x, P_k, P_{k-1}) -> P_{k+1}
Step = Callable[[OpBuilder, Value, Value, Value, Value], Value]
# (b, n, theta) -> P_n(cos theta) for 0 < theta < pi
Angle = Callable[[OpBuilder, Value, Value], Value]


@dataclass(frozen=True)
class Family:
    """One family; ``angle`` is its closed form inside (-1, 1), ``limited`` a largest degree."""

    first: First
    step: Step
    angle: Angle | None = None
    shifted: bool = False
    limited: bool = False


def _twice(b: OpBuilder, x: Value) -> Value:
    return b.add(x, x)


def _chebyshev_step(b: OpBuilder, k: Value, x: Value, current: Value, before: Value) -> Value:
    return b.sub(b.mul(_twice(b, x), current), before)


def _half_angle(function: str) -> Angle:
    """sin or cos of (n + 1/2) theta over that of theta / 2."""

    def fn(b: OpBuilder, n: Value, theta: Value) -> Value:
        wave = getattr(b, function)
        return b.div(wave(b.mul(b.add(n, 0.5), theta)), wave(b.mul(theta, 0.5)))

    return fn


def _sine_ratio(b: OpBuilder, n: Value, theta: Value) -> Value:
    return b.div(b.sin(b.mul(b.add(n, 1.0), theta)), b.sin(theta))


def _hermite_h_step(b: OpBuilder, k: Value, x: Value, current: Value, before: Value) -> Value:
    return b.sub(b.mul(_twice(b, x), current), b.mul(b.mul(k, 2.0), before))


def _hermite_he_step(b: OpBuilder, k: Value, x: Value, current: Value, before: Value) -> Value:
    return b.sub(b.mul(x, current), b.mul(k, before))


def _laguerre_step(b: OpBuilder, k: Value, x: Value, current: Value, before: Value) -> Value:
    odd = b.add(b.mul(k, 2.0), 1.0)
    top = b.sub(b.mul(b.sub(odd, x), current), b.mul(k, before))
    return b.div(top, b.add(k, 1.0))


def _legendre_step(b: OpBuilder, k: Value, x: Value, current: Value, before: Value) -> Value:
    odd = b.add(b.mul(k, 2.0), 1.0)
    top = b.sub(b.mul(b.mul(odd, x), current), b.mul(k, before))
    return b.div(top, b.add(k, 1.0))


def _cosine(b: OpBuilder, n: Value, theta: Value) -> Value:
    return b.cos(b.mul(n, theta))


_CHEBYSHEV: dict[str, tuple[First, Angle]] = {
    "t": (lambda b, x: x, _cosine),
    "u": (_twice, _sine_ratio),
    "v": (lambda b, x: b.sub(_twice(b, x), 1.0), _half_angle("cos")),
    "w": (lambda b, x: b.add(_twice(b, x), 1.0), _half_angle("sin")),
}

FAMILIES: dict[str, Family] = {
    "hermite_polynomial_h": Family(_twice, _hermite_h_step, limited=True),
    "hermite_polynomial_he": Family(lambda b, x: x, _hermite_he_step, limited=True),
    "laguerre_polynomial_l": Family(
        lambda b, x: b.sub(b.constant(1.0, x.dtype), x), _laguerre_step
    ),
    "legendre_polynomial_p": Family(lambda b, x: x, _legendre_step),
}
for _kind, (_first, _angle) in _CHEBYSHEV.items():
    FAMILIES[f"chebyshev_polynomial_{_kind}"] = Family(_first, _chebyshev_step, _angle)
    FAMILIES[f"shifted_chebyshev_polynomial_{_kind}"] = Family(
        _first, _chebyshev_step, _angle, shifted=True
    )


def evaluate(b: OpBuilder, family: Family, x: Operand, n: Operand) -> Value:
    """P_n(x) for all elements at once; the loop runs to the largest degree that needs it."""
    x, n = b.operands(x, n)
    n = b.trunc(n)
    if family.shifted:
        x = b.sub(_twice(b, x), 1.0)
    one = b.constant(1.0, x.dtype, x.shape)
    start = family.first(b, x)
    looping = b.gt(n, 1.0)
    if family.angle is not None:
        closed = b.and_(b.lt(b.abs(x), 1.0), b.gt(n, 8.0))
        looping = b.and_(looping, b.not_(closed))
    if family.limited:
        # Beyond, the values overflow in any case; PyTorch answers NaN.
        too_large = b.gt(n, 512.0 if x.dtype is torch.float64 else 128.0)
        looping = b.and_(looping, b.not_(too_large))
    last = b.select(looping, n, 0.0)

    def running(k: Value, current: Value, _: Value, __: Value, last: Value) -> Value:
        # A NaN stays one, so it ends its element's loop.
        more = b.and_(b.lt(k, last), b.not_(b.is_nan(current)))
        return b.reduce(more, "or", range(last.rank))

    def step(k: Value, current: Value, before: Value, x: Value, last: Value) -> list[Value]:
        more = b.lt(k, last)
        following = family.step(b, k, x, current, before)
        current, before = b.select(more, following, current), b.select(more, current, before)
        return [b.add(k, 1.0), current, before, x, last]

    counter = b.constant(1.0, x.dtype)
    out = b.while_([counter, start, one, x, last], running, step)[1]
    out = b.select(b.eq(n, 0), one, out)
    if family.angle is not None:
        theta = b.chlo("acos", b.clamp(x, -1.0, 1.0))
        out = b.select(closed, family.angle(b, n, theta), out)
    if family.limited:
        out = b.select(too_large, math.nan, out)
    return b.select(b.lt(n, 0), 0, out)


def _lowering(family: Family) -> Callable[[OpBuilder, Operand, Operand], Value]:
    return lambda b, x, n: evaluate(b, family, x, n)


for _name, _family in FAMILIES.items():
    pointwise(
        f"aten.special_{_name}.default",
        f"aten.special_{_name}.x_scalar",
        f"aten.special_{_name}.n_scalar",
    )(_lowering(_family))
