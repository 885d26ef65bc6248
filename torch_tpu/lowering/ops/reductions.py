"""Reductions: sums, products, extrema with and without positions, logical reductions, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim, canonical_dims, opmath_dtype

Dims = int | Sequence[int] | None


def reduced(b: OpBuilder, x: Value, kind: str, dim: Dims) -> Value:
    """Reduce with a named combiner to the shape PyTorch expects (``keepdim`` is in that shape)."""
    return b.reshape(b.reduce(x, kind, canonical_dims(dim, x.rank)), b.out_shape)


def extent(x: Value, dim: Dims) -> int:
    """How many elements go into one result."""
    return math.prod(x.shape[d] for d in canonical_dims(dim, x.rank))


def count(b: OpBuilder, mask: Value, dim: Dims) -> Value:
    """Number of True elements as i64, counted in i32 while that cannot overflow."""
    narrow = torch.int32 if mask.numel < 2**31 else torch.int64
    total = b.reduce(b.convert(mask, narrow), "add", canonical_dims(dim, mask.rank))
    return b.reshape(b.convert(total, torch.int64), b.out_shape)


# -- sums and products -----------------------------------------------------------------------


@lower("aten.sum.default", "aten.sum.dim_IntList")
def sum_(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    if x.is_bool and b.out_dtype is torch.int64:
        return count(b, x, dim)
    wide = b.convert(x, opmath_dtype(b.out_dtype))
    return b.convert(reduced(b, wide, "add", dim), b.out_dtype)


@lower("aten.nansum", promote="result")
def nansum(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return reduced(b, b.select(b.is_nan(x), 0, x) if x.is_float else x, "add", dim)


@lower("aten.mean.default", "aten.mean.dim", promote="result")
def mean(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return b.div(reduced(b, x, "add", dim), extent(x, dim))


@lower("aten.prod.default", "aten.prod.dim_int", promote="result")
def prod(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return reduced(b, x, "mul", dim)


@lower("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(b: OpBuilder, x: Value, dim: Dims = None) -> Value:
    return count(b, b.ne(x, 0), dim)


# -- logical ---------------------------------------------------------------------------------


def _logical(b: OpBuilder, x: Value, kind: str, dim: Dims) -> Value:
    x = b.convert(x, torch.bool)
    if isinstance(dim, Sequence) and not dim:  # here an empty list means no dim, not all
        return b.convert(x, b.out_dtype)
    return b.convert(reduced(b, x, kind, dim), b.out_dtype)


@lower("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return _logical(b, x, "or", dim)


@lower("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return _logical(b, x, "and", dim)


# -- extrema ---------------------------------------------------------------------------------


@lower("aten.amax", "aten.max.default")
def amax(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return reduced(b, x, "max", dim)


@lower("aten.amin", "aten.min.default")
def amin(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
    return reduced(b, x, "min", dim)


@lower("aten.aminmax")
def aminmax(b: OpBuilder, x: Value, dim: Dims = None, keepdim: bool = False) -> tuple[Value, Value]:
    return reduced(b, x, "min", dim), reduced(b, x, "max", dim)


def first_extremum(b: OpBuilder, x: Value, kind: str, dim: int) -> tuple[Value, Value]:
    """The extremum along ``dim`` and its first position (the first NaN wins), dim kept."""
    if x.is_bool:
        value, where = first_extremum(b, b.convert(x, torch.uint8), kind, dim)
        return b.convert(value, torch.bool), where
    value = b.reduce(x, kind, [dim], keepdim=True)
    hit = b.eq(x, value)
    if x.is_float:
        hit = b.or_(hit, b.ne(x, x))
    size = x.shape[dim]
    narrow = torch.int32 if size < 2**31 else torch.int64
    where = b.select(hit, b.iota(x.shape, dim, narrow), b.constant(size, narrow))
    return value, b.convert(b.reduce(where, "min", [dim], keepdim=True), torch.int64)


def _with_position(
    b: OpBuilder, x: Value, kind: str, dim: int, keepdim: bool
) -> tuple[Value, Value]:
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    value, where = first_extremum(b, x, kind, canonical_dim(dim, x.rank))
    return b.reshape(value, b.out_shape), b.reshape(where, b.out_shape)


@lower("aten.max.dim")
def max_dim(b: OpBuilder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _with_position(b, x, "max", dim, keepdim)


@lower("aten.min.dim")
def min_dim(b: OpBuilder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _with_position(b, x, "min", dim, keepdim)


def _position(b: OpBuilder, x: Value, kind: str, dim: int | None) -> Value:
    if dim is None or x.rank == 0:
        x, dim = b.reshape(x, (x.numel,)), 0
    _, where = first_extremum(b, x, kind, canonical_dim(dim, x.rank))
    return b.reshape(where, b.out_shape)


@lower("aten.argmax")
def argmax(b: OpBuilder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(b, x, "max", dim)


@lower("aten.argmin")
def argmin(b: OpBuilder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _position(b, x, "min", dim)


# -- moments ---------------------------------------------------------------------------------


def moments(b: OpBuilder, x: Value, dim: Dims, correction: float | None) -> tuple[Value, Value]:
    """Variance (real) and mean over ``dim`` by two passes, in the dtype PyTorch computes in.

    The divisor is ``max(n - correction, 0)``; ``correction`` None means 1.
    """
    dims = canonical_dims(dim, x.rank)
    x = b.convert(x, opmath_dtype(x.dtype))
    n = extent(x, dim)
    mean = b.div(b.reduce(x, "add", dims, keepdim=True), n)
    centred = b.sub(x, mean)
    square = b.mul(centred, centred)
    if x.is_complex:
        re, im = b.real(centred), b.imag(centred)
        square = b.add(b.mul(re, re), b.mul(im, im))
    divisor = max(n - (1 if correction is None else correction), 0)
    variance = b.div(b.reduce(square, "add", dims), divisor)
    return b.reshape(variance, b.out_shape), b.reshape(mean, b.out_shape)


@lower("aten.var.correction", static=("correction",))
def var(
    b: OpBuilder,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    return b.convert(moments(b, x, dim, correction)[0], b.out_dtype)


@lower("aten.std.correction", static=("correction",))
def std(
    b: OpBuilder,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    return b.convert(b.sqrt(moments(b, x, dim, correction)[0]), b.out_dtype)


@lower("aten.var_mean.correction", static=("correction",))
def var_mean(
    b: OpBuilder,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    variance, mean = moments(b, x, dim, correction)
    return b.convert(variance, b.results[0][1]), b.convert(mean, b.results[1][1])


@lower("aten.std_mean.correction", static=("correction",))
def std_mean(
    b: OpBuilder,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    variance, mean = moments(b, x, dim, correction)
    return b.convert(b.sqrt(variance), b.results[0][1]), b.convert(mean, b.results[1][1])


# -- norms and logsumexp ---------------------------------------------------------------------


@lower("aten.logsumexp", promote="result")
def logsumexp(b: OpBuilder, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    dims = canonical_dims(dim, x.rank)
    top = b.reduce(b.real(x), "max", dims, keepdim=True)
    top = b.select(b.is_finite(top), top, 0)  # all -inf or an inf: nothing to rescale
    shift = b.convert(top, x.dtype)
    total = b.reduce(b.exp(b.sub(x, b.broadcast_to(shift, x.shape))), "add", dims, keepdim=True)
    return b.reshape(b.add(b.log(total), shift), b.out_shape)


def vector_norm(b: OpBuilder, x: Value, order: float, dim: Dims) -> Value:
    """The ``order`` norm over ``dim`` of a float or complex ``x``, in x's real dtype."""
    if order == math.inf:
        return reduced(b, b.abs(x), "max", dim)
    if order == -math.inf:
        return reduced(b, b.abs(x), "min", dim)
    if order == 2:
        re = b.real(x)
        square = b.mul(re, re)
        if x.is_complex:
            square = b.add(square, b.mul(b.imag(x), b.imag(x)))
        return b.sqrt(reduced(b, square, "add", dim))
    size = b.abs(x)
    if order == 0:
        return reduced(b, b.convert(b.ne(size, 0), size.dtype), "add", dim)
    if order == 1:
        return reduced(b, size, "add", dim)
    return b.pow(reduced(b, b.pow(size, float(order)), "add", dim), 1.0 / order)


@lower("aten.linalg_vector_norm", static=("ord",))
def linalg_vector_norm(
    b: OpBuilder,
    x: Value,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    wide = b.convert(x, opmath_dtype(dtype or x.dtype))
    return b.convert(vector_norm(b, wide, ord, dim), b.out_dtype)


@lower(
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dtype",
    "aten.norm.ScalarOpt_dim_dtype",
    static=("p",),
)
def norm(
    b: OpBuilder,
    x: Value,
    p: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    wide = b.convert(x, opmath_dtype(dtype or x.dtype))
    return b.convert(vector_norm(b, wide, 2 if p is None else p, dim), b.out_dtype)


# -- prims -----------------------------------------------------------------------------------


def _prim_dims(x: Value, dims: Sequence[int] | None) -> Sequence[int]:
    return range(x.rank) if dims is None else dims


def _prim(kind: str) -> None:
    def reduction(b: OpBuilder, x: Value, dims: Sequence[int] | None) -> Value:
        wide = b.convert(x, opmath_dtype(b.out_dtype))
        return b.convert(b.reduce(wide, kind, _prim_dims(x, dims)), b.out_dtype)

    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[kind]
    lower(f"prims.{name}")(reduction)


for _kind in ("add", "mul", "max", "min"):
    _prim(_kind)


@lower("prims.xor_sum")
def prims_xor_sum(b: OpBuilder, x: Value, dims: Sequence[int] | None) -> Value:
    zero = b.constant(0, x.dtype)
    return b.reduce_general([x], [zero], list(_prim_dims(x, dims)), b.xor)[0]


@lower("prims.var", static=("correction",))
def prims_var(
    b: OpBuilder, x: Value, dims: Sequence[int] | None, correction: float | None = 1
) -> Value:
    return b.convert(moments(b, x, dims, correction)[0], b.out_dtype)


@lower("aten._aminmax.default", specs=lambda x: [((), x.dtype)] * 2)
def old_aminmax(b: OpBuilder, x: Value) -> tuple[Value, Value]:
    return reduced(b, x, "min", None), reduced(b, x, "max", None)


def _bits_as_double(b: OpBuilder, x: Value) -> Value:
    """The bits (ui64) of a float once it is a double; from float32 without one, by integers."""
    if x.dtype is torch.float64:
        return b.bitcast(x, torch.uint64)
    bits = b.bitcast(b.convert(x, torch.float32), torch.uint32)
    sign = b.shift_left(b.convert(b.shift_right_logical(bits, 31), torch.uint64), 63)
    exponent = b.and_(b.shift_right_logical(bits, 23), 255)
    widened = b.select(b.eq(exponent, 255), 2047, b.add(exponent, 1023 - 127))
    widened = b.select(b.eq(exponent, 0), 0, widened)  # denormals count as zero
    fraction = b.select(b.eq(exponent, 0), 0, b.and_(bits, (1 << 23) - 1))
    high = b.shift_left(b.convert(widened, torch.uint64), 52)
    return b.or_(b.or_(sign, high), b.shift_left(b.convert(fraction, torch.uint64), 29))


@lower("aten.hash_tensor")
def hash_tensor(
    b: OpBuilder, x: Value, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> Value:
    """Exclusive or over the elements' 64 bits."""
    words = _bits_as_double(b, x) if x.is_float else b.convert(x, torch.uint64)
    zero = b.constant(0, torch.uint64)
    out = b.reduce_general([words], [zero], list(canonical_dims(dim, x.rank)), b.xor)[0]
    return b.reshape(out, b.out_shape)
