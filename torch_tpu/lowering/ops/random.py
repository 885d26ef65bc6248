"""Random fills, factories and permutations. Rejection samplers are in ``sampling``.

Distribution parameters are operands: changing a mean or a bound does not make a new program.
Half precision is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import INTEGRAL, Operand, Value, real_dtype


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The float dtype in which numbers for a tensor of ``dtype`` are drawn."""
    return torch.float64 if real_dtype(dtype) is torch.float64 else torch.float32


def digits_of(dtype: torch.dtype) -> int:
    """Bits of the significand, the hidden one included (24 for float32)."""
    return 1 - int(math.log2(torch.finfo(dtype).eps))


def _fill(
    b: OpBuilder, shape: Sequence[int], dtype: torch.dtype, draw: Callable[[torch.dtype], Value]
) -> Value:
    """``draw(real dtype)`` as a tensor of ``dtype``; a complex one draws both of its parts."""
    if dtype.is_complex:
        real = real_dtype(dtype)
        return b.complex(b.convert(draw(real), real), b.convert(draw(real), real))
    return b.convert(draw(dtype), dtype)


# -- continuous distributions ----------------------------------------------------------------


def uniform_values(
    b: OpBuilder, shape: Sequence[int], dtype: torch.dtype, low: Operand = 0.0, high: Operand = 1.0
) -> Value:
    """Uniform in [low, high) in ``dtype``; what rounds up to ``high`` becomes ``low``."""

    def draw(dtype: torch.dtype) -> Value:
        work = compute_dtype(dtype)
        unit = b.random_uniform(shape, work, digits_of(dtype))
        if not isinstance(low, Value) and not isinstance(high, Value) and (low, high) == (0, 1):
            return unit
        lo, hi = b.as_value(low, work), b.as_value(high, work)
        values = b.convert(b.add(b.mul(unit, b.sub(hi, lo)), lo), dtype)
        return b.select(b.ge(values, b.convert(hi, dtype)), b.convert(lo, dtype), values)

    return _fill(b, shape, dtype, draw)


def normal_values(
    b: OpBuilder, shape: Sequence[int], dtype: torch.dtype, mean: Operand = 0.0, std: Operand = 1.0
) -> Value:
    """Normal numbers in ``dtype``. A complex tensor has variance std**2 over both parts."""
    plain = not isinstance(mean, Value) and not isinstance(std, Value) and (mean, std) == (0, 1)
    scale = math.sqrt(0.5) if dtype.is_complex else 1.0

    def draw(dtype: torch.dtype) -> Value:
        work = compute_dtype(dtype)
        unit = b.mul(b.random_normal(shape, work), scale)
        if plain:
            return unit
        return b.add(b.mul(unit, b.as_value(std, work)), b.as_value(mean, work))

    return _fill(b, shape, dtype, draw)


@lower("aten.uniform_", "aten.uniform", operand=("from", "to"))
def uniform(b: OpBuilder, x: Value, low: Operand = 0.0, high: Operand = 1.0) -> Value:
    return uniform_values(b, x.shape, x.dtype, low, high)


@lower("aten.normal_", "aten.normal_functional", operand=("mean", "std"))
def normal_fill(b: OpBuilder, x: Value, mean: Operand = 0.0, std: Operand = 1.0) -> Value:
    return normal_values(b, x.shape, x.dtype, mean, std)


@lower(
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    operand=("mean", "std"),
)
def normal(b: OpBuilder, mean: Operand, std: Operand = 1.0) -> Value:
    return normal_values(b, b.out_shape, b.out_dtype, mean, std)


@lower("aten.exponential_", "aten.exponential", operand=("lambd",))
def exponential(b: OpBuilder, x: Value, lambd: Operand = 1.0) -> Value:
    """-log(u) / lambd with u in (0, 1): never 0, so that p / q is finite in Gumbel tricks."""
    work = compute_dtype(x.dtype)
    draw = b.neg(b.log(b.random_open_uniform(x.shape, work)))
    return b.convert(b.div(draw, b.as_value(lambd, work)), x.dtype)


@lower("aten.geometric_", "aten.geometric", operand=("p",))
def geometric(b: OpBuilder, x: Value, p: Operand) -> Value:
    """Trials up to the first success, by inversion: ceil(log(u) / log(1 - p))."""
    work = compute_dtype(x.dtype if x.is_float else torch.float32)
    draw = b.log(b.random_open_uniform(x.shape, work))
    return b.convert(b.ceil(b.div(draw, b.log1p(b.neg(b.as_value(p, work))))), x.dtype)


@lower("aten.cauchy_", "aten.cauchy", operand=("median", "sigma"))
def cauchy(b: OpBuilder, x: Value, median: Operand = 0.0, sigma: Operand = 1.0) -> Value:
    work = compute_dtype(x.dtype)
    centred = b.sub(b.random_open_uniform(x.shape, work), 0.5)
    draw = b.mul(b.tan(b.mul(centred, math.pi)), b.as_value(sigma, work))
    return b.convert(b.add(draw, b.as_value(median, work)), x.dtype)


@lower("aten.log_normal_", "aten.log_normal", operand=("mean", "std"))
def log_normal(b: OpBuilder, x: Value, mean: Operand = 1.0, std: Operand = 2.0) -> Value:
    work = compute_dtype(x.dtype)
    return b.convert(b.exp(normal_values(b, x.shape, work, mean, std)), x.dtype)


# -- integers --------------------------------------------------------------------------------


def _high_product(b: OpBuilder, bits: Value, span: Value) -> Value:
    """The high word of ui64 ``bits * span``: uniform in [0, span) (Lemire, 2019, unrejected)."""
    mask = 0xFFFFFFFF
    high, low = b.shift_right_logical(bits, 32), b.and_(bits, mask)
    span_high, span_low = b.shift_right_logical(span, 32), b.and_(span, mask)
    middle = b.add(b.mul(high, span_low), b.shift_right_logical(b.mul(low, span_low), 32))
    carry = b.add(b.mul(low, span_high), b.and_(middle, mask))
    top = b.add(b.mul(high, span_high), b.shift_right_logical(middle, 32))
    return b.add(top, b.shift_right_logical(carry, 32))


def _largest(dtype: torch.dtype) -> int:
    """The largest integer ``random_`` gives without an upper bound."""
    if dtype is torch.bool:
        return 1
    return torch.iinfo(dtype).max if dtype in INTEGRAL else 1 << digits_of(dtype)


def integer_values(
    b: OpBuilder, shape: Sequence[int], dtype: torch.dtype, low: Operand, high: Operand | None
) -> Value:
    """Uniform integers in [low, high) as ``dtype``; without ``high`` up to the dtype's largest."""
    narrow = dtype is torch.bool or (dtype in INTEGRAL and dtype.itemsize < 4)
    lo = b.as_value(low, torch.int64)
    if high is None:
        # Wraps to 0 when it spans all 64 bits.
        span = b.sub(b.constant(_largest(dtype) + 1, torch.int64), lo)
    else:
        span = b.sub(b.as_value(high, torch.int64), lo)
    span = b.bitcast(span, torch.uint64)
    if narrow:
        bits = b.convert(b.random_bits(shape, torch.uint32), torch.uint64)
        draw = b.shift_right_logical(b.mul(bits, span), 32)
    else:
        bits = b.random_bits(shape, torch.uint64)
        draw = _high_product(b, bits, span)
        if high is None:
            draw = b.select(b.eq(span, 0), bits, draw)
    values = b.add(b.bitcast(draw, torch.int64), lo)
    out = b.convert(values, dtype)
    if dtype.is_floating_point and high is not None:
        # Large integers round to the float grid; one that rounds up to ``high`` is out of range.
        limit = b.convert(b.as_value(high, torch.int64), dtype)
        out = b.select(b.lt(out, limit), out, b.convert(lo, dtype))
    return out


@lower("aten.random_.from", "aten.random.from", operand=("from", "to"))
def random_from(b: OpBuilder, x: Value, low: Operand, high: Operand | None) -> Value:
    return integer_values(b, x.shape, x.dtype, low, high)


@lower("aten.random_.to", "aten.random.to", operand=("to",))
def random_to(b: OpBuilder, x: Value, high: Operand) -> Value:
    return integer_values(b, x.shape, x.dtype, 0, high)


@lower("aten.random_.default", "aten.random.default")
def random_any(b: OpBuilder, x: Value) -> Value:
    return integer_values(b, x.shape, x.dtype, 0, None)


# -- factories -------------------------------------------------------------------------------


@lower("aten.rand", "aten.rand_like")
def rand(b: OpBuilder, *_: object) -> Value:
    return uniform_values(b, b.out_shape, b.out_dtype)


@lower("aten.randn", "aten.randn_like")
def randn(b: OpBuilder, *_: object) -> Value:
    return normal_values(b, b.out_shape, b.out_dtype)


@lower("aten.normal.float_float", operand=("mean", "std"))
def normal_factory(b: OpBuilder, mean: Operand, std: Operand, size: Sequence[int]) -> Value:
    return normal_values(b, b.out_shape, b.out_dtype, mean, std)


@lower("aten.randint.default", "aten.randint.generator", operand=("high",))
def randint(b: OpBuilder, high: Operand, size: Sequence[int]) -> Value:
    return integer_values(b, b.out_shape, b.out_dtype, 0, high)


def _randint_specs(
    low: Operand, high: Operand, size: Sequence[int], *values: object
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    dtype = next((v for v in values if isinstance(v, torch.dtype)), torch.int64)
    return [(tuple(size), dtype)]


# PyTorch's own rule would compare the bounds, whose values are not known here.
@lower(
    "aten.randint.low",
    "aten.randint.low_generator",
    operand=("low", "high"),
    specs=_randint_specs,
)
def randint_low(b: OpBuilder, low: Operand, high: Operand, size: Sequence[int]) -> Value:
    return integer_values(b, b.out_shape, b.out_dtype, low, high)


@lower(
    "aten.randint_like.default",
    "aten.randint_like.generator",
    "aten.randint_like.Tensor",
    "aten.randint_like.Tensor_generator",
    operand=("high",),
)
def randint_like(b: OpBuilder, x: Value, high: Operand) -> Value:
    return integer_values(b, b.out_shape, b.out_dtype, 0, high)


@lower(
    "aten.randint_like.low_dtype",
    "aten.randint_like.low_generator_dtype",
    operand=("low", "high"),
)
def randint_like_low(b: OpBuilder, x: Value, low: Operand, high: Operand) -> Value:
    return integer_values(b, b.out_shape, b.out_dtype, low, high)


@lower("aten.randperm")
def randperm(b: OpBuilder, n: int) -> Value:
    """Sort the positions by 64 random bits each: ties, which would favour order, do not occur."""
    keys = b.random_bits((n,), torch.uint64)
    positions = b.iota((n,), 0, torch.int32)
    _, order = b.sort([keys, positions], 0, lambda a, c, *_: b.lt(a, c))
    return b.convert(order, b.out_dtype)


# -- Bernoulli and categorical ---------------------------------------------------------------


def bernoulli_mask(b: OpBuilder, shape: Sequence[int], p: Operand) -> Value:
    """An i1 tensor that is True with probability ``p`` (a number or a tensor)."""
    wide = isinstance(p, Value) and not p.weak and p.dtype is torch.float64
    work = torch.float64 if wide else torch.float32
    return b.lt(b.random_uniform(shape, work), b.as_value(p, work))


@lower("aten.bernoulli.default")
def bernoulli(b: OpBuilder, p: Value) -> Value:
    return b.convert(bernoulli_mask(b, p.shape, p), p.dtype)


@lower(
    "aten.bernoulli_.float",
    "aten.bernoulli_.Tensor",
    "aten.bernoulli.p",
    "aten.bernoulli.Tensor",
    operand=("p",),
)
def bernoulli_fill(b: OpBuilder, x: Value, p: Operand = 0.5) -> Value:
    return b.convert(bernoulli_mask(b, x.shape, p), x.dtype)


def _prefix(b: OpBuilder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Inclusive scan of non-negative numbers along the last dim in log2(n) shifted steps."""
    n, shift = x.shape[-1], 1
    while shift < n:
        shifted = b.pad_dim(b.slice_dim(x, -1, 0, n - shift), -1, 0, shift, 0)
        x = combine(x, shifted)
        shift *= 2
    return x


@lower("aten.multinomial")
def multinomial(b: OpBuilder, weights: Value, samples: int, replacement: bool = False) -> Value:
    """Category numbers (…, samples) drawn with probability proportional to ``weights`` (…, n)."""
    work = compute_dtype(weights.dtype)
    p = b.convert(weights, work)
    race = samples == 1 or not replacement
    _check_probabilities(b, p, race)
    if race:
        # The order of an exponential race: p / Exp(1), largest first.
        keys = b.div(p, b.neg(b.log(b.random_open_uniform(p.shape, work))))
        places = b.iota(p.shape, p.rank - 1, torch.int32)
        _, order = (
            b.sort([keys, places], -1, lambda a, c, *_: b.total_less(a, c, descending=True))
            if samples > 1
            else _first_of(b, keys, places)
        )
        return b.convert(b.slice_dim(order, -1, 0, samples), torch.int64)
    total = _prefix(b, p, b.add)
    # Summation order differs from place to place; a category of weight 0 gets exactly its
    # predecessor's bound, so that it is never hit.
    bounds = _prefix(b, b.select(b.gt(p, 0.0), total, 0.0), b.maximum)
    shape = (*p.shape[:-1], samples)
    top = b.slice_dim(bounds, -1, p.shape[-1] - 1, p.shape[-1])
    target = b.mul(b.random_uniform(shape, work), top)
    return b.convert(_first_above(b, bounds, target), torch.int64)


def _check_probabilities(b: OpBuilder, p: Value, race: bool) -> None:
    """What PyTorch's CPU finds wrong with weights, in its words: they differ with the algorithm."""

    def some(flags: Value) -> Value:
        return b.reduce(flags, "or", range(flags.rank))

    invalid = "invalid multinomial distribution"
    negative, finite = b.not_(b.ge(p, 0.0)), b.is_finite(p)
    if race:
        wrong = b.or_(negative, b.not_(finite))
        text = "probability tensor contains either `inf`, `nan` or element < 0"
        b.note_assertion(some(wrong), text)
    else:
        b.note_assertion(some(negative), f"{invalid} (encountering probability entry < 0)")
        text = f"{invalid} (encountering probability entry = infinity or NaN)"
        b.note_assertion(some(b.not_(finite)), text)
    total = b.reduce(p, "add", [p.rank - 1])
    b.note_assertion(some(b.le(total, 0.0)), f"{invalid} (sum of probabilities <= 0)")


def _first_of(b: OpBuilder, keys: Value, places: Value) -> tuple[Value, Value]:
    """The largest key of the last dim and its place, both with that dim of size 1."""

    def larger(key: Value, place: Value, other: Value, there: Value) -> list[Value]:
        take = b.or_(b.gt(other, key), b.and_(b.eq(other, key), b.lt(there, place)))
        return [b.select(take, other, key), b.select(take, there, place)]

    inits = [
        b.constant(-math.inf, keys.dtype),
        b.constant(torch.iinfo(torch.int32).max, torch.int32),
    ]
    best, place = b.reduce_general([keys, places], inits, [keys.rank - 1], larger)
    return b.unsqueeze(best, -1), b.unsqueeze(place, -1)


def _first_above(b: OpBuilder, bounds: Value, target: Value) -> Value:
    """The first place along the last dim whose bound is above the target (binary search)."""
    n = bounds.shape[-1]
    low = b.constant(0, torch.int32, target.shape)
    for bit in reversed(range(n.bit_length())):
        middle = b.add(low, 1 << bit)
        probe = b.minimum(b.sub(middle, 1), n - 1)
        below = b.le(b.take_along(bounds, -1, probe), target)
        low = b.select(b.and_(below, b.le(middle, n)), middle, low)
    return b.minimum(low, n - 1)
