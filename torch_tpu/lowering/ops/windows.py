"""Window functions of signal processing, of a static length."""

from __future__ import annotations

import math

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.bessel import i0
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype


def _position(b: OpBuilder, periodic: bool, scale: float) -> Value:
    """scale * n / (N - 1) for n < length; a periodic window is one of N = length + 1 points cut."""
    (length,) = b.out_shape
    steps = length if periodic else length - 1
    return b.mul(b.iota((length,), 0, opmath_dtype(b.out_dtype)), scale / steps)


def _single(b: OpBuilder) -> Value | None:
    """A window of one point is 1."""
    return b.constant(1, b.out_dtype, (1,)) if b.out_shape == (1,) else None


@lower("aten.bartlett_window")
def bartlett_window(b: OpBuilder, length: int, periodic: bool = True) -> Value:
    single = _single(b)
    if single is not None:
        return single
    rising = _position(b, periodic, 2.0)
    falling = b.sub(b.constant(2.0, rising.dtype), rising)
    return b.convert(b.minimum(rising, falling), b.out_dtype)


@lower("aten.hamming_window")
def hamming_window(
    b: OpBuilder, length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46
) -> Value:
    """alpha - beta * cos(2 pi n / (N - 1))."""
    single = _single(b)
    if single is not None:
        return single
    wave = b.cos(_position(b, periodic, 2.0 * math.pi))
    return b.convert(b.add(b.mul(wave, -beta), alpha), b.out_dtype)


@lower("aten.hann_window")
def hann_window(b: OpBuilder, length: int, periodic: bool = True) -> Value:
    return hamming_window(b, length, periodic, 0.5, 0.5)


@lower("aten.blackman_window")
def blackman_window(b: OpBuilder, length: int, periodic: bool = True) -> Value:
    single = _single(b)
    if single is not None:
        return single
    angle = _position(b, periodic, 2.0 * math.pi)
    first, second = b.cos(angle), b.cos(b.mul(angle, 2.0))
    window = b.add(b.sub(b.mul(second, 0.08), b.mul(first, 0.5)), 0.42)
    return b.convert(window, b.out_dtype)


@lower("aten.kaiser_window", operand=("beta",))
def kaiser_window(
    b: OpBuilder, length: int, periodic: bool = True, beta: Value | float = 12.0
) -> Value:
    """I0(beta * sqrt(1 - t*t)) / I0(beta) for t from -1 to 1."""
    single = _single(b)
    if single is not None:
        return single
    t = b.sub(_position(b, periodic, 2.0), 1.0)
    inside = b.maximum(b.sub(b.constant(1.0, t.dtype), b.mul(t, t)), 0.0)
    shape = b.as_value(beta, t.dtype)
    window = b.div(i0(b, b.mul(b.sqrt(inside), shape)), i0(b, shape))
    return b.convert(window, b.out_dtype)
