"""Elementwise builder operations: arithmetic, comparison, selection, transcendental functions."""

# A mixin of Builder, whose methods mypy cannot see from here.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.types import (
    COMPLEX_OF_REAL,
    REAL_OF_COMPLEX,
    Operand,
    UnsupportedDtypeError,
    Value,
    broadcast_shapes,
    tensor_type,
)


def _number_dtype(values: Sequence[Operand]) -> torch.dtype:
    """The dtype in which operands meet: that of the first non-weak value."""
    strong = [v for v in values if isinstance(v, Value) and not v.weak]
    if strong:
        return strong[0].dtype
    weak = [v for v in values if isinstance(v, Value)]
    if any(v.dtype.is_complex for v in weak) or any(isinstance(v, complex) for v in values):
        return torch.complex128
    if any(v.dtype.is_floating_point for v in weak) or any(isinstance(v, float) for v in values):
        return torch.float64
    return torch.int64


# Which dtypes an operation takes, where not all. Some compilers end the process on others.
_REAL = frozenset({"remainder", "maximum", "minimum"})
_BITS = frozenset({"and", "or", "xor", "not"})
_INTEGERS = frozenset(
    {
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "popcnt",
        "count_leading_zeros",
    }
)
_FLOATS = frozenset({"cbrt", "floor", "ceil", "round_nearest_even"})
_FLOATS_AND_COMPLEX = frozenset(
    {
        "atan2",
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "sqrt",
        "rsqrt",
        "sine",
        "cosine",
        "tan",
        "tanh",
        "logistic",
    }
)


def _check_dtype(op: str, dtype: torch.dtype) -> None:
    inexact = dtype.is_floating_point or dtype.is_complex
    integer = not inexact and dtype is not torch.bool
    refused = (
        (op in _REAL and dtype.is_complex)
        or (op in _BITS and inexact)
        or (op in _INTEGERS and not integer)
        or (op in _FLOATS and not dtype.is_floating_point)
        or (op in _FLOATS_AND_COMPLEX and not inexact)
    )
    if refused:
        raise UnsupportedDtypeError(f"{op}: not defined for {dtype}")


class ElementwiseMixin:
    """Operands may be numbers; shapes broadcast; dtypes must agree (numbers adapt)."""

    def operands(self, *values: Operand) -> list[Value]:
        """Bring operands to one dtype and one shape."""
        dtype = _number_dtype(values)
        out = [self.as_value(v, dtype) if not isinstance(v, Value) or v.weak else v for v in values]
        shapes = {v.shape for v in out}
        if len(shapes) > 1:
            shape = broadcast_shapes(*shapes)
            out = [self.broadcast_to(v, shape) for v in out]
        return out

    def _binary(self, op: str, x: Operand, y: Operand) -> Value:
        a, c = self.operands(x, y)
        if a.dtype is not c.dtype:
            raise TypeError(f"{op}: operand dtypes differ: {a.dtype} and {c.dtype}")
        _check_dtype(op, a.dtype)
        return self.emit(f"stablehlo.{op} {a.name}, {c.name} : {a.type}", a.shape, a.dtype)

    def _unary(self, op: str, x: Operand, dtype: torch.dtype | None = None) -> Value:
        (a,) = self.operands(x)
        _check_dtype(op, a.dtype)
        if dtype is None or dtype is a.dtype:
            return self.emit(f"stablehlo.{op} {a.name} : {a.type}", a.shape, a.dtype)
        out = tensor_type(a.shape, dtype)
        return self.emit(f"stablehlo.{op} {a.name} : ({a.type}) -> {out}", a.shape, dtype)

    def _chlo(self, op: str, *values: Operand) -> Value:
        args = self.operands(*values)
        names = ", ".join(a.name for a in args)
        types = ", ".join(a.type for a in args)
        first = args[0]
        if not first.dtype.is_floating_point:
            raise UnsupportedDtypeError(f"{op}: not defined for {first.dtype}")
        return self.emit(
            f'"chlo.{op}"({names}) : ({types}) -> {first.type}', first.shape, first.dtype
        )

    # -- arithmetic ------------------------------------------------------------------------

    def add(self, x: Operand, y: Operand) -> Value:
        """x + y; logical or for bool."""
        return self._binary("add", x, y)

    def sub(self, x: Operand, y: Operand) -> Value:
        return self._binary("subtract", x, y)

    def mul(self, x: Operand, y: Operand) -> Value:
        """x * y; logical and for bool. A multiplication by the number 1 is dropped."""
        for a, other in ((x, y), (y, x)):
            if not isinstance(a, Value) and a == 1 and isinstance(other, Value) and not other.weak:
                return other
        return self._binary("multiply", x, y)

    def div(self, x: Operand, y: Operand) -> Value:
        """True division for floats, truncating division for integers (x / 0 is -1 there)."""
        return self._binary("divide", x, y)

    def remainder(self, x: Operand, y: Operand) -> Value:
        """C's fmod / %: the sign of the dividend."""
        return self._binary("remainder", x, y)

    def pow(self, x: Operand, y: Operand) -> Value:
        return self._binary("power", x, y)

    def maximum(self, x: Operand, y: Operand) -> Value:
        """NaN propagates."""
        return self._binary("maximum", x, y)

    def minimum(self, x: Operand, y: Operand) -> Value:
        """NaN propagates."""
        return self._binary("minimum", x, y)

    def atan2(self, x: Operand, y: Operand) -> Value:
        return self._binary("atan2", x, y)

    def neg(self, x: Operand) -> Value:
        return self._unary("negate", x)

    def abs(self, x: Operand) -> Value:
        """Magnitude: real for complex, identity for unsigned and bool."""
        (a,) = self.operands(x)
        if a.is_unsigned or a.is_bool:
            return a
        return self._unary("abs", a, REAL_OF_COMPLEX.get(a.dtype))

    def sign(self, x: Operand) -> Value:
        """-1, 0, 1 (0 for NaN, as PyTorch)."""
        (a,) = self.operands(x)
        if a.is_bool:
            return a
        if a.is_unsigned:
            return self.convert(self.ne(a, 0), a.dtype)
        if a.is_float:
            return self.select(
                self.ne(a, a), self.constant(0, a.dtype, a.shape), self._unary("sign", a)
            )
        return self._unary("sign", a)

    # -- bits and logic --------------------------------------------------------------------

    def and_(self, x: Operand, y: Operand) -> Value:
        return self._binary("and", x, y)

    def or_(self, x: Operand, y: Operand) -> Value:
        return self._binary("or", x, y)

    def xor(self, x: Operand, y: Operand) -> Value:
        return self._binary("xor", x, y)

    def not_(self, x: Operand) -> Value:
        return self._unary("not", x)

    def shift_left(self, x: Operand, y: Operand) -> Value:
        return self._binary("shift_left", x, y)

    def shift_right_arithmetic(self, x: Operand, y: Operand) -> Value:
        return self._binary("shift_right_arithmetic", x, y)

    def shift_right_logical(self, x: Operand, y: Operand) -> Value:
        return self._binary("shift_right_logical", x, y)

    def popcnt(self, x: Operand) -> Value:
        return self._unary("popcnt", x)

    def count_leading_zeros(self, x: Operand) -> Value:
        return self._unary("count_leading_zeros", x)

    # -- comparison and selection ----------------------------------------------------------

    def compare(self, direction: str, x: Operand, y: Operand) -> Value:
        """EQ NE LT LE GT GE; IEEE: only NE is true with a NaN."""
        a, c = self.operands(x, y)
        if a.dtype is not c.dtype:
            raise TypeError(f"compare: operand dtypes differ: {a.dtype} and {c.dtype}")
        kind = "FLOAT" if a.is_float or a.is_complex else "SIGNED"
        if a.is_bool or a.is_unsigned:
            kind = "UNSIGNED"
        out = tensor_type(a.shape, torch.bool)
        text = (
            f"stablehlo.compare {direction}, {a.name}, {c.name}, {kind} "
            f": ({a.type}, {c.type}) -> {out}"
        )
        return self.emit(text, a.shape, torch.bool)

    def eq(self, x: Operand, y: Operand) -> Value:
        return self.compare("EQ", x, y)

    def ne(self, x: Operand, y: Operand) -> Value:
        return self.compare("NE", x, y)

    def lt(self, x: Operand, y: Operand) -> Value:
        return self.compare("LT", x, y)

    def le(self, x: Operand, y: Operand) -> Value:
        return self.compare("LE", x, y)

    def gt(self, x: Operand, y: Operand) -> Value:
        return self.compare("GT", x, y)

    def ge(self, x: Operand, y: Operand) -> Value:
        return self.compare("GE", x, y)

    def select(self, condition: Value, x: Operand, y: Operand) -> Value:
        """x where the i1 ``condition`` holds, else y; all broadcast."""
        a, c = self.operands(x, y)
        condition = self.convert(condition, torch.bool)
        shape = broadcast_shapes(condition.shape, a.shape)
        p, a, c = (self.broadcast_to(v, shape) for v in (condition, a, c))
        text = f"stablehlo.select {p.name}, {a.name}, {c.name} : {p.type}, {a.type}"
        return self.emit(text, shape, a.dtype)

    def clamp(self, x: Value, low: Operand | None, high: Operand | None) -> Value:
        """min(max(x, low), high); NaN propagates (stablehlo.clamp would not)."""
        if low is not None:
            x = self.maximum(x, low)
        return self.minimum(x, high) if high is not None else x

    def is_nan(self, x: Value) -> Value:
        if x.is_complex:
            return self.or_(self.is_nan(self.real(x)), self.is_nan(self.imag(x)))
        if not x.is_float:
            return self.constant(False, torch.bool, x.shape)
        return self.ne(x, x)

    def is_finite(self, x: Value) -> Value:
        if x.is_complex:
            return self.and_(self.is_finite(self.real(x)), self.is_finite(self.imag(x)))
        if not x.is_float:
            return self.constant(True, torch.bool, x.shape)
        out = tensor_type(x.shape, torch.bool)
        return self.emit(f"stablehlo.is_finite {x.name} : ({x.type}) -> {out}", x.shape, torch.bool)

    def is_inf(self, x: Value) -> Value:
        if x.is_complex:
            return self.or_(self.is_inf(self.real(x)), self.is_inf(self.imag(x)))
        if not x.is_float:
            return self.constant(False, torch.bool, x.shape)
        return self.eq(self.abs(x), math.inf)

    # -- complex ---------------------------------------------------------------------------

    def real(self, x: Value) -> Value:
        return self._unary("real", x, REAL_OF_COMPLEX[x.dtype]) if x.is_complex else x

    def imag(self, x: Value) -> Value:
        if x.is_complex:
            return self._unary("imag", x, REAL_OF_COMPLEX[x.dtype])
        return self.constant(0, x.dtype, x.shape)

    def complex(self, re: Operand, im: Operand) -> Value:
        a, c = self.operands(re, im)
        dtype = COMPLEX_OF_REAL[a.dtype]
        out = tensor_type(a.shape, dtype)
        text = f"stablehlo.complex {a.name}, {c.name} : ({a.type}, {c.type}) -> {out}"
        return self.emit(text, a.shape, dtype)

    def conj(self, x: Value) -> Value:
        return self.complex(self.real(x), self.neg(self.imag(x))) if x.is_complex else x

    # -- transcendental and rounding -------------------------------------------------------

    def exp(self, x: Operand) -> Value:
        return self._unary("exponential", x)

    def expm1(self, x: Operand) -> Value:
        return self._unary("exponential_minus_one", x)

    def log(self, x: Operand) -> Value:
        return self._unary("log", x)

    def log1p(self, x: Operand) -> Value:
        return self._unary("log_plus_one", x)

    def sqrt(self, x: Operand) -> Value:
        return self._unary("sqrt", x)

    def rsqrt(self, x: Operand) -> Value:
        return self._unary("rsqrt", x)

    def cbrt(self, x: Operand) -> Value:
        return self._unary("cbrt", x)

    def sin(self, x: Operand) -> Value:
        return self._unary("sine", x)

    def cos(self, x: Operand) -> Value:
        return self._unary("cosine", x)

    def tan(self, x: Operand) -> Value:
        return self._unary("tan", x)

    def tanh(self, x: Operand) -> Value:
        return self._unary("tanh", x)

    def sigmoid(self, x: Operand) -> Value:
        return self._unary("logistic", x)

    def floor(self, x: Operand) -> Value:
        return self._unary("floor", x)

    def ceil(self, x: Operand) -> Value:
        return self._unary("ceil", x)

    def round_even(self, x: Operand) -> Value:
        return self._unary("round_nearest_even", x)

    def reduce_precision(self, x: Value, dtype: torch.dtype) -> Value:
        """x with the range and digits of a narrower float dtype, in its own dtype.

        Not a conversion there and back, which XLA may leave out.
        """
        if dtype is x.dtype:
            return x
        form = {torch.bfloat16: "e8m7", torch.float16: "e5m10", torch.float32: "e8m23"}[dtype]
        text = f"stablehlo.reduce_precision {x.name}, format = {form} : {x.type}"
        return self.emit(text, x.shape, x.dtype)

    def trunc(self, x: Value) -> Value:
        """Round towards zero (the sign of zero is kept)."""
        return self.select(self.lt(x, 0), self.ceil(x), self.floor(x))

    def erf(self, x: Operand) -> Value:
        """The error function; the float32 form of XLA stops short of 1 by 2e-7, ours does not."""
        (a,) = self.operands(x)
        y = self._chlo("erf", a)
        if a.dtype is not torch.float32:
            return y
        limit = self.select(self.gt(a, 0), self.constant(1, a.dtype), -1)
        return self.select(self.gt(self.abs(a), 3.93), limit, y)

    def erfc(self, x: Operand) -> Value:
        return self._chlo("erfc", x)

    def erf_inv(self, x: Operand) -> Value:
        return self._chlo("erf_inv", x)

    def lgamma(self, x: Operand) -> Value:
        return self._chlo("lgamma", x)

    def digamma(self, x: Operand) -> Value:
        return self._chlo("digamma", x)

    def polygamma(self, n: Operand, x: Operand) -> Value:
        return self._chlo("polygamma", n, x)

    def zeta(self, x: Operand, q: Operand) -> Value:
        return self._chlo("zeta", x, q)

    def next_after(self, x: Operand, y: Operand) -> Value:
        return self._chlo("next_after", x, y)

    def chlo(self, op: str, *values: Operand) -> Value:
        """Any other elementwise ``chlo`` operation by name (acos, asinh, bessel_i1e, sinh, …)."""
        return self._chlo(op, *values)
