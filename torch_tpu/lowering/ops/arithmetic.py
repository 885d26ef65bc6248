"""Arithmetic of two and three tensors: sums, products, quotients, powers, extrema, selection."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.pointwise import copysign, exp2
from torch_tpu.lowering.registry import pointwise
from torch_tpu.lowering.types import Operand, Value

# -- sums and products -------------------------------------------------------------------------


def _scaled(b: OpBuilder, x: Operand, factor: Operand) -> Operand:
    """x * factor; a factor that is the number 1 costs nothing."""
    if not isinstance(factor, Value) and factor == 1:
        return x
    if not isinstance(x, Value):
        x = b.as_value(x, b.out_dtype)
    return b.mul(x, factor)


@pointwise("aten.add", "prims.add")
def add(b: OpBuilder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return b.add(x, _scaled(b, y, alpha))


@pointwise("aten.sub", "prims.sub")
def sub(b: OpBuilder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return b.sub(x, _scaled(b, y, alpha))


@pointwise("aten.rsub")
def rsub(b: OpBuilder, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
    return b.sub(y, _scaled(b, x, alpha))


@pointwise("aten.mul", "prims.mul")
def mul(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.mul(x, y)


@pointwise("aten.addcmul")
def addcmul(b: OpBuilder, x: Value, y: Value, z: Value, *, value: Operand = 1) -> Value:
    return b.add(x, b.mul(_scaled(b, y, value), z))


@pointwise("aten.addcdiv")
def addcdiv(b: OpBuilder, x: Value, y: Value, z: Value, *, value: Operand = 1) -> Value:
    return b.add(x, b.div(_scaled(b, y, value), z))


@pointwise("aten.lerp")
def lerp(b: OpBuilder, start: Value, end: Value, weight: Operand) -> Value:
    """The form anchored at the nearer end, so that weight 1 gives ``end`` exactly."""
    gap = b.sub(end, start)
    near_end = b.sub(end, b.mul(gap, b.sub(b.constant(1, gap.dtype), weight)))
    near_start = b.add(start, b.mul(gap, weight))
    if not isinstance(weight, Value):
        return near_start if abs(weight) < 0.5 else near_end
    return b.select(b.lt(b.abs(weight) if weight.is_complex else weight, 0.5), near_start, near_end)


# -- division ----------------------------------------------------------------------------------


def _both(b: OpBuilder, x: Operand, y: Operand) -> tuple[Value, Value]:
    x, y = b.operands(x, y)
    return x, y


def _signs_differ(b: OpBuilder, x: Value, y: Value) -> Value:
    return b.ne(b.lt(x, 0), b.lt(y, 0))


def remainder_floor(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """Python's ``%``: the result has the sign of the divisor."""
    x, y = _both(b, x, y)
    rest = b.remainder(x, y)
    if x.is_unsigned:
        return rest
    wrong = b.and_(b.ne(rest, 0), _signs_differ(b, rest, y))
    return b.select(wrong, b.add(rest, y), rest)


def divide_floor(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """Division rounded towards minus infinity, consistent with :func:`remainder_floor`."""
    x, y = _both(b, x, y)
    if x.is_unsigned:
        return b.div(x, y)
    rest = b.remainder(x, y)
    wrong = b.and_(b.ne(rest, 0), _signs_differ(b, rest, y))
    if not x.is_float:
        quotient = b.div(x, y)
        return b.select(wrong, b.sub(quotient, 1), quotient)
    exact = b.div(x, y)
    quotient = b.div(b.sub(x, rest), y)
    quotient = b.select(wrong, b.sub(quotient, 1), quotient)
    whole = b.floor(quotient)
    whole = b.select(b.gt(b.sub(quotient, whole), 0.5), b.add(whole, 1), whole)
    zero = copysign(b, b.constant(0, x.dtype, exact.shape), exact)
    return b.select(b.eq(y, 0), exact, b.select(b.ne(quotient, 0), whole, zero))


def divide_trunc(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """Division rounded towards zero; PyTorch rounds the quotient to the result's dtype first."""
    quotient = b.div(x, y)
    return b.trunc(b.reduce_precision(quotient, b.out_dtype)) if quotient.is_float else quotient


@pointwise("aten.div.Tensor", "aten.div.Scalar")
def div(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.div(x, y)


@pointwise("prims.div")
def div_prim(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """True division, truncating for integers."""
    return b.div(x, y)


@pointwise("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(b: OpBuilder, x: Operand, y: Operand, *, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return b.div(x, y)
    return divide_floor(b, x, y) if rounding_mode == "floor" else divide_trunc(b, x, y)


pointwise("aten.floor_divide")(divide_floor)
pointwise("aten.remainder", "prims.remainder")(remainder_floor)


@pointwise("aten.fmod", "prims.fmod")
def fmod(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.remainder(x, y)


# -- powers ------------------------------------------------------------------------------------


@pointwise("aten.pow.Tensor_Tensor", "aten.pow.Scalar", "prims.pow")
def power(b: OpBuilder, x: Operand, y: Operand) -> Value:
    if not isinstance(x, Value) and x == 2 and isinstance(y, Value) and y.is_float:
        return exp2(b, y)
    if b.out_dtype is torch.bool:  # x ** y is x or not y
        x, y = _both(b, x, y)
        return b.or_(x, b.not_(y))
    return b.pow(x, y)


@pointwise("aten.pow.Tensor_Scalar", static=("exponent",))
def power_number(b: OpBuilder, x: Value, exponent: Operand) -> Value:
    """A static exponent of a simple value needs no transcendental function."""
    if isinstance(exponent, Value) or x.is_bool:
        return power(b, x, exponent)
    if exponent == 0:
        return b.constant(1, x.dtype, x.shape)
    if exponent in (1, 2, 3, 4):
        square = b.mul(x, x)
        return {1: x, 2: square, 3: b.mul(square, x), 4: b.mul(square, square)}[int(exponent.real)]
    if x.is_float:
        one = b.constant(1, x.dtype, x.shape)
        if exponent == 0.5:
            return b.sqrt(x)
        if exponent == -0.5:
            return b.div(one, b.sqrt(x))
        if exponent == -1:
            return b.div(one, x)
        if exponent == -2:
            return b.div(one, b.mul(x, x))
    return b.pow(x, exponent)


# -- extrema -----------------------------------------------------------------------------------


@pointwise("aten.maximum", "prims.maximum", opmath=False)
def maximum(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.maximum(x, y)


@pointwise("aten.minimum", "prims.minimum", opmath=False)
def minimum(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.minimum(x, y)


@pointwise("aten.fmax", "prims.fmax", opmath=False)
def fmax(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """The larger number; a NaN loses against a number."""
    x, y = _both(b, x, y)
    return b.select(b.is_nan(x), y, b.select(b.is_nan(y), x, b.maximum(x, y)))


@pointwise("aten.fmin", "prims.fmin", opmath=False)
def fmin(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """The smaller number; a NaN loses against a number."""
    x, y = _both(b, x, y)
    return b.select(b.is_nan(x), y, b.select(b.is_nan(y), x, b.minimum(x, y)))


@pointwise("aten.clamp", opmath=False)
def clamp(b: OpBuilder, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    return b.clamp(x, low, high)


@pointwise("aten.clamp_min", opmath=False)
def clamp_min(b: OpBuilder, x: Value, low: Operand) -> Value:
    return b.maximum(x, low)


@pointwise("aten.clamp_max", opmath=False)
def clamp_max(b: OpBuilder, x: Value, high: Operand) -> Value:
    return b.minimum(x, high)


@pointwise("aten.where.self", keep=("condition",), opmath=False)
def where(b: OpBuilder, condition: Value, x: Operand, y: Operand) -> Value:
    return b.select(condition, *(b.as_value(v, b.out_dtype) for v in (x, y)))


@pointwise("prims.where", keep=("pred",), opmath=False)
def where_prim(b: OpBuilder, pred: Value, x: Operand, y: Operand) -> Value:
    return b.select(pred, *(b.as_value(v, b.out_dtype) for v in (x, y)))


# -- functions of two real numbers -------------------------------------------------------------


@pointwise("aten.atan2", "prims.atan2")
def atan2(b: OpBuilder, y: Operand, x: Operand) -> Value:
    return b.atan2(y, x)


@pointwise("aten.hypot", "prims.hypot")
def hypot(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """sqrt(x*x + y*y) without overflow in between; infinite when either is, even beside a NaN."""
    x, y = (b.abs(v) for v in _both(b, x, y))
    large, small = b.maximum(x, y), b.minimum(x, y)
    ratio = b.div(small, large)
    plain = b.mul(large, b.sqrt(b.add(b.mul(ratio, ratio), 1)))
    plain = b.select(b.eq(large, 0), large, plain)
    infinite = b.or_(b.eq(x, math.inf), b.eq(y, math.inf))
    return b.select(infinite, math.inf, plain)


@pointwise("aten.copysign")
def copy_sign(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return copysign(b, *_both(b, x, y))


@pointwise("aten.nextafter", "prims.nextafter", opmath=False)
def nextafter(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.next_after(x, y)


@pointwise("aten.heaviside", opmath=False)
def heaviside(b: OpBuilder, x: Operand, values: Operand) -> Value:
    x, values = _both(b, x, values)
    return b.select(b.eq(x, 0), values, b.convert(b.gt(x, 0), x.dtype))


@pointwise("aten.logaddexp")
def logaddexp(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """log(exp(x) + exp(y))."""
    x, y = _both(b, x, y)
    if x.is_complex:
        return _logaddexp_complex(b, x, y)
    high = b.maximum(x, y)
    out = b.add(high, b.log1p(b.exp(b.neg(b.abs(b.sub(x, y))))))
    equal_infinities = b.and_(b.eq(x, y), b.is_inf(x))
    return b.select(equal_infinities, x, out)


def _logaddexp_complex(b: OpBuilder, x: Value, y: Value) -> Value:
    swap = b.lt(b.real(x), b.real(y))
    high, low = b.select(swap, y, x), b.select(swap, x, y)
    out = b.add(high, b.log1p(b.exp(b.sub(low, high))))
    equal = b.and_(b.eq(x, y), b.is_inf(b.real(x)))
    return b.select(equal, x, out)


@pointwise("aten.logaddexp2")
def logaddexp2(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """log2(2**x + 2**y)."""
    x, y = _both(b, x, y)
    high = b.maximum(x, y)
    tail = b.log1p(exp2(b, b.neg(b.abs(b.sub(x, y)))))
    out = b.add(high, b.mul(tail, 1.0 / math.log(2.0)))
    return b.select(b.and_(b.eq(x, y), b.is_inf(x)), x, out)


def _times_log(b: OpBuilder, x: Operand, y: Operand, plus_one: bool) -> Value:
    x, y = _both(b, x, y)
    product = b.mul(x, b.log1p(y) if plus_one else b.log(y))
    return b.select(b.and_(b.eq(x, 0), b.not_(b.is_nan(y))), 0, product)


@pointwise("aten.xlogy")
def xlogy(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """x * log(y), and 0 where x is 0 (unless y is NaN)."""
    return _times_log(b, x, y, plus_one=False)


@pointwise("aten.special_xlog1py")
def xlog1py(b: OpBuilder, x: Operand, y: Operand) -> Value:
    """x * log(1 + y), and 0 where x is 0 (unless y is NaN)."""
    return _times_log(b, x, y, plus_one=True)


# -- integers: bits, shifts, common divisors ---------------------------------------------------


@pointwise("aten.bitwise_and", "prims.bitwise_and")
def bitwise_and(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.and_(x, y)


@pointwise("aten.bitwise_or", "prims.bitwise_or")
def bitwise_or(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.or_(x, y)


@pointwise("aten.bitwise_xor", "prims.bitwise_xor")
def bitwise_xor(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.xor(x, y)


@pointwise("aten.bitwise_not", "prims.bitwise_not")
def bitwise_not(b: OpBuilder, x: Value) -> Value:
    return b.not_(x)


@pointwise("aten.bitwise_left_shift", "aten.__lshift__", "prims.shift_left")
def shift_left(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return b.shift_left(x, y)


@pointwise("aten.bitwise_right_shift", "aten.__rshift__", "prims.shift_right_arithmetic")
def shift_right(b: OpBuilder, x: Operand, y: Operand) -> Value:
    x, y = _both(b, x, y)
    return b.shift_right_logical(x, y) if x.is_unsigned else b.shift_right_arithmetic(x, y)


def _trailing_zeros(b: OpBuilder, x: Value) -> Value:
    """Zero bits below the lowest set one; all of them for 0."""
    lowest = b.and_(x, b.neg(x))
    return b.popcnt(b.sub(lowest, 1))


def _gcd(b: OpBuilder, x: Value, y: Value) -> Value:
    """Greatest common divisor by Stein's algorithm (1967): shifts and differences only.

    Euclid's remainders of 64-bit integers take a TPU compiler most of a minute.
    """
    x, y = b.abs(x), b.abs(y)
    bits = x.dtype.itemsize * 8
    common = b.minimum(_trailing_zeros(b, b.or_(x, y)), bits - 1)

    def odd(v: Value) -> Value:
        """Without its factors of two; 0 stays."""
        zeros = b.minimum(_trailing_zeros(b, v), bits - 1)
        return b.shift_right_logical(v, zeros)

    def unfinished(u: Value, v: Value) -> Value:
        return b.reduce(b.ne(v, 0), "or", list(range(v.rank)))

    def step(u: Value, v: Value) -> list[Value]:
        v = odd(v)
        low, high = b.minimum(u, v), b.maximum(u, v)
        # A finished element has v = 0, which would become the new u.
        done = b.eq(v, 0)
        return [b.select(done, u, low), b.select(done, v, b.sub(high, low))]

    u = b.while_([b.select(b.eq(x, 0), y, odd(x)), b.select(b.eq(x, 0), 0, y)], unfinished, step)[0]
    return b.select(b.eq(x, 0), y, b.shift_left(u, common))


def _exact_quotient(b: OpBuilder, x: Value, divisor: Value) -> Value:
    """x / divisor where that leaves no rest, without a division: by the odd part's inverse.

    Newton's iteration modulo a power of two doubles the right bits each time, from five.
    """
    zeros = _trailing_zeros(b, divisor)
    unit = b.shift_right_logical(divisor, zeros)
    inverse = b.xor(b.mul(unit, 3), 2)
    right = 5
    while right < x.dtype.itemsize * 8:
        inverse = b.mul(inverse, b.sub(2, b.mul(unit, inverse)))
        right *= 2
    shifted = b.shift_right_logical if x.is_unsigned else b.shift_right_arithmetic
    return b.mul(shifted(x, zeros), inverse)


@pointwise("aten.gcd", "prims.gcd")
def gcd(b: OpBuilder, x: Operand, y: Operand) -> Value:
    return _gcd(b, *_both(b, x, y))


@pointwise("aten.lcm")
def lcm(b: OpBuilder, x: Operand, y: Operand) -> Value:
    x, y = _both(b, x, y)
    if x.dtype in (torch.int8, torch.int16):
        # As in C: the product is an int, and wraps when it is stored.
        x, y = b.convert(x, torch.int32), b.convert(y, torch.int32)
    divisor = _gcd(b, x, y)
    zero = b.eq(divisor, 0)
    product = b.abs(b.mul(_exact_quotient(b, x, b.select(zero, 1, divisor)), y))
    return b.select(zero, 0, product)
