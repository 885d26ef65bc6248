"""Connectionist temporal classification (Graves et al., 2006): forward-backward in log space.

The blank-extended target of length 2 S + 1 alternates blanks and labels. PyTorch has no shape rule
for these ops; lengths may be Python lists or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value

Lengths = Sequence[int] | Value
_NEVER = -math.inf


def _longest(targets: Value, target_lengths: Lengths) -> int:
    """A static bound of the target lengths; exact when the lengths are known."""
    if isinstance(target_lengths, Value):
        return targets.shape[-1]
    return max(target_lengths, default=0)


def _forward_specs(
    log_probs: Value, targets: Value, input_lengths: Lengths, target_lengths: Lengths, *_: Any
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    steps, batch, _classes = log_probs.shape
    extended = 2 * _longest(targets, target_lengths) + 1
    return [((batch,), log_probs.dtype), ((batch, steps, extended), log_probs.dtype)]


def _backward_specs(
    grad: Value, log_probs: Value, *_: Any
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(log_probs.shape, log_probs.dtype)]


@dataclass(frozen=True)
class _Problem:
    """log_probs at the extended labels and the lengths of one batch.

    labels    (N, L) class of each extended position
    emission  (T, N, L) log probability of that class at each step
    skip      (N, L) whether position s may be reached from s - 2
    steps, ends   (N, 1) input lengths and 2 * target lengths
    """

    labels: Value
    emission: Value
    skip: Value
    steps: Value
    ends: Value


def _lengths(b: OpBuilder, lengths: Lengths) -> Value:
    value = lengths if isinstance(lengths, Value) else b.constant_array(lengths, torch.int64)
    return b.unsqueeze(b.convert(value, torch.int64), 1)


def _target_matrix(b: OpBuilder, targets: Value, lengths: Value, longest: int) -> Value:
    """Targets as (N, longest): cut from a padded matrix or from one concatenated list."""
    targets = b.convert(targets, torch.int64)
    batch = lengths.shape[0]
    if targets.rank == 2:
        return b.slice_dim(targets, 1, 0, longest)
    shape = (batch, batch)
    before = b.lt(b.iota(shape, 1), b.iota(shape, 0))
    across = b.broadcast_to(b.reshape(lengths, (1, batch)), shape)
    starts = b.reduce(b.select(before, across, 0), "add", [1], keepdim=True)
    at = b.add(b.broadcast_to(starts, (batch, longest)), b.iota((batch, longest), 1))
    return b.take_rows(targets, b.clamp(at, 0, max(targets.numel - 1, 0)))


def _problem(
    b: OpBuilder,
    log_probs: Value,
    targets: Value,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int,
) -> _Problem:
    steps, batch, classes = log_probs.shape
    longest = _longest(targets, target_lengths)
    counts = _lengths(b, target_lengths)
    blanks = b.constant(blank, torch.int64, (batch, 1))
    if longest:
        matrix = _target_matrix(b, targets, counts, longest)
        used = b.lt(b.iota(matrix.shape, 1), b.broadcast_to(counts, matrix.shape))
        b.note_bad_index(b.and_(used, b.or_(b.lt(matrix, 0), b.ge(matrix, classes))))
        matrix = b.select(used, b.clamp(matrix, 0, classes - 1), blank)
        pairs = b.stack([b.broadcast_to(blanks, matrix.shape), matrix], 2)
        labels = b.concatenate([b.reshape(pairs, (batch, 2 * longest)), blanks], 1)
    else:
        labels = blanks
    extended = labels.shape[1]
    index = b.broadcast_to(b.unsqueeze(labels, 0), (steps, batch, extended))
    skip = b.and_(b.ne(labels, blank), b.ne(labels, _shifted(b, labels, 2, blank)))
    return _Problem(
        labels,
        b.take_along(log_probs, 2, index),
        skip,
        _lengths(b, input_lengths),
        b.mul(counts, 2),
    )


def _shifted(b: OpBuilder, x: Value, by: int, fill: float) -> Value:
    """Position s takes the entry of s - by (columns of the last dim), ``fill`` outside."""
    low, high = [0] * x.rank, [0] * x.rank
    low[-1], high[-1] = by, -by
    return b.pad(x, fill, low, high)


def _log_add(b: OpBuilder, *terms: Value) -> Value:
    """log(sum(exp(terms))), -inf where all terms are."""
    top = terms[0]
    for t in terms[1:]:
        top = b.maximum(top, t)
    top = b.select(b.eq(top, _NEVER), 0, top)
    total = b.exp(b.sub(terms[0], top))
    for t in terms[1:]:
        total = b.add(total, b.exp(b.sub(t, top)))
    return b.add(b.log(total), top)


def _scan(
    b: OpBuilder,
    emission: Value,
    constants: Sequence[Value],
    step: Callable[..., Value],
    reverse: bool,
) -> Value:
    """Rows of ``step(t, previous, emitted, *constants)`` for all t, as (T, N, L)."""
    steps, batch, extended = emission.shape
    row = (1, batch, extended)
    state = b.constant(_NEVER, emission.dtype, (batch, extended))

    def body(i: Value, previous: Value, rows: Value, emitted: Value, *rest: Value) -> list[Value]:
        t = b.sub(steps - 1, i) if reverse else i
        now = b.reshape(b.dynamic_slice(emitted, [t, 0, 0], row), row[1:])
        following = step(t, previous, now, *rest)
        rows = b.dynamic_update_slice(rows, b.reshape(following, row), [t, 0, 0])
        return [following, rows, emitted, *rest]

    rows = b.constant(_NEVER, emission.dtype, emission.shape)
    return b.fori(steps, [state, rows, emission, *constants], body)[1]


def _alphas(b: OpBuilder, p: _Problem) -> Value:
    """Log probability of all prefixes that end at position s after step t: (T, N, L)."""

    def step(t: Value, previous: Value, now: Value, skip: Value, ends: Value) -> Value:
        place = b.iota(now.shape, 1)
        reachable = b.and_(b.le(place, 1), b.le(place, b.broadcast_to(ends, now.shape)))
        first = b.select(reachable, now, _NEVER)
        two_back = b.select(skip, _shifted(b, previous, 2, _NEVER), _NEVER)
        moved = _log_add(b, previous, _shifted(b, previous, 1, _NEVER), two_back)
        return b.select(b.broadcast_to(b.eq(t, 0), now.shape), first, b.add(moved, now))

    return _scan(b, p.emission, [p.skip, p.ends], step, reverse=False)


def _betas(b: OpBuilder, p: _Problem) -> Value:
    """Log probability of all suffixes that start at position s with step t: (T, N, L)."""

    def step(
        t: Value, following: Value, now: Value, skip: Value, ends: Value, steps: Value
    ) -> Value:
        place = b.iota(now.shape, 1)
        end = b.broadcast_to(ends, now.shape)
        final = b.or_(b.eq(place, end), b.eq(place, b.sub(end, 1)))
        last = b.select(final, now, _NEVER)
        allowed = b.ne(_shifted(b, b.convert(skip, torch.int64), -2, 0), 0)
        two_on = b.select(allowed, _shifted(b, following, -2, _NEVER), _NEVER)
        moved = b.add(_log_add(b, following, _shifted(b, following, -1, _NEVER), two_on), now)
        left = b.broadcast_to(b.sub(b.sub(steps, 1), b.broadcast_to(t, steps.shape)), now.shape)
        return b.select(b.eq(left, 0), last, b.select(b.gt(left, 0), moved, _NEVER))

    return _scan(b, p.emission, [p.skip, p.ends, p.steps], step, reverse=True)


@lower("aten._ctc_loss", specs=_forward_specs)
def ctc_loss(
    b: OpBuilder,
    log_probs: Value,
    targets: Value,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Value, Value]:
    """log_probs (T, N, C); returns (loss (N,), log alpha (N, T, 2 S + 1))."""
    p = _problem(b, log_probs, targets, input_lengths, target_lengths, blank)
    rows = b.transpose(_alphas(b, p), [1, 0, 2])
    batch, steps, extended = rows.shape
    last = b.clamp(b.sub(p.steps, 1), 0, max(steps - 1, 0))
    at = b.broadcast_to(b.unsqueeze(last, 2), (batch, 1, extended))
    final = b.reshape(b.take_along(rows, 1, at), (batch, extended))
    place = b.iota(final.shape, 1)
    end = b.broadcast_to(p.ends, final.shape)
    counted = b.or_(b.eq(place, end), b.eq(place, b.sub(end, 1)))
    picked = b.select(counted, final, _NEVER)
    top = b.reduce(picked, "max", [1], keepdim=True)
    top = b.select(b.eq(top, _NEVER), 0, top)
    total = b.reduce(b.exp(b.sub(picked, b.broadcast_to(top, picked.shape))), "add", [1])
    loss = b.neg(b.add(b.log(total), b.reshape(top, (batch,))))
    # Without input only the empty target has a probability: one.
    empty = b.reshape(b.eq(p.steps, 0), (batch,))
    nothing = b.select(b.reshape(b.eq(p.ends, 0), (batch,)), b.constant(0, loss.dtype), math.inf)
    return b.select(empty, nothing, loss), rows


@lower("aten._ctc_loss_backward", specs=_backward_specs)
def ctc_loss_backward(
    b: OpBuilder,
    grad: Value,
    log_probs: Value,
    targets: Value,
    input_lengths: Lengths,
    target_lengths: Lengths,
    loss: Value,
    log_alpha: Value,
    blank: int,
    zero_infinity: bool = False,
) -> Value:
    """exp(log_probs) minus the posterior of each class, times the loss's gradient."""
    p = _problem(b, log_probs, targets, input_lengths, target_lengths, blank)
    _steps, batch, classes = log_probs.shape
    joint = b.add(b.transpose(log_alpha, [1, 0, 2]), _betas(b, p))
    shape = joint.shape
    given = b.broadcast_to(b.reshape(loss, (1, batch, 1)), shape)
    # Positions that no path visits are -inf in alpha or beta; their emission may be -inf as well.
    inside = b.le(b.iota(shape, 2), b.broadcast_to(b.unsqueeze(p.ends, 0), shape))
    visited = b.and_(inside, b.or_(b.ne(joint, _NEVER), b.eq(given, math.inf)))
    posterior = b.exp(b.sub(b.add(joint, given), p.emission))
    posterior = b.select(visited, posterior, 0)
    one_hot_shape = (batch, shape[2], classes)
    hot = b.convert(
        b.eq(b.iota(one_hot_shape, 2), b.broadcast_to(b.unsqueeze(p.labels, 2), one_hot_shape)),
        log_probs.dtype,
    )
    saved, b.matmul_precision = b.matmul_precision, "HIGHEST"
    by_class = b.dot_general(posterior, hot, ([2], [1]), ([1], [0]))
    b.matmul_precision = saved
    by_class = b.transpose(by_class, [1, 0, 2])
    scale = b.broadcast_to(b.reshape(b.broadcast_to(grad, (batch,)), (1, batch, 1)), by_class.shape)
    out = b.mul(b.sub(b.exp(log_probs), by_class), scale)
    wanted = b.lt(
        b.iota(out.shape, 0), b.broadcast_to(b.reshape(p.steps, (1, batch, 1)), out.shape)
    )
    if zero_infinity:
        finite = b.ne(loss, math.inf)
        wanted = b.and_(wanted, b.broadcast_to(b.reshape(finite, (1, batch, 1)), out.shape))
    return b.select(wanted, out, 0)
