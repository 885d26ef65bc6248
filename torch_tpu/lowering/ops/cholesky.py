"""Cholesky factorisation and triangular systems."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.matrices import (
    adjoint,
    as_batch,
    diagonal,
    eye,
    full_precision,
    tril,
)
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, real_dtype

_PANEL = 32


def refuse_check(op: str, check_errors: bool) -> None:
    """A program cannot raise on its own data: such a call is left to the host."""
    if check_errors:
        raise NotImplementedError(f"{op}: check_errors=True is not supported inside a program")


# -- factorisation ---------------------------------------------------------------------------


def cholesky_factor(b: OpBuilder, a: Value) -> Value:
    """L with a = L L^H from the lower triangle of ``a`` [batch, n, n]; NaN where that fails.

    Above 64 rows by panels: XLA:CPU's own factorisation goes row by row.
    """
    n = a.shape[-1]
    if n <= 64:
        return tril(b, b.cholesky(a))
    size = -(-n // _PANEL) * _PANEL
    extra = size - n
    a = b.pad(a, 0, [0, 0, 0], [0, extra, extra])
    if extra:
        tail = b.ge(b.iota(a.shape, 1, torch.int32), n)
        a = b.select(tail, eye(b, a.shape, a.dtype), a)
    batch = a.shape[0]

    def panel(step: Value, a: Value, factor: Value) -> list[Value]:
        at = b.mul(step, _PANEL)
        columns = b.dynamic_slice(a, [0, 0, at], [batch, size, _PANEL])
        corner = b.cholesky(b.dynamic_slice(columns, [0, at, 0], [batch, _PANEL, _PANEL]))
        corner = tril(b, corner)
        solved = b.triangular_solve(corner, columns, left=False, transpose="ADJOINT")
        below = b.ge(b.iota(solved.shape, 1, torch.int64), at)
        solved = b.dynamic_update_slice(b.select(below, solved, 0), corner, [0, at, 0])
        update = b.dot_general(solved, b.conj(solved), ([2], [2]), ([0], [0]))
        return [b.sub(a, update), b.dynamic_update_slice(factor, solved, [0, 0, at])]

    start = b.constant(0, a.dtype, a.shape)
    factor = b.fori(size // _PANEL, [a, start], panel)[1]
    return tril(b, b.slice(factor, [0, 0, 0], [batch, n, n]))


def _first_bad_minor(b: OpBuilder, a: Value) -> Value:
    """Order of the first leading minor of ``a`` that is not positive definite (i32), or 0."""
    batch, n, _ = a.shape
    real = real_dtype(a.dtype)

    def eliminate(k: Value, a: Value, info: Value) -> list[Value]:
        column = b.dynamic_slice(a, [0, 0, k], [batch, n, 1])
        pivot = b.reshape(b.real(b.dynamic_slice(column, [0, k, 0], [batch, 1, 1])), (batch,))
        good = b.gt(pivot, 0)
        order = b.convert(b.add(k, 1), torch.int32)
        first = b.and_(b.eq(info, 0), b.not_(good))
        info = b.select(first, b.broadcast_to(order, info.shape), info)
        rest = b.gt(b.iota(column.shape, 1, torch.int64), k)
        column = b.select(rest, column, 0)
        scale = b.broadcast_in_dim(b.div(b.constant(1, real, (batch,)), pivot), column.shape, [0])
        outer = b.dot_general(
            b.mul(column, b.convert(scale, column.dtype)), b.conj(column), ([2], [2]), ([0], [0])
        )
        return [b.sub(a, outer), info]

    return b.fori(n, [a, b.constant(0, torch.int32, (batch,))], eliminate)[1]


@lower("aten.linalg_cholesky_ex")
def linalg_cholesky_ex(
    b: OpBuilder, a: Value, upper: bool = False, check_errors: bool = False
) -> tuple[Value, Value]:
    refuse_check("linalg.cholesky_ex", check_errors)
    with full_precision(b):
        matrix = as_batch(b, a)
        if matrix.numel == 0:
            return a, b.constant(0, torch.int32, a.shape[:-2])
        matrix = tril(b, adjoint(b, matrix) if upper else matrix)
        factor = cholesky_factor(b, matrix)
        failed = b.reduce(b.is_nan(diagonal(b, factor)), "or", [0, 1])
        none = b.constant(0, torch.int32, (matrix.shape[0],))
        (info,) = b.if_(
            failed,
            lambda: _first_bad_minor(b, matrix),
            lambda: none,
            [(none.shape, torch.int32)],
        )
    factor = adjoint(b, factor) if upper else factor
    return b.reshape(factor, a.shape), b.reshape(info, a.shape[:-2])


# -- triangular systems ----------------------------------------------------------------------


def _solve_with_factor(b: OpBuilder, factor: Value, y: Value, upper: bool) -> Value:
    """x with (L L^H) x = y, or (U^H U) x = y."""
    first, second = ("ADJOINT", "NO_TRANSPOSE") if upper else ("NO_TRANSPOSE", "ADJOINT")
    half = b.triangular_solve(factor, y, lower=not upper, transpose=first)
    return b.triangular_solve(factor, half, lower=not upper, transpose=second)


@lower("aten.cholesky_solve", "aten._cholesky_solve_helper")
def cholesky_solve(b: OpBuilder, y: Value, factor: Value, upper: bool = False) -> Value:
    batch = b.out_shape[:-2]
    with full_precision(b):
        out = _solve_with_factor(b, as_batch(b, factor, batch), as_batch(b, y, batch), upper)
    return b.reshape(out, b.out_shape)


@lower("aten.cholesky_inverse")
def cholesky_inverse(b: OpBuilder, factor: Value, upper: bool = False) -> Value:
    matrix = as_batch(b, factor)
    with full_precision(b):
        out = _solve_with_factor(b, matrix, eye(b, matrix.shape, matrix.dtype), upper)
    return b.reshape(out, b.out_shape)


@lower("aten.linalg_solve_triangular")
def linalg_solve_triangular(
    b: OpBuilder,
    a: Value,
    y: Value,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Value:
    batch = b.out_shape[:-2]
    with full_precision(b):
        out = b.triangular_solve(
            as_batch(b, a, batch),
            as_batch(b, y, batch),
            left=left,
            lower=not upper,
            unit_diagonal=unitriangular,
        )
    return b.reshape(out, b.out_shape)


@lower("aten.triangular_solve")
def triangular_solve(
    b: OpBuilder,
    y: Value,
    a: Value,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Value, Value]:
    (shape, _), (a_shape, _) = b.results
    batch = shape[:-2]
    with full_precision(b):
        out = b.triangular_solve(
            as_batch(b, a, batch),
            as_batch(b, y, batch),
            lower=not upper,
            unit_diagonal=unitriangular,
            transpose="TRANSPOSE" if transpose else "NO_TRANSPOSE",
        )
    return b.reshape(out, shape), b.broadcast_to(a, a_shape)
