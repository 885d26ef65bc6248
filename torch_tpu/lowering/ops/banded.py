"""Products with matrices that are mostly zero, along one dim: resizing, adaptive averages.

A matrix product multiplies zeros too, and zero times an infinity or a NaN is NaN: one such element
would reach every result. So finite tensors are multiplied, others go through what reads only where
the matrix is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.types import Value


def banded_product(
    b: OpBuilder,
    x: Value,
    dim: int,
    matrix: Value,
    side: int,
    product: Callable[[], Value],
    reading: Callable[[], Value] | None = None,
) -> Value:
    """``product()``, which contracts x's ``dim`` with the matrix's ``side``, for a finite ``x``.

    ``reading()`` is the same through the elements that are read; by default a masked sum.
    """
    if not x.is_float:
        return product()
    shape = (*x.shape[:dim], matrix.shape[1 - side], *x.shape[dim + 1 :])
    finite = b.reduce(b.is_finite(x), "and", range(x.rank))
    apart = reading or (lambda: _masked_sum(b, x, dim, matrix, side))
    (out,) = b.if_(finite, lambda: [product()], lambda: [apart()], [(shape, x.dtype)])
    return out


def _masked_sum(b: OpBuilder, x: Value, dim: int, matrix: Value, side: int) -> Value:
    """Sum over ``dim`` of x times the matrix, without the terms whose factor is zero."""
    lead, tail = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    size, out = x.shape[dim], matrix.shape[1 - side]
    grid = (lead, size, out, tail)
    values = b.broadcast_in_dim(b.reshape(x, (lead, size, tail)), grid, [0, 1, 3])
    factors = b.broadcast_in_dim(matrix, grid, [1, 2] if side == 0 else [2, 1])
    terms = b.select(b.eq(factors, 0), 0, b.mul(values, factors))
    return b.reshape(b.reduce(terms, "add", [1]), (*x.shape[:dim], out, *x.shape[dim + 1 :]))
