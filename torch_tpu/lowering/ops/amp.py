"""Gradient scaling of automatic mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, opmath_dtype


@lower(
    "aten._amp_foreach_non_finite_check_and_unscale_",
    "aten._amp_foreach_non_finite_check_and_unscale",
)
def check_and_unscale(
    b: OpBuilder, grads: Sequence[Value], found_inf: Value, inv_scale: Value
) -> list[Value]:
    """Gradients times ``inv_scale``, and ``found_inf`` set to 1 if any was inf or NaN before."""
    scale = b.reshape(inv_scale, ())
    out = []
    clean: Value | None = None
    for grad in grads:
        wide = b.convert(grad, opmath_dtype(grad.dtype))
        finite = b.is_finite(wide)
        if finite.numel:
            good = b.reduce(finite, "and", range(finite.rank))
            clean = good if clean is None else b.and_(clean, good)
        factor = b.convert(scale, wide.dtype)
        # A scale of 1 changes nothing, NaN payloads and infinities included.
        scaled = b.select(b.eq(factor, 1.0), wide, b.mul(wide, factor))
        out.append(b.convert(scaled, grad.dtype))
    if clean is None:
        return [*out, found_inf]
    return [*out, b.select(clean, found_inf, 1.0)]


@lower(
    "aten._amp_update_scale_",
    "aten._amp_update_scale",
    operand=("scale_growth_factor", "scale_backoff_factor", "growth_interval"),
)
def update_scale(
    b: OpBuilder,
    scale: Value,
    tracker: Value,
    found_inf: Value,
    growth_factor: Operand,
    backoff_factor: Operand,
    growth_interval: Operand,
) -> list[Value]:
    """The next scale and growth tracker; growth that would overflow float32 is not taken."""
    bad = b.ne(b.reshape(found_inf, ()), 0.0)
    current, count = b.reshape(scale, ()), b.add(b.reshape(tracker, ()), 1)
    due = b.eq(count, b.as_value(growth_interval, tracker.dtype))
    grown = b.convert(
        b.mul(b.convert(current, torch.float64), b.as_value(growth_factor, torch.float64)),
        scale.dtype,
    )
    usable = b.and_(due, b.is_finite(grown))
    smaller = b.convert(
        b.mul(b.convert(current, torch.float64), b.as_value(backoff_factor, torch.float64)),
        scale.dtype,
    )
    new_scale = b.select(bad, smaller, b.select(usable, grown, current))
    new_count = b.select(b.or_(bad, due), 0, count)
    return [b.reshape(new_scale, scale.shape), b.reshape(new_count, tracker.shape)]
