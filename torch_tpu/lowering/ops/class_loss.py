"""Losses whose targets are class indices: negative log likelihood and the margin losses."""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.loss import MEAN, NONE, reduced
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

# -- negative log likelihood: x is (N, C, *spatial), target (N, *spatial) ----------------------


def _classes_last(b: OpBuilder, x: Value) -> Value:
    """(N, C, *spatial) as (N * spatial, C)."""
    if x.rank > 2:
        x = b.transpose(x, [0, *range(2, x.rank), 1])
    return b.reshape(x, (-1, x.shape[-1]) if x.numel else (0, x.shape[-1]))


def _checked_target(
    b: OpBuilder, target: Value, classes: int, ignore_index: int
) -> tuple[Value, Value]:
    """(target with ignored entries at 0, i1 of those that count); notes targets out of range."""
    target = b.convert(target, torch.int64)
    counted = b.ne(target, ignore_index)
    outside = b.or_(b.lt(target, 0), b.ge(target, classes))
    b.note_bad_index(b.and_(outside, counted))
    return b.select(counted, target, 0), counted


def _class_weights(
    b: OpBuilder, target: Value, counted: Value, weight: Value | None, dtype: torch.dtype
) -> Value:
    """The weight of each target, 0 where ignored."""
    if weight is None:
        return b.convert(counted, dtype)
    return b.select(counted, b.take_rows(b.convert(weight, dtype), target), 0)


@lower("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss_forward(
    b: OpBuilder,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Value, Value]:
    """Returns (loss, total weight); the total is 0 without a reduction."""
    dtype = opmath_dtype(x.dtype)
    classes = x.shape[0] if x.rank == 1 else x.shape[1]
    rows = _classes_last(b, x if x.rank > 1 else b.reshape(x, (1, classes)))
    flat, counted = _checked_target(b, b.reshape(target, (target.numel,)), classes, ignore_index)
    weights = _class_weights(b, flat, counted, weight, dtype)
    picked = b.reshape(b.take_along(rows, 1, b.unsqueeze(flat, 1)), flat.shape)
    losses = b.select(counted, b.neg(b.mul(b.convert(picked, dtype), weights)), 0)
    total_shape, total_dtype = b.results[1]
    if reduction == NONE and x.rank > 1:
        out = b.convert(b.reshape(losses, b.out_shape), b.out_dtype)
        return out, b.constant(0, total_dtype, total_shape)
    out, total = (b.reduce(v, "add", [0]) for v in (losses, weights))
    if reduction == MEAN:
        out = b.div(out, total)
    return b.convert(b.reshape(out, b.out_shape), b.out_dtype), b.convert(total, total_dtype)


@lower("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    """A one-hot comparison along the class dim, which fuses with what reads it."""
    dtype = opmath_dtype(x.dtype)
    axis = 0 if x.rank == 1 else 1
    target, counted = _checked_target(b, target, x.shape[axis], ignore_index)
    if x.rank == 1:
        target, counted = b.reshape(target, ()), b.reshape(counted, ())
    each = b.mul(_class_weights(b, target, counted, weight, dtype), -1.0)
    grad = b.convert(grad, dtype)
    if reduction == MEAN:
        grad = b.div(grad, b.convert(total_weight, dtype))
    if x.rank == 1:
        grad = b.reshape(grad, ())
    each = b.select(counted, b.mul(each, b.broadcast_to(grad, each.shape)), 0)
    here = b.eq(
        b.iota(x.shape, axis),
        b.broadcast_to(b.unsqueeze(target, axis), x.shape),
    )
    return b.convert(
        b.select(here, b.broadcast_to(b.unsqueeze(each, axis), x.shape), 0), b.out_dtype
    )


# -- margins (PyTorch has no shape rules for all of these) --------------------------------------


Specs = list[tuple[tuple[int, ...], torch.dtype]]


def _like_input(grad: Value, x: Value, *_: Any) -> Specs:
    return [(x.shape, x.dtype)]


def _multi_margin_specs(
    x: Value,
    target: Value,
    p: int = 1,
    margin: Operand = 1,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Specs:
    if p not in (1, 2):
        raise RuntimeError("only p == 1 and p == 2 supported")
    return [(target.shape if reduction == NONE else (), x.dtype)]


def _multilabel_specs(x: Value, target: Value, reduction: int) -> Specs:
    loss = x.shape[:-1] if reduction == NONE else ()
    return [(loss, x.dtype), (target.shape, x.dtype)]


def _margin_parts(
    b: OpBuilder, x: Value, target: Value, margin: Operand, weight: Value | None
) -> tuple[Value, Value, Value, Value]:
    """(distance of each class to the margin, one-hot target, weight of each row, rows)."""
    rows = b.convert(b.reshape(x, (1, -1)) if x.rank < 2 else x, opmath_dtype(x.dtype))
    classes = rows.shape[1]
    index = b.check_index(b.convert(b.reshape(target, (rows.shape[0],)), torch.int64), classes)
    column = b.unsqueeze(index, 1)
    own = b.broadcast_to(b.take_along(rows, 1, column), rows.shape)
    distance = b.add(b.sub(rows, own), b.as_value(margin, rows.dtype))
    here = b.eq(b.iota(rows.shape, 1), b.broadcast_to(column, rows.shape))
    scale = b.constant(1.0 / classes, rows.dtype, index.shape)
    if weight is not None:
        scale = b.mul(b.take_rows(b.convert(weight, rows.dtype), index), 1.0 / classes)
    return distance, here, scale, rows


@lower("aten.multi_margin_loss", static=("p",), specs=_multi_margin_specs)
def multi_margin_loss(
    b: OpBuilder,
    x: Value,
    target: Value,
    p: int = 1,
    margin: Operand = 1,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    distance, here, scale, _ = _margin_parts(b, x, target, margin, weight)
    active = b.and_(b.gt(distance, 0), b.not_(here))
    power = distance if p == 1 else b.mul(distance, distance)
    losses = b.mul(b.reduce(b.select(active, power, 0), "add", [1]), scale)
    if reduction == NONE:
        losses = b.reshape(losses, b.out_shape)
    return reduced(b, losses, reduction)


@lower("aten.multi_margin_loss_backward", static=("p",), specs=_like_input)
def multi_margin_loss_backward(
    b: OpBuilder,
    grad: Value,
    x: Value,
    target: Value,
    p: int,
    margin: Operand,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    distance, here, scale, rows = _margin_parts(b, x, target, margin, weight)
    active = b.and_(b.gt(distance, 0), b.not_(here))
    slope = b.constant(1, rows.dtype, rows.shape) if p == 1 else b.mul(distance, 2.0)
    slope = b.select(active, slope, 0)
    own = b.neg(b.reduce(slope, "add", [1], keepdim=True))
    slope = b.select(here, b.broadcast_to(own, rows.shape), slope)
    if reduction == MEAN:
        scale = b.mul(scale, 1.0 / rows.shape[0])
    grad = b.convert(grad, rows.dtype)
    grad = b.broadcast_to(b.reshape(grad, (-1,) if grad.numel > 1 else (1,)), scale.shape)
    factor = b.broadcast_to(b.unsqueeze(b.mul(grad, scale), 1), rows.shape)
    return b.convert(b.reshape(b.mul(slope, factor), x.shape), b.out_dtype)


def _label_mask(b: OpBuilder, target: Value, classes: int) -> tuple[Value, Value]:
    """(labels before the first negative one as 0/1 per slot, i1 of the classes they name)."""
    target = b.convert(target, torch.int64)
    ended = b.convert(b.lt(target, 0), torch.int64)
    (seen,) = b.reduce_window(
        [ended],
        [b.constant(0, torch.int64)],
        "add",
        window=[1, classes],
        padding=[(0, 0), (classes - 1, 0)],
    )
    valid = b.eq(seen, 0)
    b.note_bad_index(b.and_(valid, b.ge(target, classes)))
    shape = (*target.shape, classes)
    named = b.eq(b.iota(shape, 2), b.broadcast_to(b.unsqueeze(target, 2), shape))
    named = b.and_(named, b.broadcast_to(b.unsqueeze(valid, 2), shape))
    return valid, b.reduce(named, "or", [1])


def _label_distances(
    b: OpBuilder, rows: Value, target: Value, valid: Value, is_target: Value
) -> tuple[Value, Value]:
    """1 - x[label] + x[class] as (rows, labels, classes), and where it counts and is positive."""
    classes = rows.shape[1]
    shape = (*rows.shape, classes)
    label = b.select(valid, b.convert(target, torch.int64), 0)
    own = b.take_along(rows, 1, label)
    distance = b.add(b.sub(1, b.broadcast_to(b.unsqueeze(own, 2), shape)), _across(b, rows, shape))
    counts = b.and_(
        b.broadcast_to(b.unsqueeze(valid, 2), shape), _across(b, b.not_(is_target), shape)
    )
    return distance, b.and_(counts, b.gt(distance, 0))


def _across(b: OpBuilder, x: Value, shape: tuple[int, ...]) -> Value:
    """(rows, classes) over (rows, labels, classes)."""
    return b.broadcast_to(b.unsqueeze(x, 1), shape)


def _as_rows(b: OpBuilder, x: Value) -> Value:
    return x if x.rank == 2 else b.reshape(x, (1, x.numel))


@lower("aten.multilabel_margin_loss_forward", specs=_multilabel_specs)
def multilabel_margin_loss_forward(
    b: OpBuilder, x: Value, target: Value, reduction: int
) -> tuple[Value, Value]:
    """Returns (loss, 0/1 of the classes that are targets)."""
    rows = b.convert(_as_rows(b, x), opmath_dtype(x.dtype))
    target = _as_rows(b, target)
    valid, is_target = _label_mask(b, target, rows.shape[1])
    distance, active = _label_distances(b, rows, target, valid, is_target)
    losses = b.mul(b.reduce(b.select(active, distance, 0), "add", [1, 2]), 1.0 / rows.shape[1])
    if reduction == NONE:
        losses = b.reshape(losses, b.out_shape)
    shape, dtype = b.results[1]
    return reduced(b, losses, reduction), b.convert(b.reshape(is_target, shape), dtype)


@lower("aten.multilabel_margin_loss_backward", specs=_like_input)
def multilabel_margin_loss_backward(
    b: OpBuilder, grad: Value, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    rows = b.convert(_as_rows(b, x), opmath_dtype(x.dtype))
    target = _as_rows(b, target)
    count, classes = rows.shape
    valid, named = _label_mask(b, target, classes)
    _, active = _label_distances(b, rows, target, valid, named)
    ones = b.convert(active, rows.dtype)
    towards = b.reduce(ones, "add", [1])
    shape = (count, classes, classes)
    label = b.broadcast_to(b.unsqueeze(b.convert(target, torch.int64), 2), shape)
    here = b.eq(b.iota(shape, 2), label)
    per_label = b.broadcast_to(b.reduce(ones, "add", [2], keepdim=True), shape)
    away = b.reduce(b.select(here, per_label, 0), "add", [1])
    scale = 1.0 / classes / (count if reduction == MEAN else 1)
    grad = b.convert(grad, rows.dtype)
    grad = b.reshape(grad, (-1, 1) if grad.numel > 1 else (1, 1))
    out = b.mul(b.mul(b.sub(towards, away), scale), b.broadcast_to(grad, rows.shape))
    return b.convert(b.reshape(out, x.shape), b.out_dtype)
