"""Tolerances from dtype, matmul precision and contraction length, and reports of differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_tpu.tpu.numerics import Precision, current_precision

# Bits of the significand that a float32 product keeps, by passes.
_BITS = {Precision.DEFAULT: 8, Precision.HIGH: 16, Precision.HIGHEST: 24}


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol |expected|."""

    rtol: float
    atol: float


def tolerance(
    dtype: torch.dtype,
    *,
    contraction: int = 1,
    precision: Precision | None = None,
    scale: float = 1.0,
) -> Tolerance:
    """How far results that round differently may be apart.

    dtype        of the result
    contraction  number of products that each element is a sum of (a matmul's inner size); 1 for
                 elementwise work
    precision    of float32 matmuls; default: the current one. Counts only where contraction > 1
    scale        size of a typical product, for the absolute part

    A sum of n products whose rounding errors u are independent is off by about u sqrt(n) times a
    product (Higham, "Accuracy and Stability of Numerical Algorithms", section 2.8); the factor 8
    covers the largest of many elements.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    unit = torch.finfo(dtype).eps / 2
    if contraction <= 1:
        return Tolerance(8 * unit, 8 * unit * scale)
    if dtype in (torch.float64, torch.complex128):
        product = unit
    else:
        bits = _BITS[precision or current_precision()]
        product = 2.0**-bits
    error = 8 * (product * math.sqrt(contraction) * 2 + unit)
    return Tolerance(8 * (product + unit), error * scale)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    contraction: int = 1,
    precision: Precision | None = None,
    scale: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    msg: str = "",
) -> None:
    """Assert that tensors, or structures of them, agree within :func:`tolerance`.

    scale  of a typical product; default: the root mean square of ``expected`` over
           sqrt(contraction). rtol, atol override the tolerance.

    Devices may differ. Raises AssertionError that says where and how they differ: how many
    elements, the worst one with its index, error sizes, and what kind of difference it looks like.
    """
    mine, spec = pytree.tree_flatten(actual)
    theirs, other = pytree.tree_flatten(expected)
    if len(mine) != len(theirs) or str(spec) != str(other):
        raise AssertionError(f"structures differ: got {spec}; expected {other}")
    for n, (a, e) in enumerate(zip(mine, theirs, strict=True)):
        where = f"item {n}: " if len(mine) > 1 else ""
        if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
            if isinstance(a, torch.Tensor) != isinstance(e, torch.Tensor) or a != e:
                raise AssertionError(f"{where}got {a!r}; expected {e!r}")
            continue
        problem = _difference(a, e, contraction, precision, scale, rtol, atol, equal_nan)
        if problem:
            raise AssertionError(where + problem + (f"\n{msg}" if msg else ""))


def _difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    contraction: int,
    precision: Precision | None,
    scale: float | None,
    rtol: float | None,
    atol: float | None,
    equal_nan: bool,
) -> str:
    """What is wrong; "" if nothing is."""
    if actual.shape != expected.shape:
        return f"shapes differ: got {tuple(actual.shape)}; expected {tuple(expected.shape)}"
    if actual.dtype is not expected.dtype:
        return f"dtypes differ: got {actual.dtype}; expected {expected.dtype}"
    if actual.numel() == 0:
        return ""
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    a, e = actual.detach().cpu().to(wide), expected.detach().cpu().to(wide)
    if scale is None:
        finite = e[torch.isfinite(e)].abs()
        size = finite.square().mean().sqrt().item() if finite.numel() else 1.0
        scale = (size or 1.0) / math.sqrt(max(contraction, 1))
    bound = tolerance(actual.dtype, contraction=contraction, precision=precision, scale=scale)
    relative = bound.rtol if rtol is None else rtol
    absolute = bound.atol if atol is None else atol
    same = a == e
    if equal_nan:
        same |= torch.isnan(a) & torch.isnan(e)
    error = (a - e).abs()
    allowed = absolute + relative * e.abs()
    bad = ~same & ~(torch.isfinite(e) & (error <= allowed))
    count = int(bad.sum())
    if not count:
        return ""
    excess = torch.where(bad, torch.nan_to_num(error / allowed, nan=math.inf), -1.0)
    flat = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    ratio = error[index] / allowed[index]
    lines = [
        f"{count} of {a.numel()} elements differ ({count / a.numel():.1%})",
        f"  worst at {index}: got {actual[index].item()!r}; expected {expected[index].item()!r}",
        f"  error {error[index].item():.3g}, {ratio.item():.3g} times what is allowed "
        f"({absolute:.3g} + {relative:.3g} x |expected|)",
    ]
    finite = torch.isfinite(error)
    if finite.any():
        top = error[finite].max().item()
        root = error[finite].square().mean().sqrt().item()
        lines.append(f"  over all: largest error {top:.3g}, root mean square {root:.3g}")
    lines += [f"  {hint}" for hint in _hints(a, e, bad, error)]
    return "\n".join(lines)


def _hints(a: torch.Tensor, e: torch.Tensor, bad: torch.Tensor, error: torch.Tensor) -> list[str]:
    """What the difference looks like."""
    out = []
    nans, more = (
        int((torch.isnan(a) & ~torch.isnan(e)).sum()),
        int((torch.isnan(e) & ~torch.isnan(a)).sum()),
    )
    if nans or more:
        out.append(f"NaN only in what was got: {nans}; only in what was expected: {more}")
    rows = [d for d in range(a.dim()) if a.shape[d] > 1]
    for d in rows:
        places = bad.any(dim=tuple(k for k in range(a.dim()) if k != d)) if a.dim() > 1 else bad
        hit = int(places.sum())
        if 0 < hit <= max(1, a.shape[d] // 8):
            first = places.nonzero().flatten()[:4].tolist()
            out.append(f"only at {hit} of {a.shape[d]} positions of dim {d}: {first}")
    if a.dim() == 2 and a.shape[0] == a.shape[1] and torch.allclose(a, e.T):
        out.append("it is the transpose of what was expected")
    sizes = e.abs()
    typical = (error[bad] / sizes[bad].clamp_min(1e-300)).median().item() if bad.any() else 0.0
    if 2.0**-11 < typical < 2.0**-6:
        out.append(
            f"typical relative error {typical:.2g}: the size of bfloat16 rounding (2^-9); is one "
            "side at a lower matmul precision?"
        )
    elif abs(typical - 2.0) < 1e-3:
        out.append("signs are opposite")
    return out
