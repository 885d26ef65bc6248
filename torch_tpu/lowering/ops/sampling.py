"""Distributions sampled by rejection: gamma, Dirichlet, Poisson, binomial.

Each is a loop over the whole tensor that redraws until every element has accepted; elements with
parameters outside the distribution's domain are settled before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.random import compute_dtype
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value

# Below this mean a count is found by walking the distribution function, above it by rejection.
_WALK_MEAN = 10.0
# No count of mean 10 reaches this: its probability is below the grid of the uniform numbers.
_WALK_STEPS = 100.0


def _reject(
    b: OpBuilder,
    settled: Value,
    values: Value,
    parameters: Sequence[Value],
    attempt: Callable[..., tuple[Value, Value, Value]],
) -> Value:
    """Redraw until all are settled; ``attempt(state, *parameters)`` is (state, accepted, new)."""

    def pending(state: Value, done: Value, *_: Value) -> Value:
        return b.not_(b.reduce(done, "and", range(done.rank)))

    def step(state: Value, done: Value, current: Value, *fixed: Value) -> list[Value]:
        state, accepted, new = attempt(state, *fixed)
        take = b.and_(accepted, b.not_(done))
        return [state, b.or_(done, accepted), b.select(take, new, current), *fixed]

    return b.while_([b.random_start(), settled, values, *parameters], pending, step)[2]


# -- gamma -----------------------------------------------------------------------------------


def gamma_values(b: OpBuilder, alpha: Value) -> Value:
    """Gamma(alpha, 1) in the dtype of ``alpha`` (float32 or float64) by Marsaglia and Tsang (2000);
    alpha below 1 is raised by one and corrected by u ** (1 / alpha)."""
    dtype, shape = alpha.dtype, alpha.shape
    bits = b.bits_dtype(dtype)
    small = b.lt(alpha, 1.0)
    d = b.sub(b.select(small, b.add(alpha, 1.0), alpha), 1.0 / 3.0)
    c = b.rsqrt(b.mul(d, 9.0))
    valid = b.and_(b.gt(alpha, 0.0), b.is_finite(alpha))

    def attempt(state: Value, d: Value, c: Value) -> tuple[Value, Value, Value]:
        state, first = b.random_step(state, shape, bits)
        state, second = b.random_step(state, shape, bits)
        x = b.normal_from_bits(first, dtype)
        u = b.open_uniform_from_bits(second, dtype)
        base = b.add(b.mul(c, x), 1.0)
        v = b.mul(b.mul(base, base), base)
        positive = b.gt(v, 0.0)
        log_v = b.log(b.select(positive, v, 1.0))
        bound = b.add(b.mul(b.mul(x, x), 0.5), b.mul(d, b.add(b.sub(1.0, v), log_v)))
        return state, b.and_(positive, b.lt(b.log(u), bound)), b.mul(d, v)

    drawn = _reject(b, b.not_(valid), alpha, (d, c), attempt)
    u = b.random_open_uniform(shape, dtype)
    power = b.exp(b.div(b.log(u), b.select(b.and_(small, valid), alpha, 1.0)))
    return b.select(b.and_(small, valid), b.mul(drawn, power), drawn)


@lower("aten._standard_gamma")
def standard_gamma(b: OpBuilder, alpha: Value) -> Value:
    """Never below the smallest normal number, so that its logarithm is finite."""
    sample = gamma_values(b, b.convert(alpha, compute_dtype(alpha.dtype)))
    return b.convert(b.maximum(sample, torch.finfo(alpha.dtype).tiny), alpha.dtype)


@lower("aten._sample_dirichlet", specs=lambda alpha, *_: [(alpha.shape, alpha.dtype)])
def sample_dirichlet(b: OpBuilder, alpha: Value) -> Value:
    """Gamma draws normalised over the last dim."""
    info = torch.finfo(alpha.dtype)
    work = compute_dtype(alpha.dtype)
    draws = b.maximum(gamma_values(b, b.convert(alpha, work)), torch.finfo(work).tiny)
    total = b.reduce(draws, "add", [draws.rank - 1], keepdim=True)
    share = b.clamp(b.div(draws, total), info.tiny, 1.0 - info.eps)
    return b.convert(share, alpha.dtype)


# -- counts ----------------------------------------------------------------------------------


def _walk(
    b: OpBuilder,
    first: Value,
    active: Value,
    parameters: Sequence[Value],
    ratio: Callable[..., Value],
) -> Value:
    """Counts by inversion: start from P(0) = ``first`` and add P(k) = P(k-1) * ratio(k, …) until
    the sum passes a uniform number."""
    u = b.random_uniform(first.shape, first.dtype)

    def going(
        k: Value, sum_: Value, term: Value, u: Value, open_: Value, count: Value, *_: Value
    ) -> Value:
        return b.and_(b.reduce(open_, "or", range(open_.rank)), b.lt(k, _WALK_STEPS))

    def step(
        k: Value, sum_: Value, term: Value, u: Value, open_: Value, count: Value, *fixed: Value
    ) -> list[Value]:
        k = b.add(k, 1.0)
        open_ = b.and_(open_, b.ge(u, sum_))
        count = b.select(open_, b.broadcast_to(k, count.shape), count)
        term = b.mul(term, ratio(k, *fixed))
        return [k, b.add(sum_, term), term, u, open_, count, *fixed]

    zero = b.constant(0, first.dtype)
    counts = b.constant(0, first.dtype, first.shape)
    return b.while_([zero, first, first, u, active, counts, *parameters], going, step)[5]


def poisson_values(b: OpBuilder, rate: Value) -> Value:
    """Poisson counts; from mean 10 on by PTRS (Hörmann, "The transformed rejection method for
    generating Poisson random variables", 1993)."""
    dtype, shape = rate.dtype, rate.shape
    bits = b.bits_dtype(dtype)
    large = b.and_(b.ge(rate, _WALK_MEAN), b.is_finite(rate))
    low = b.and_(b.gt(rate, 0.0), b.lt(rate, _WALK_MEAN))
    few = _walk(
        b,
        b.exp(b.neg(b.select(low, rate, 0.0))),
        low,
        [rate],
        lambda k, rate: b.div(rate, k),
    )
    mean = b.select(large, rate, _WALK_MEAN)
    root = b.sqrt(mean)
    scale = b.add(b.mul(root, 2.53), 0.931)

    def attempt(state: Value, mean: Value, scale: Value) -> tuple[Value, Value, Value]:
        state, first = b.random_step(state, shape, bits)
        state, second = b.random_step(state, shape, bits)
        u = b.sub(b.open_uniform_from_bits(first, dtype), 0.5)
        v = b.open_uniform_from_bits(second, dtype)
        a = b.add(b.mul(scale, 0.02483), -0.059)
        inverse = b.add(b.div(1.1328, b.sub(scale, 3.4)), 1.1239)
        edge = b.sub(0.9277, b.div(3.6224, b.sub(scale, 2.0)))
        us = b.sub(0.5, b.abs(u))
        slope = b.add(b.div(b.mul(a, 2.0), us), scale)
        k = b.floor(b.add(b.add(b.mul(slope, u), mean), 0.43))
        quick = b.and_(b.ge(us, 0.07), b.le(v, edge))
        hopeless = b.or_(b.lt(k, 0.0), b.and_(b.lt(us, 0.013), b.gt(v, us)))
        left = b.log(b.div(b.mul(v, inverse), b.add(b.div(a, b.mul(us, us)), scale)))
        safe = b.maximum(k, 0.0)
        right = b.sub(b.sub(b.mul(safe, b.log(mean)), mean), b.lgamma(b.add(safe, 1.0)))
        return state, b.or_(quick, b.and_(b.not_(hopeless), b.le(left, right))), k

    many = _reject(b, b.not_(large), few, (mean, scale), attempt)
    usable = b.or_(b.or_(large, low), b.eq(rate, 0.0))
    return b.select(usable, many, rate)


@lower("aten.poisson")
def poisson(b: OpBuilder, rate: Value) -> Value:
    if not rate.is_float:
        return b.convert(poisson_values(b, b.convert(rate, torch.float64)), rate.dtype)
    return b.convert(poisson_values(b, b.convert(rate, compute_dtype(rate.dtype))), rate.dtype)


def _stirling_tail(b: OpBuilder, k: Value) -> Value:
    """log k! less Stirling's formula for it, for k >= 0."""
    n = b.add(k, 1.0)
    exact = b.lgamma(n)
    half_log = b.mul(b.log(n), b.constant(0.5, k.dtype))
    plain = b.sub(b.mul(n, b.log(n)), b.add(n, half_log))
    return b.sub(exact, b.add(plain, 0.5 * math.log(2.0 * math.pi)))


def binomial_values(b: OpBuilder, count: Value, prob: Value) -> Value:
    """Binomial counts; from mean 10 on by BTRS (Hörmann, "The generation of binomial random
    variates", 1993)."""
    dtype, shape = count.dtype, count.shape
    bits = b.bits_dtype(dtype)
    n = b.floor(count)
    valid = b.and_(b.and_(b.gt(n, 0.0), b.is_finite(n)), b.and_(b.gt(prob, 0.0), b.lt(prob, 1.0)))
    flip = b.gt(prob, 0.5)
    p = b.select(flip, b.sub(1.0, prob), prob)
    mean = b.mul(n, p)
    large = b.and_(valid, b.ge(mean, _WALK_MEAN))
    low = b.and_(valid, b.lt(mean, _WALK_MEAN))
    quiet_n, quiet_p = b.select(low, n, 1.0), b.select(low, p, 0.5)
    odds = b.div(quiet_p, b.sub(1.0, quiet_p))
    few = _walk(
        b,
        b.exp(b.mul(quiet_n, b.log1p(b.neg(quiet_p)))),
        low,
        [quiet_n, odds],
        lambda k, n, odds: b.mul(b.div(b.maximum(b.sub(n, b.sub(k, 1.0)), 0.0), k), odds),
    )
    few = b.minimum(few, quiet_n)
    big_n, big_p = b.select(large, n, 40.0), b.select(large, p, 0.5)

    def attempt(state: Value, n: Value, p: Value) -> tuple[Value, Value, Value]:
        state, first = b.random_step(state, shape, bits)
        state, second = b.random_step(state, shape, bits)
        u = b.sub(b.open_uniform_from_bits(first, dtype), 0.5)
        v = b.open_uniform_from_bits(second, dtype)
        q = b.sub(1.0, p)
        spread = b.sqrt(b.mul(b.mul(n, p), q))
        scale = b.add(b.mul(spread, 2.53), 1.15)
        a = b.add(b.add(b.mul(scale, 0.0248), b.mul(p, 0.01)), -0.0873)
        edge = b.sub(0.92, b.div(4.2, scale))
        alpha = b.mul(b.add(b.div(5.1, scale), 2.83), spread)
        us = b.sub(0.5, b.abs(u))
        slope = b.add(b.div(b.mul(a, 2.0), us), scale)
        k = b.floor(b.add(b.mul(slope, u), b.add(b.mul(n, p), 0.5)))
        possible = b.and_(b.ge(k, 0.0), b.le(k, n))
        quick = b.and_(b.ge(us, 0.07), b.le(v, edge))
        safe = b.clamp(k, 0.0, n)
        mode = b.floor(b.mul(b.add(n, 1.0), p))
        left = b.log(b.div(b.mul(v, alpha), b.add(b.div(a, b.mul(us, us)), scale)))
        # log P(k) - log P(mode), written so that large logarithms of factorials cancel early.
        rest_mode, rest = b.add(b.sub(n, mode), 1.0), b.add(b.sub(n, safe), 1.0)
        up, top = b.add(safe, 1.0), b.add(mode, 1.0)
        right = b.add(
            b.mul(b.add(mode, 0.5), b.log(b.div(top, b.mul(b.div(p, q), rest_mode)))),
            b.add(
                b.mul(b.add(n, 1.0), b.log(b.div(rest_mode, rest))),
                b.mul(b.add(safe, 0.5), b.log(b.div(b.mul(b.div(p, q), rest), up))),
            ),
        )
        tails = b.add(_stirling_tail(b, mode), _stirling_tail(b, b.sub(n, mode)))
        tails = b.sub(tails, b.add(_stirling_tail(b, safe), _stirling_tail(b, b.sub(n, safe))))
        accepted = b.and_(possible, b.or_(quick, b.le(left, b.add(right, tails))))
        return state, accepted, k

    drawn = _reject(b, b.not_(large), few, (big_n, big_p), attempt)
    drawn = b.select(flip, b.sub(n, drawn), drawn)
    certain = b.select(b.and_(b.gt(n, 0.0), b.ge(prob, 1.0)), n, 0.0)
    unknown = b.or_(b.is_nan(count), b.is_nan(prob))
    return b.select(valid, drawn, b.select(unknown, math.nan, certain))


def _binomial_specs(
    count: Value, prob: Value, *_: object
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(torch.broadcast_shapes(count.shape, prob.shape), count.dtype)]


@lower("aten.binomial", specs=_binomial_specs)
def binomial(b: OpBuilder, count: Value, prob: Value) -> Value:
    work = compute_dtype(count.dtype)
    count, prob = b.broadcast(b.convert(count, work), b.convert(prob, work))
    return b.convert(binomial_values(b, count, prob), b.out_dtype)
