"""Fused optimiser steps: one program updates every parameter of a group.

Results are the new values of the written lists, flattened in schema order. Learning rate, decay
and momenta are operands. As on CUDA, ``found_inf == 1`` leaves everything as it was, and gradients
divided by ``grad_scale`` are written back. The caller has already incremented the step counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype

_DOUBLE = torch.float64


def _lists(count: int) -> Callable[..., list[tuple[tuple[int, ...], torch.dtype]]]:
    """The results look like the first ``count`` lists (most overloads have no meta kernel)."""
    return lambda *values: [(v.shape, v.dtype) for column in values[:count] for v in column]


class _Step:
    """What the members of one fused step share: unscaling, skipping and rounding."""

    def __init__(
        self, b: OpBuilder, maximize: bool, grad_scale: Value | None, found_inf: Value | None
    ) -> None:
        self.b = b
        self.maximize = maximize
        self.scale = None if grad_scale is None else b.reshape(grad_scale, ())
        self.skip = None if found_inf is None else b.eq(b.reshape(found_inf, ()), 1.0)

    def number(self, x: Operand) -> Value:
        """A hyper-parameter in double precision, in which PyTorch computes its scalars."""
        x = self.b.as_value(x, _DOUBLE)
        return self.b.reshape(x, ())

    def corrections(self, beta: Operand, steps: Sequence[Value], dtype: torch.dtype) -> list[Value]:
        """1 - beta ** step for each counter: -expm1(step * log(beta)) over all counters at once,
        which is as good in float32 as a power in double precision."""
        b = self.b
        log = b.log1p(b.convert(b.sub(self.number(beta), 1.0), dtype))
        counts = b.stack([b.reshape(b.convert(s, dtype), ()) for s in steps], 0)
        values = b.neg(b.expm1(b.mul(counts, log)))
        return [b.index_dim(values, 0, i) for i in range(len(steps))]

    def wide(self, x: Value) -> Value:
        return self.b.convert(x, opmath_dtype(x.dtype))

    def gradient(self, grad: Value) -> tuple[Value, Value]:
        """The gradient to step along (compute dtype) and the one to write back."""
        wide, stored = self.wide(grad), grad
        if self.scale is not None:
            wide = self.b.div(wide, self.b.convert(self.scale, wide.dtype))
            stored = self.keep(grad, wide)
        return (self.b.neg(wide) if self.maximize else wide), stored

    def decayed(self, grad: Value, param: Value, weight_decay: Value) -> Value:
        """grad + weight_decay * param; without decay an infinite parameter adds nothing."""
        b = self.b
        rate = b.convert(weight_decay, grad.dtype)
        return b.select(b.ne(rate, 0.0), b.add(grad, b.mul(param, rate)), grad)

    def keep(self, old: Value, new: Value) -> Value:
        """``new`` rounded to the dtype of ``old``, or ``old`` when the step is skipped."""
        new = self.b.convert(new, old.dtype)
        return new if self.skip is None else self.b.select(self.skip, old, new)


def _adam(
    b: OpBuilder,
    decoupled: bool,
    lists: Sequence[Sequence[Value]],
    steps: Sequence[Value],
    lr: Operand,
    betas: tuple[Operand, Operand],
    weight_decay: Operand,
    eps: Operand,
    amsgrad: bool,
    step: _Step,
) -> list[Value]:
    params, grads, firsts, seconds, maxima = lists
    rate, beta1, beta2, decay, tiny = (
        step.number(x) for x in (lr, betas[0], betas[1], weight_decay, eps)
    )
    out: list[list[Value]] = [[], [], [], [], []]
    double = any(p.dtype is _DOUBLE for p in params)
    exact = _DOUBLE if double else torch.float32
    corrections1 = step.corrections(beta1, steps, exact)
    corrections2 = [b.sqrt(c) for c in step.corrections(beta2, steps, exact)]
    for i, param in enumerate(params):
        p = step.wide(param)
        work = p.dtype
        g, stored = step.gradient(grads[i])
        g = b.convert(g, work)
        root2 = b.convert(corrections2[i], work)
        if decoupled:
            shrunk = b.mul(p, b.convert(b.sub(1.0, b.mul(rate, decay)), work))
            p = b.select(b.ne(decay, 0.0), shrunk, p)
        else:
            g = step.decayed(g, p, decay)
        first, second = (b.convert(s[i], work) for s in (firsts, seconds))
        first = b.add(first, b.mul(b.sub(g, first), b.convert(b.sub(1.0, beta1), work)))
        squared = b.mul(b.mul(g, g), b.convert(b.sub(1.0, beta2), work))
        second = b.add(b.mul(second, b.convert(beta2, work)), squared)
        largest = second
        if amsgrad:
            largest = b.maximum(b.convert(maxima[i], work), second)
            out[4].append(step.keep(maxima[i], largest))
        denominator = b.add(b.div(b.sqrt(largest), root2), b.convert(tiny, work))
        size = b.convert(b.div(b.convert(rate, exact), corrections1[i]), work)
        p = b.sub(p, b.div(b.mul(first, size), denominator))
        out[0].append(step.keep(param, p))
        out[1].append(stored)
        out[2].append(step.keep(firsts[i], first))
        out[3].append(step.keep(seconds[i], second))
    if not amsgrad:
        out[4] = list(maxima)
    return [value for column in out for value in column]


_ADAM_OPERANDS = ("lr", "beta1", "beta2", "weight_decay", "eps")


def _register_adam(op: str, decoupled: bool) -> None:
    @lower(
        f"aten.{op}_",
        f"aten.{op}",
        operand=_ADAM_OPERANDS,
        specs=_lists(5),
    )
    def fused(
        b: OpBuilder,
        params: Sequence[Value],
        grads: Sequence[Value],
        exp_avgs: Sequence[Value],
        exp_avg_sqs: Sequence[Value],
        max_exp_avg_sqs: Sequence[Value],
        state_steps: Sequence[Value],
        *,
        lr: Operand,
        beta1: Operand,
        beta2: Operand,
        weight_decay: Operand,
        eps: Operand,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Value | None = None,
        found_inf: Value | None = None,
    ) -> list[Value]:
        step = _Step(b, maximize, grad_scale, found_inf)
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        betas = (beta1, beta2)
        return _adam(b, decoupled, lists, state_steps, lr, betas, weight_decay, eps, amsgrad, step)


_register_adam("_fused_adam", decoupled=False)
_register_adam("_fused_adamw", decoupled=True)


@lower(
    "aten._fused_sgd_",
    "aten._fused_sgd",
    operand=("lr", "weight_decay", "momentum", "dampening"),
    specs=_lists(3),
)
def fused_sgd(
    b: OpBuilder,
    params: Sequence[Value],
    grads: Sequence[Value],
    buffers: Sequence[Value],
    *,
    weight_decay: Operand,
    momentum: Operand,
    lr: Operand,
    dampening: Operand,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Value | None = None,
    found_inf: Value | None = None,
) -> list[Value]:
    """Momentum is off exactly when there are no momentum buffers."""
    step = _Step(b, maximize, grad_scale, found_inf)
    rate, decay, inertia, damping = (
        step.number(x) for x in (lr, weight_decay, momentum, dampening)
    )
    out: list[list[Value]] = [[], [], []]
    for i, param in enumerate(params):
        p = step.wide(param)
        work = p.dtype
        g, stored = step.gradient(grads[i])
        g = step.decayed(b.convert(g, work), p, decay)
        if buffers:
            pull = b.convert(inertia, work)
            buffer = g
            if not is_first_step:
                fresh = b.mul(g, b.convert(b.sub(1.0, damping), work))
                buffer = b.add(b.mul(b.convert(buffers[i], work), pull), fresh)
            g = b.add(g, b.mul(buffer, pull)) if nesterov else buffer
            out[2].append(step.keep(buffers[i], buffer))
        out[0].append(step.keep(param, b.sub(p, b.mul(g, b.convert(rate, work)))))
        out[1].append(stored)
    return [value for column in out for value in column]


_ADAGRAD_OPERANDS = ("lr", "lr_decay", "weight_decay", "eps")


@lower(
    "aten._fused_adagrad_.default",
    "aten._fused_adagrad.default",
    operand=_ADAGRAD_OPERANDS,
    specs=_lists(4),
)
@lower(
    "aten._fused_adagrad_.tensor_lr",
    "aten._fused_adagrad.tensor_lr",
    operand=_ADAGRAD_OPERANDS,
    specs=_lists(3),
)
def fused_adagrad(
    b: OpBuilder,
    params: Sequence[Value],
    grads: Sequence[Value],
    state_sums: Sequence[Value],
    state_steps: Sequence[Value],
    *,
    lr: Operand,
    lr_decay: Operand,
    weight_decay: Operand,
    eps: Operand,
    maximize: bool,
    grad_scale: Value | None = None,
    found_inf: Value | None = None,
) -> list[Value]:
    step = _Step(b, maximize, grad_scale, found_inf)
    rate, slowing, decay, tiny = (step.number(x) for x in (lr, lr_decay, weight_decay, eps))
    out: list[list[Value]] = [[], [], []]
    for i, param in enumerate(params):
        p = step.wide(param)
        work = p.dtype
        g, stored = step.gradient(grads[i])
        g = step.decayed(b.convert(g, work), p, decay)
        elapsed = b.sub(step.number(state_steps[i]), 1.0)
        size = b.convert(b.div(rate, b.add(b.mul(elapsed, slowing), 1.0)), work)
        total = b.add(b.convert(state_sums[i], work), b.mul(g, g))
        denominator = b.add(b.sqrt(total), b.convert(tiny, work))
        out[0].append(step.keep(param, b.sub(p, b.div(b.mul(g, size), denominator))))
        out[1].append(stored)
        out[2].append(step.keep(state_sums[i], total))
    values = [value for column in out for value in column]
    # One overload's schema counts the step counters among the written: they come back as is.
    return values if len(values) == len(b.results) else [*values, *state_steps]
