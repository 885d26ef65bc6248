"""Error, gamma and zeta functions and what is built on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.approximations import ERFCX, chebyshev
from torch_tpu.lowering.registry import pointwise
from torch_tpu.lowering.types import Operand, Value

_SQRT_HALF = math.sqrt(0.5)

# -- error function relatives ------------------------------------------------------------------


@pointwise("aten.special_erfcx", "prims.erfcx")
def erfcx(b: OpBuilder, x: Value) -> Value:
    """exp(x*x) erfc(x) without overflow of the first or underflow of the second factor."""
    size = b.abs(x)
    # (x - k) / (x + k) written so that infinity maps to 1.
    t = b.sub(b.constant(1.0, x.dtype), b.div(b.constant(7.5, x.dtype), b.add(size, 3.75)))
    right = b.div(chebyshev(b, ERFCX, t), b.add(b.mul(size, 2.0), 1.0))
    left = b.sub(b.mul(b.exp(b.mul(x, x)), 2.0), right)
    return b.select(b.lt(x, 0), left, right)


@pointwise("aten.special_log_ndtr")
def log_ndtr(b: OpBuilder, x: Value) -> Value:
    """Logarithm of the standard normal distribution function."""
    z = b.mul(x, _SQRT_HALF)
    tail = b.sub(b.log(b.mul(erfcx(b, b.neg(z)), 0.5)), b.mul(z, z))
    body = b.log1p(b.mul(b.erfc(z), -0.5))
    return b.select(b.lt(x, -1.0), tail, body)


@pointwise("aten.special_ndtri", "prims.ndtri")
def ndtri(b: OpBuilder, p: Value) -> Value:
    """Inverse of the standard normal distribution function: NaN outside [0, 1].

    The middle comes from erf_inv. In the tails, Newton's method on log(p) starts from the leading
    terms of the asymptotic expansion; log(p) is nearly quadratic there, so three steps suffice.
    """
    middle = b.mul(b.erf_inv(b.sub(b.mul(p, 2.0), 1.0)), math.sqrt(2.0))
    other = b.sub(b.constant(1.0, p.dtype), p)
    small = b.clamp(b.minimum(p, other), torch.finfo(p.dtype).tiny, 0.02)
    target = b.log(small)
    square = b.mul(target, -2.0)
    x = b.sqrt(b.sub(square, b.log(b.mul(square, 2.0 * math.pi))))
    for _ in range(4 if p.dtype is torch.float64 else 3):
        mills = erfcx(b, b.mul(x, _SQRT_HALF))  # 2 Q(x) exp(x*x/2)
        value = b.sub(b.log(b.mul(mills, 0.5)), b.mul(b.mul(x, x), 0.5))
        step = b.mul(b.sub(value, target), b.mul(mills, math.sqrt(math.pi / 2.0)))
        x = b.add(x, step)
    x = b.select(b.eq(b.minimum(p, other), 0), math.inf, x)
    tail = b.select(b.lt(p, 0.5), b.neg(x), x)
    in_tail = b.or_(b.lt(p, 0.02), b.gt(p, 0.98))
    out = b.select(in_tail, tail, middle)
    inside = b.and_(b.ge(p, 0), b.le(p, 1))
    return b.select(inside, out, math.nan)


@pointwise("aten.special_entr")
def entr(b: OpBuilder, x: Value) -> Value:
    """-x log(x); 0 at 0 and -inf below."""
    out = b.neg(b.mul(x, b.log(x)))
    out = b.select(b.eq(x, 0), 0, out)
    return b.select(b.lt(x, 0), -math.inf, out)


# -- gamma function ----------------------------------------------------------------------------


@pointwise("aten.lgamma", "prims.lgamma")
def lgamma(b: OpBuilder, x: Value) -> Value:
    return b.lgamma(x)


@pointwise("aten.digamma", "prims.digamma")
def digamma(b: OpBuilder, x: Value) -> Value:
    """At the pole 0 the limit from the side of its sign; NaN at the other poles."""
    at_zero = b.div(b.constant(-1.0, x.dtype), x)
    return b.select(b.eq(x, 0), at_zero, b.digamma(x))


def _trigamma(b: OpBuilder, x: Value) -> Value:
    """Reflection below 1/2, then the recurrence up to 10 and the asymptotic series."""
    reflected = b.lt(x, 0.5)
    y = b.select(reflected, b.sub(b.constant(1.0, x.dtype), x), x)
    total = b.constant(0, x.dtype, x.shape)
    for _ in range(10):
        total = b.add(total, b.div(b.constant(1.0, x.dtype), b.mul(y, y)))
        y = b.add(y, 1.0)
    inverse = b.div(b.constant(1.0, x.dtype), y)
    square = b.mul(inverse, inverse)
    series = b.constant(0, x.dtype, x.shape)
    for bernoulli in reversed((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)):
        series = b.mul(b.add(series, bernoulli), square)
    tail = b.add(inverse, b.add(b.mul(square, 0.5), b.mul(series, inverse)))
    total = b.add(total, tail)
    sine = b.div(b.sin(b.mul(x, math.pi)), math.pi)
    mirror = b.sub(b.div(b.constant(1.0, x.dtype), b.mul(sine, sine)), total)
    return b.select(reflected, mirror, total)


@pointwise("aten.polygamma")
def polygamma(b: OpBuilder, n: int, x: Value) -> Value:
    """The n-th derivative of digamma: (-1)^(n+1) n! zeta(n + 1, x) from the second on."""
    if n == 0:
        return digamma(b, x)
    if n == 1:
        return _trigamma(b, x)
    order = b.constant(n + 1, x.dtype, x.shape)
    factorial = float(math.factorial(n)) if n <= 170 else math.inf
    return b.mul(zeta(b, order, x), factorial if n % 2 else -factorial)


@pointwise("aten.mvlgamma")
def mvlgamma(b: OpBuilder, x: Value, p: int) -> Value:
    """Multivariate log-gamma: p (p - 1) / 4 log(pi) + sum of lgamma(x - j / 2), j < p."""
    total = b.constant(p * (p - 1) / 4.0 * math.log(math.pi), x.dtype, x.shape)
    for j in range(p):
        total = b.add(total, b.lgamma(b.sub(x, j / 2.0)))
    return total


# -- Hurwitz zeta ------------------------------------------------------------------------------

# Bernoulli numbers B_2j / (2j)! of the Euler-Maclaurin tail.
_EULER_MACLAURIN = tuple(
    numerator / denominator / math.factorial(2 * j)
    for j, (numerator, denominator) in enumerate(
        [(1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510)]
        + [(43867, 798), (-174611, 330), (854513, 138), (-236364091, 2730)],
        start=1,
    )
)


@pointwise(
    "aten.special_zeta.default",
    "aten.special_zeta.other_scalar",
    "aten.special_zeta.self_scalar",
    "prims.zeta",
)
def zeta(b: OpBuilder, x: Operand, q: Operand) -> Value:
    """Sum of (k + q)^-x over k >= 0: at least nine terms, up to k + q > 9, then Euler-Maclaurin.

    NaN for x < 1, for non-integer x with q < 0 and for infinite q; inf at x = 1 and where q is
    0, -1, -2, …
    """
    x, q = b.operands(x, q)
    eps = torch.finfo(x.dtype).eps
    pole = b.and_(b.le(q, 0), b.eq(q, b.floor(q)))
    undefined = b.and_(b.lt(q, 0), b.ne(x, b.floor(x)))
    # Elements that are decided already do not keep the loop running.
    decided = b.or_(b.or_(pole, undefined), b.not_(b.and_(b.gt(x, 1.0), b.is_finite(q))))

    def running(n: Value, a: Value, _: Value, done: Value, __: Value) -> Value:
        more = b.or_(b.le(a, 9.0), b.lt(n, 9.0))
        return b.reduce(b.and_(more, b.not_(done)), "or", range(a.rank))

    def step(n: Value, a: Value, total: Value, done: Value, x: Value) -> list[Value]:
        last = b.or_(done, b.and_(b.gt(a, 9.0), b.ge(n, 9.0)))
        term = b.pow(b.select(last, 1.0, a), b.neg(x))
        total = b.select(last, total, b.add(total, term))
        negligible = b.lt(b.abs(term), b.mul(b.abs(total), eps / 4))
        done = b.or_(done, b.and_(b.not_(last), negligible))
        return [b.add(n, 1.0), b.select(last, a, b.add(a, 1.0)), total, done, x]

    start = b.constant(0, x.dtype)
    zero = b.constant(0, x.dtype, x.shape)
    first = b.select(decided, 10.0, q)
    _, a, total, done, _ = b.while_([start, first, zero, decided, x], running, step)
    last = b.pow(a, b.neg(x))
    tail = b.add(b.div(b.mul(last, a), b.sub(x, 1.0)), b.mul(last, 0.5))
    factor = b.div(b.mul(last, x), a)
    for j, coefficient in enumerate(_EULER_MACLAURIN):
        tail = b.add(tail, b.mul(factor, coefficient))
        following = b.mul(b.add(x, 2 * j + 1), b.add(x, 2 * j + 2))
        factor = b.mul(factor, b.div(following, b.mul(a, a)))
    # A term that was negligible leaves nothing to the tail, whose series may not converge there.
    out = b.select(done, total, b.add(total, tail))
    out = b.select(b.or_(b.is_nan(x), b.not_(b.lt(q, math.inf))), math.nan, out)
    out = b.select(undefined, math.nan, out)
    out = b.select(pole, math.inf, out)
    out = b.select(b.lt(x, 1.0), math.nan, out)
    return b.select(b.eq(x, 1.0), math.inf, out)


# -- incomplete gamma --------------------------------------------------------------------------

# B_2k / (2k (2k - 1)): Stirling's series of log Gamma in odd powers of 1 / a.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_MAX_TERMS = 20_000


def _log_ratio(b: OpBuilder, r: Value) -> Value:
    """2 atanh(r) - 2 r for |r| < 0.2, by its series."""
    square = b.mul(r, r)
    terms = 11 if r.dtype is torch.float64 else 6
    series = b.constant(0, r.dtype, r.shape)
    for k in reversed(range(1, terms)):
        series = b.mul(b.add(series, 2.0 / (2 * k + 1)), square)
    return b.mul(series, r)


def _gamma_density(b: OpBuilder, a: Value, x: Value) -> Value:
    """x^a exp(-x) / Gamma(a), from 10 on by Stirling's series, where the powers would cancel."""
    direct = b.exp(b.sub(b.sub(b.mul(a, b.log(x)), x), b.lgamma(a)))
    mu = b.div(b.sub(x, a), a)
    r = b.div(mu, b.add(mu, 2.0))
    # log(x / a) - mu; near mu = 0 as -mu r plus the rest of the series in r = mu / (2 + mu).
    near = b.sub(_log_ratio(b, b.clamp(r, -0.2, 0.2)), b.mul(mu, r))
    exponent = b.select(b.lt(b.abs(r), 0.18), near, b.sub(b.log(b.div(x, a)), mu))
    inverse = b.div(b.constant(1.0, a.dtype), a)
    square = b.mul(inverse, inverse)
    series = b.constant(0, a.dtype, a.shape)
    for coefficient in reversed(_STIRLING):
        series = b.add(b.mul(series, square), coefficient)
    exponent = b.sub(b.mul(a, exponent), b.mul(series, inverse))
    stirling = b.mul(b.exp(exponent), b.sqrt(b.div(a, 2.0 * math.pi)))
    return b.select(b.lt(a, 10.0), direct, stirling)


def _until_done(b: OpBuilder, state: Sequence[Value], step: object) -> tuple[Value, ...]:
    """Iterate ``step(n, done, *state)`` until every element of ``done`` is True."""
    start = b.constant(1.0, state[0].dtype)
    done = b.constant(False, torch.bool, state[0].shape)

    def running(n: Value, done: Value, *_: Value) -> Value:
        open_ = b.reduce(b.not_(done), "or", range(done.rank))
        return b.and_(open_, b.lt(n, float(_MAX_TERMS)))

    def body(n: Value, done: Value, *inner: Value) -> list[Value]:
        return [b.add(n, 1.0), *step(n, done, *inner)]  # type: ignore[operator]

    return b.while_([start, done, *state], running, body)[2:]


def _lower_series(b: OpBuilder, a: Value, x: Value) -> Value:
    """Sum of x^k / ((a + 1) … (a + k)) over k >= 0."""
    eps = torch.finfo(a.dtype).eps

    def step(n: Value, done: Value, total: Value, term: Value, a: Value, x: Value) -> list[Value]:
        term = b.mul(term, b.div(x, b.add(a, n)))
        total = b.add(total, term)
        return [b.le(term, b.mul(total, eps / 4)), total, term, a, x]

    one = b.constant(1.0, a.dtype, a.shape)
    return _until_done(b, [one, one, a, x], step)[0]


def _upper_fraction(b: OpBuilder, a: Value, x: Value) -> Value:
    """The continued fraction 1/(x+1-a- 1(1-a)/(x+3-a- …)) by Lentz's method (DLMF 8.9.2)."""
    eps = torch.finfo(a.dtype).eps
    tiny = 1e-30

    def step(
        n: Value, done: Value, value: Value, c: Value, d: Value, a: Value, x: Value
    ) -> list[Value]:
        numerator = b.mul(b.sub(a, n), n)
        denominator = b.add(b.sub(x, a), b.add(b.mul(n, 2.0), 1.0))
        d = b.add(b.mul(numerator, d), denominator)
        d = b.div(b.constant(1.0, d.dtype), b.select(b.lt(b.abs(d), tiny), tiny, d))
        c = b.add(denominator, b.div(numerator, c))
        c = b.select(b.lt(b.abs(c), tiny), tiny, c)
        change = b.mul(c, d)
        following = b.select(done, value, b.mul(value, change))
        close = b.lt(b.abs(b.sub(change, 1.0)), eps)
        return [b.or_(done, close), following, c, d, a, x]

    first = b.add(b.sub(x, a), 1.0)
    first = b.select(b.lt(b.abs(first), tiny), tiny, first)
    d = b.div(b.constant(1.0, a.dtype), first)
    large = b.constant(1.0 / tiny, a.dtype, a.shape)
    return _until_done(b, [d, large, d, a, x], step)[0]


def _incomplete_gamma(b: OpBuilder, a: Operand, x: Operand, upper: bool) -> Value:
    """The regularised lower P(a, x), or upper Q(a, x) = 1 - P."""
    a, x = b.operands(a, x)
    nan = b.or_(b.is_nan(a), b.is_nan(x))
    invalid = b.or_(b.lt(a, 0), b.lt(x, 0))
    infinite = b.or_(b.is_inf(a), b.is_inf(x))
    plain = b.and_(b.and_(b.gt(a, 0), b.gt(x, 0)), b.not_(infinite))
    by_series = b.le(x, b.add(a, 1.0))
    in_series, in_fraction = b.and_(plain, by_series), b.and_(plain, b.not_(by_series))
    density = _gamma_density(b, b.select(plain, a, 1.0), b.select(plain, x, 1.0))
    # Elements of the other kind run with arguments that converge at once.
    series = _lower_series(b, b.select(in_series, a, 1.0), b.select(in_series, x, 0.0))
    fraction = _upper_fraction(b, b.select(in_fraction, a, 1.0), b.select(in_fraction, x, 10.0))
    low = b.div(b.mul(density, series), b.select(plain, a, 1.0))
    high = b.mul(density, fraction)
    one = b.constant(1.0, a.dtype)
    if upper:
        out = b.select(by_series, b.sub(one, low), high)
    else:
        out = b.select(by_series, low, b.sub(one, high))
    none, all_ = (1.0, 0.0) if upper else (0.0, 1.0)
    undefined = b.constant(math.nan, a.dtype)
    out = b.select(nan, undefined, out)
    out = b.select(b.is_inf(x), all_, out)
    out = b.select(b.is_inf(a), b.select(b.is_inf(x), undefined, none), out)
    out = b.select(b.eq(x, 0), none, out)
    out = b.select(b.eq(a, 0), b.select(b.gt(x, 0), all_, undefined), out)
    return b.select(invalid, undefined, out)


@pointwise("aten.igamma", "prims.igamma")
def igamma(b: OpBuilder, a: Operand, x: Operand) -> Value:
    return _incomplete_gamma(b, a, x, upper=False)


@pointwise("aten.igammac", "prims.igammac")
def igammac(b: OpBuilder, a: Operand, x: Operand) -> Value:
    return _incomplete_gamma(b, a, x, upper=True)
