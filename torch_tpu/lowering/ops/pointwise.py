"""Elementwise functions of one tensor: exponentials, trigonometry, rounding, tests, parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower, pointwise
from torch_tpu.lowering.types import Operand, Value, real_dtype, scalar_type

Unary = Callable[[OpBuilder, Value], Value]

# -- building blocks ---------------------------------------------------------------------------


def sign_bit(b: OpBuilder, x: Value) -> Value:
    """True where the sign bit of a float is set (also for -0.0 and negative NaN)."""
    return b.lt(b.bitcast(x, SAME_SIZE_INT[x.dtype]), 0)


SAME_SIZE_INT = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# (mantissa bits, exponent bias) of the formats whose words we take apart
FLOAT_LAYOUT = {torch.float32: (23, 127), torch.float64: (52, 1023)}


def power_of_two(b: OpBuilder, n: Value, dtype: torch.dtype) -> Value:
    """2**n for an integer tensor, exact: 0 below the normal range, inf above the largest exponent.

    ``dtype`` is float32 or float64.
    """
    word = SAME_SIZE_INT[dtype]
    bits, bias = FLOAT_LAYOUT[dtype]
    biased = b.add(b.clamp(b.convert(n, word), -bias, bias + 1), bias)
    return b.bitcast(b.shift_left(biased, bits), dtype)


def scale_by_power_of_two(b: OpBuilder, x: Value, n: Value) -> Value:
    """x * 2**n in three exact steps, so that the result overflows or underflows only at the end."""
    _, bias = FLOAT_LAYOUT[x.dtype]
    n = b.clamp(n, -3 * bias, 3 * bias)
    for parts in (3, 2):
        step = b.div(n, parts)
        x = b.mul(x, power_of_two(b, step, x.dtype))
        n = b.sub(n, step)
    return b.mul(x, power_of_two(b, n, x.dtype))


def exp2(b: OpBuilder, x: Value) -> Value:
    """2**x: the integer part goes into the exponent, so large arguments lose no accuracy."""
    if x.is_complex:
        return b.exp(b.mul(x, math.log(2.0)))
    _, bias = FLOAT_LAYOUT[x.dtype]
    clipped = b.clamp(x, -2.0 * bias, 2.0 * bias)
    whole = b.round_even(clipped)
    part = b.exp(b.mul(b.sub(clipped, whole), math.log(2.0)))
    count = b.convert(whole, SAME_SIZE_INT[x.dtype])
    half = b.shift_right_arithmetic(count, 1)
    scaled = b.mul(part, power_of_two(b, half, x.dtype))
    scaled = b.mul(scaled, power_of_two(b, b.sub(count, half), x.dtype))
    return b.select(b.is_nan(x), x, scaled)


def copysign(b: OpBuilder, magnitude: Value, sign: Value) -> Value:
    """``magnitude`` with the sign bit of ``sign``; both of one float dtype."""
    size = b.abs(magnitude)
    return b.select(sign_bit(b, sign), b.neg(size), size)


def _reciprocal(b: OpBuilder, x: Value) -> Value:
    return b.div(b.constant(1, x.dtype), x)


def _log_base(base: float) -> Unary:
    return lambda b, x: b.div(b.log(x), math.log(base))


def _sinc(b: OpBuilder, x: Value) -> Value:
    z = b.mul(x, math.pi)
    return b.select(b.eq(x, 0), 1, b.div(b.sin(z), z))


def _degrees(b: OpBuilder, x: Value) -> Value:
    return b.mul(x, 180.0 / math.pi)


def _radians(b: OpBuilder, x: Value) -> Value:
    return b.mul(x, math.pi / 180.0)


def _chlo(name: str) -> Unary:
    return lambda b, x: b.chlo(name, x)


# -- float functions: integers become the default dtype, half precision computes in float32 ------

_FLOAT: dict[tuple[str, ...], Unary] = {
    ("aten.exp", "prims.exp"): Builder.exp,
    ("aten.exp2", "prims.exp2"): exp2,
    ("aten.expm1", "prims.expm1"): Builder.expm1,
    ("aten.log", "prims.log"): Builder.log,
    ("aten.log2", "prims.log2"): _log_base(2.0),
    ("aten.log10", "prims.log10"): _log_base(10.0),
    ("aten.log1p", "prims.log1p"): Builder.log1p,
    ("aten.sqrt", "prims.sqrt"): Builder.sqrt,
    ("aten.rsqrt", "prims.rsqrt"): Builder.rsqrt,
    ("prims.cbrt",): Builder.cbrt,
    ("aten.reciprocal", "prims.reciprocal"): _reciprocal,
    ("aten.sin", "prims.sin"): Builder.sin,
    ("aten.cos", "prims.cos"): Builder.cos,
    ("aten.tan", "prims.tan"): Builder.tan,
    ("aten.asin", "prims.asin"): _chlo("asin"),
    ("aten.acos", "prims.acos"): _chlo("acos"),
    ("aten.atan", "prims.atan"): _chlo("atan"),
    ("aten.sinh", "prims.sinh"): _chlo("sinh"),
    ("aten.cosh", "prims.cosh"): _chlo("cosh"),
    ("aten.tanh", "prims.tanh"): Builder.tanh,
    ("aten.asinh", "prims.asinh"): _chlo("asinh"),
    ("aten.acosh", "prims.acosh"): _chlo("acosh"),
    ("aten.atanh", "prims.atanh"): _chlo("atanh"),
    ("aten.sigmoid",): Builder.sigmoid,
    ("aten.sinc",): _sinc,
    ("aten.deg2rad",): _radians,
    ("aten.rad2deg",): _degrees,
    ("aten.erf", "prims.erf"): Builder.erf,
    ("aten.erfc", "prims.erfc"): Builder.erfc,
    ("aten.erfinv", "prims.erf_inv"): Builder.erf_inv,
}
for _names, _fn in _FLOAT.items():
    pointwise(*_names)(_fn)


@pointwise("aten.logit")
def logit(b: OpBuilder, x: Value, eps: float | None = None) -> Value:
    if eps is not None:
        x = b.clamp(x, eps, 1.0 - eps)
    return b.log(b.div(x, b.sub(b.constant(1, x.dtype), x)))


# -- rounding: integers pass through -----------------------------------------------------------


def _rounding(fn: Unary) -> Unary:
    return lambda b, x: fn(b, x) if x.is_float else x


def _frac(b: OpBuilder, x: Value) -> Value:
    return b.sub(x, b.trunc(x))


_ROUNDING: dict[tuple[str, ...], Unary] = {
    ("aten.floor", "prims.floor"): Builder.floor,
    ("aten.ceil", "prims.ceil"): Builder.ceil,
    ("aten.trunc", "prims.trunc"): Builder.trunc,
    ("aten.round.default", "prims.round"): Builder.round_even,
    ("aten.frac",): _frac,
}
for _names, _fn in _ROUNDING.items():
    pointwise(*_names)(_rounding(_fn))


@pointwise("aten.round.decimals")
def round_decimals(b: OpBuilder, x: Value, *, decimals: int) -> Value:
    if not x.is_float or decimals == 0:
        return b.round_even(x) if x.is_float else x
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return b.div(b.round_even(b.mul(x, scale)), scale)
    return b.mul(b.round_even(b.div(x, scale)), scale)


# -- sign and magnitude ------------------------------------------------------------------------


@lower("aten.abs", "prims.abs")
def absolute(b: OpBuilder, x: Value) -> Value:
    return b.abs(x)


@pointwise("aten.neg", "prims.neg")
def negate(b: OpBuilder, x: Value) -> Value:
    return b.neg(x)


@pointwise("aten.sign", "aten.sgn", "prims.sign")
def sign(b: OpBuilder, x: Value) -> Value:
    """sgn of a complex number z is z / |z|, and 0 at 0."""
    return b.sign(x)


@lower("aten.signbit", "prims.signbit")
def signbit(b: OpBuilder, x: Value) -> Value:
    if x.is_float:
        return sign_bit(b, x)
    if x.is_bool or x.is_unsigned:
        return b.constant(False, torch.bool, x.shape)
    return b.lt(x, 0)


# -- classification ----------------------------------------------------------------------------


def _infinity(limit: float) -> Unary:
    def fn(b: OpBuilder, x: Value) -> Value:
        if not x.is_float:
            return b.constant(False, torch.bool, x.shape)
        return b.eq(x, limit)

    return fn


_TESTS: dict[tuple[str, ...], Unary] = {
    ("aten.isnan",): Builder.is_nan,
    ("aten.isinf",): Builder.is_inf,
    ("prims.isfinite",): Builder.is_finite,
    ("aten.isposinf",): _infinity(math.inf),
    ("aten.isneginf",): _infinity(-math.inf),
}
for _names, _fn in _TESTS.items():
    lower(*_names)(_fn)


@pointwise("aten.nan_to_num")
def nan_to_num(
    b: OpBuilder,
    x: Value,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    if x.is_complex:
        parts = (nan_to_num(b, part, nan, posinf, neginf) for part in (b.real(x), b.imag(x)))
        return b.complex(*parts)
    if not x.is_float:
        return x
    limit = torch.finfo(real_dtype(b.out_dtype)).max
    high = limit if posinf is None else posinf
    low = -limit if neginf is None else neginf
    out = b.select(b.is_nan(x), 0.0 if nan is None else nan, x)
    out = b.select(b.eq(x, math.inf), high, out)
    return b.select(b.eq(x, -math.inf), low, out)


# -- complex numbers ---------------------------------------------------------------------------


@lower("prims.real")
def real(b: OpBuilder, x: Value) -> Value:
    return b.real(x)


@lower("prims.imag")
def imag(b: OpBuilder, x: Value) -> Value:
    return b.imag(x)


@lower("aten._conj_physical", "aten.conj_physical", "prims.conj_physical", "prims.conj")
def conj(b: OpBuilder, x: Value) -> Value:
    return b.conj(x)


@lower("aten.angle")
def angle(b: OpBuilder, x: Value) -> Value:
    """The argument; 0 or pi for real numbers, NaN stays NaN."""
    if x.is_complex:
        return b.atan2(b.imag(x), b.real(x))
    if not x.is_float:
        x = b.convert(x, b.out_dtype)
    return b.select(b.is_nan(x), x, b.select(b.lt(x, 0), math.pi, b.constant(0, x.dtype, x.shape)))


def _one_dtype(first: Value, second: Value) -> None:
    if first.dtype is not second.dtype:
        raise RuntimeError(
            f"Expected object of scalar type {scalar_type(first.dtype)} but got scalar type "
            f"{scalar_type(second.dtype)} for second argument"
        )


@lower("aten.complex")
def complex_(b: OpBuilder, re: Value, im: Value) -> Value:
    _one_dtype(re, im)
    return b.complex(re, im)


@lower("aten.polar")
def polar(b: OpBuilder, magnitude: Value, phase: Value) -> Value:
    _one_dtype(magnitude, phase)
    return b.complex(b.mul(magnitude, b.cos(phase)), b.mul(magnitude, b.sin(phase)))


# -- floats taken apart ------------------------------------------------------------------------


@pointwise("aten.ldexp.Tensor", keep=("other",))
def ldexp(b: OpBuilder, x: Value, other: Operand) -> Value:
    """x * 2**other."""
    if not isinstance(other, Value):
        other = b.constant(other, torch.float64 if isinstance(other, float) else torch.int64)
    if other.is_float or other.is_complex:
        return b.mul(x, exp2(b, b.convert(other, x.dtype)))
    if x.is_complex:
        scale = power_of_two(b, b.convert(other, torch.int32), real_dtype(x.dtype))
        return b.mul(x, b.convert(scale, x.dtype))
    return b.mul(x, power_of_two(b, b.convert(other, torch.int32), x.dtype))


@lower("aten.frexp.Tensor", "prims.frexp")
def frexp(b: OpBuilder, x: Value) -> list[Value]:
    """(m, e) with x = m * 2**e and 0.5 <= |m| < 1; subnormals included."""
    out = b.out_dtype
    if x.dtype not in FLOAT_LAYOUT:
        x = b.convert(x, torch.float32)
    bits, bias = FLOAT_LAYOUT[x.dtype]
    word_dtype = SAME_SIZE_INT[x.dtype]
    word = b.bitcast(x, word_dtype)
    fraction = b.and_(word, (1 << bits) - 1)
    exponent = b.and_(b.shift_right_logical(word, bits), 2 * bias + 1)
    subnormal = b.and_(b.eq(exponent, 0), b.ne(fraction, 0))
    # Shift the leading one of a subnormal's fraction up to the implicit bit.
    shift = b.sub(b.count_leading_zeros(fraction), x.dtype.itemsize * 8 - 1 - bits)
    normalised = b.and_(b.shift_left(fraction, shift), (1 << bits) - 1)
    fraction = b.select(subnormal, normalised, fraction)
    exponent = b.select(subnormal, b.sub(b.constant(1, word_dtype), shift), exponent)
    sign_word = b.and_(word, b.constant(-1 << (x.dtype.itemsize * 8 - 1), word_dtype))
    mantissa = b.bitcast(b.or_(b.or_(sign_word, (bias - 1) << bits), fraction), x.dtype)
    plain = b.or_(b.eq(x, 0), b.not_(b.is_finite(x)))
    plain = b.and_(plain, b.not_(subnormal))
    mantissa = b.select(plain, x, mantissa)
    exponent = b.select(plain, 0, b.sub(exponent, bias - 1))
    return [b.convert(mantissa, out), b.convert(exponent, torch.int32)]
