"""Cumulative operations along one dim."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim


def prefix(b: OpBuilder, x: Value, kind: str, dim: int) -> Value:
    """Inclusive scan with a named combiner: one causal window, which XLA splits into blocks."""
    if x.rank == 0:
        return x
    dim = canonical_dim(dim, x.rank)
    window, padding = [1] * x.rank, [(0, 0)] * x.rank
    window[dim], padding[dim] = x.shape[dim], (x.shape[dim] - 1, 0)
    identity = b.identity(kind, x.dtype)
    combine = b.reduce_combiner(kind, x.dtype)
    (out,) = b.reduce_window([x], [identity], combine, window=window, padding=padding)
    return out


_STEPS = 64  # longest run that is scanned one element after the other


def blocked_scan(
    b: OpBuilder, x: Value, identity: float, combine: Callable[[Value, Value], Value], dim: int
) -> Value:
    """Inclusive scan with any associative ``combine`` on tensors, in about 2n combinations.

    All blocks advance together through a loop, then the blocks' totals are scanned the same way;
    meant for combiners too dear for a window.
    """
    n = x.shape[dim]
    blocks = 1 if n <= _STEPS else -(-n // (_STEPS // 2))
    length = -(-n // blocks)
    split = (*x.shape[:dim], blocks, length, *x.shape[dim + 1 :])
    padded = b.pad_dim(x, dim, identity, 0, blocks * length - n)
    rows = b.move_dim(b.reshape(padded, split), dim + 1, 0)
    start = b.constant(identity, x.dtype, (1, *rows.shape[1:]))

    def step(i: Value, last: Value, out: Value) -> list[Value]:
        at = [i] + [0] * (out.rank - 1)
        last = combine(last, b.dynamic_slice(out, at, last.shape))
        return [last, b.dynamic_update_slice(out, last, at)]

    total, rows = b.fori(length, [start, rows], step)
    if blocks > 1:
        total = blocked_scan(b, b.reshape(total, total.shape[1:]), identity, combine, dim)
        before = b.pad_dim(b.slice_dim(total, dim, 0, blocks - 1), dim, identity, 1, 0)
        rows = combine(b.broadcast_to(before, rows.shape), rows)
    flat = b.reshape(b.move_dim(rows, 0, dim + 1), padded.shape)
    return b.slice_dim(flat, dim, 0, n)


@lower("aten.cumsum", promote="result")
def cumsum(b: OpBuilder, x: Value, dim: int) -> Value:
    return prefix(b, x, "add", dim)


@lower("aten.cumprod", promote="result")
def cumprod(b: OpBuilder, x: Value, dim: int) -> Value:
    return prefix(b, x, "mul", dim)


def _running_extremum(b: OpBuilder, x: Value, dim: int, largest: bool) -> tuple[Value, Value]:
    """Running extremum and the last position that holds it; once a NaN came, NaN stays."""
    if x.is_bool:
        value, where = _running_extremum(b, b.convert(x, torch.uint8), dim, largest)
        return b.convert(value, torch.bool), where
    if x.rank == 0:
        return x, b.constant(0, torch.int64)
    dim = canonical_dim(dim, x.rank)
    value = _extremum_so_far(b, x, dim, largest)
    hit = b.or_(b.eq(x, value), b.is_nan(x))
    where = b.select(hit, b.iota(x.shape, dim, torch.int32), b.constant(-1, torch.int32))
    return value, b.convert(_extremum_so_far(b, where, dim, True), torch.int64)


def _extremum_so_far(b: OpBuilder, x: Value, dim: int, largest: bool) -> Value:
    """Running maximum or minimum. XLA:CPU walks a whole window for every element: not there."""
    if b.target != "cpu":
        return prefix(b, x, "max" if largest else "min", dim)
    if x.is_float:
        least = -math.inf if largest else math.inf
    else:
        limits = torch.iinfo(x.dtype)
        least = limits.min if largest else limits.max
    return blocked_scan(b, x, least, b.maximum if largest else b.minimum, dim)


@lower("aten.cummax")
def cummax(b: OpBuilder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extremum(b, x, dim, largest=True)


@lower("aten.cummin")
def cummin(b: OpBuilder, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_extremum(b, x, dim, largest=False)


def log_add_exp(b: OpBuilder, x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)) without overflow, for real or complex operands."""
    if not x.is_complex:
        gap = b.select(b.eq(x, y), 0, b.neg(b.abs(b.sub(x, y))))
        return b.add(b.maximum(x, y), b.log1p(b.exp(gap)))
    first = b.ge(b.real(x), b.real(y))
    top, low = b.select(first, x, y), b.select(first, y, x)
    gone = b.eq(b.real(low), float("-inf"))
    gap = b.select(gone, 0j, b.sub(low, top))
    return b.select(gone, top, b.add(top, b.log1p(b.exp(gap))))


@lower("aten._logcumsumexp", specs=lambda x, *_: [(x.shape, x.dtype)])
@lower("aten.logcumsumexp", promote="result")
def logcumsumexp(b: OpBuilder, x: Value, dim: int) -> Value:
    if x.rank == 0:
        return x
    dim = canonical_dim(dim, x.rank)
    return blocked_scan(b, x, float("-inf"), lambda u, v: log_add_exp(b, u, v), dim)
