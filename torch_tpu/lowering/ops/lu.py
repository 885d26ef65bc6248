"""LU factorisation with partial pivoting and what rests on it: solve, inverse, determinants.

XLA has no LU operation on every target, so it is a program: panels of columns are eliminated one
column at a time in a loop, and the columns to their right are updated by matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.cholesky import refuse_check
from torch_tpu.lowering.ops.matrices import (
    adjoint,
    as_batch,
    diagonal,
    eye,
    full_precision,
    inverse_permutation,
    permute_rows,
    transposed,
    tril,
    triu,
)
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value

_SINGLE_PANEL = 64
_PANEL = 32


@dataclass(frozen=True)
class Factors:
    """L and U packed [batch, m, n]; 1-based pivots [batch, min(m, n)]; the row order
    [batch, m] (``a[order] = L U``); LAPACK's info [batch]. Integers are i32."""

    lu: Value
    pivots: Value
    order: Value
    info: Value


def _pick_row(b: OpBuilder, x: Value, row: Value) -> Value:
    """Row ``row[i]`` of matrix i, as [batch, 1, n]."""
    at = b.iota(x.shape, 1, row.dtype)
    chosen = b.eq(at, b.broadcast_in_dim(row, x.shape, [0]))
    return b.reduce(b.select(chosen, x, 0), "add", [1], keepdim=True)


def _exchange(b: OpBuilder, x: Value, at: Value, p: Value, q: Value) -> Value:
    """Swap the entries (rows) ``p`` and ``q`` of ``x``; ``at`` counts along dim 1."""
    shape = x.shape
    spread = [b.broadcast_in_dim(v, shape, [0]) for v in (p, q)]
    first, second = (b.broadcast_to(_pick_row(b, x, v), shape) for v in (p, q))
    swapped = b.select(b.eq(at, spread[1]), first, x)
    return b.select(b.eq(at, spread[0]), second, swapped)


def _magnitude(b: OpBuilder, x: Value) -> Value:
    """What LAPACK compares when it looks for a pivot."""
    return b.add(b.abs(b.real(x)), b.abs(b.imag(x))) if x.is_complex else b.abs(x)


def _eliminate(b: OpBuilder, a: Value, columns: int, offset: Operand, pivot: bool) -> Factors:
    """Factor the first ``columns`` columns of ``a`` [batch, m, n], updating all of them.

    The pivot of column ``j`` goes to row ``offset + j``; rows above stay as they are.
    """
    batch, m, n = a.shape
    rows = b.iota((batch, m, 1), 1, torch.int32)
    if 0 in (batch, columns):
        return Factors(
            a,
            b.constant(0, torch.int32, (batch, columns)),
            b.reshape(rows, (batch, m)),
            b.constant(0, torch.int32, (batch,)),
        )

    def column_step(
        step: Value, offset: Value, a: Value, pivots: Value, order: Value, info: Value
    ) -> list[Value]:
        line = b.add(offset, step)
        k = b.broadcast_to(b.convert(line, torch.int32), (batch,))
        at = b.iota(a.shape, 1, torch.int32)
        column = b.dynamic_slice(a, [0, 0, step], [batch, m, 1])
        row = b.iota(column.shape, 1, torch.int32)
        spread_k = b.broadcast_in_dim(k, column.shape, [0])
        if pivot:
            size = b.select(b.ge(row, spread_k), _magnitude(b, column), -1)
            best = b.reduce(size, "max", [1], keepdim=True)
            hit = b.and_(b.or_(b.eq(size, best), b.is_nan(size)), b.ge(row, spread_k))
            chosen = b.reshape(b.reduce(b.select(hit, row, m), "min", [1]), (batch,))
        else:
            chosen = k
        a = _exchange(b, a, at, k, chosen)
        order = _exchange(b, order, b.iota(order.shape, 1, torch.int32), k, chosen)
        top = b.dynamic_slice(a, [0, line, 0], [batch, 1, n])
        column = b.dynamic_slice(a, [0, 0, step], [batch, m, 1])
        head = b.dynamic_slice(top, [0, 0, step], [batch, 1, 1])
        singular = b.eq(head, 0)
        divisor = b.broadcast_to(b.select(singular, 1, head), column.shape)
        factor = b.select(b.gt(row, spread_k), b.div(column, divisor), 0)
        update = b.mul(b.broadcast_to(factor, a.shape), b.broadcast_to(top, a.shape))
        across = b.iota(a.shape, 2, torch.int32)
        here = b.broadcast_to(b.convert(step, torch.int32), a.shape)
        below = b.gt(at, b.broadcast_in_dim(k, a.shape, [0]))
        a = b.select(b.and_(below, b.gt(across, here)), b.sub(a, update), a)
        a = b.select(b.and_(below, b.eq(across, here)), b.broadcast_to(factor, a.shape), a)
        first = b.and_(b.reshape(singular, (batch,)), b.eq(info, 0))
        info = b.select(first, b.add(k, 1), info)
        record = b.reshape(b.add(chosen, 1), (batch, 1))
        return [offset, a, b.dynamic_update_slice(pivots, record, [0, step]), order, info]

    state = [
        b.as_value(offset, torch.int64),
        a,
        b.constant(0, torch.int32, (batch, columns)),
        rows,
        b.constant(0, torch.int32, (batch,)),
    ]
    _, a, pivots, order, info = b.fori(columns, state, column_step)
    return Factors(a, pivots, b.reshape(order, (batch, m)), info)


def _panel_step(b: OpBuilder, done: Factors, at: Operand, width: int, pivot: bool) -> Factors:
    """Factor the ``width`` columns from ``at`` on and update those to their right."""
    batch, m, n = done.lu.shape
    columns = b.dynamic_slice(done.lu, [0, 0, at], [batch, m, width])
    panel = _eliminate(b, columns, width, at, pivot)
    a = b.dynamic_update_slice(permute_rows(b, done.lu, panel.order), panel.lu, [0, 0, at])
    corner = b.dynamic_slice(panel.lu, [0, at, 0], [batch, width, width])
    band = b.dynamic_slice(a, [0, at, 0], [batch, width, n])
    end = b.add(b.as_value(at, torch.int64), width)
    right = b.ge(b.iota(band.shape, 2), end)
    top = b.triangular_solve(corner, band, unit_diagonal=True)
    a = b.dynamic_update_slice(a, b.select(right, top, band), [0, at, 0])
    left = b.select(b.ge(b.iota(panel.lu.shape, 1), end), panel.lu, 0)
    a = b.sub(a, b.matmul(left, b.select(right, top, 0)))
    order = b.unsqueeze(done.order, 2)
    fresh = b.eq(done.info, 0)
    return Factors(
        a,
        b.dynamic_update_slice(done.pivots, panel.pivots, [0, at]),
        b.squeeze(permute_rows(b, order, panel.order), 2),
        b.select(fresh, panel.info, done.info),
    )


def factor(b: OpBuilder, a: Value, pivot: bool = True) -> Factors:
    """LU of ``a`` [batch, m, n], right-looking by panels when min(m, n) is above 64.

    All full panels share one loop body, so that the program does not grow with the matrix.
    """
    batch, m, n = a.shape
    k = min(m, n)
    if k <= _SINGLE_PANEL:
        return _eliminate(b, a, k, 0, pivot)

    def next_panel(step: Value, *state: Value) -> list[Value]:
        out = _panel_step(b, Factors(*state), b.mul(step, _PANEL), _PANEL, pivot)
        return [out.lu, out.pivots, out.order, out.info]

    state = [
        a,
        b.constant(0, torch.int32, (batch, k)),
        b.iota((batch, m), 1, torch.int32),
        b.constant(0, torch.int32, (batch,)),
    ]
    out = Factors(*b.fori(k // _PANEL, state, next_panel))
    rest = k % _PANEL
    return _panel_step(b, out, k - rest, rest, pivot) if rest else out


def order_of(b: OpBuilder, pivots: Value, rows: int) -> Value:
    """The row order [batch, rows] that LAPACK's successive exchanges amount to."""
    batch, k = pivots.shape

    def swap(step: Value, order: Value, pivots: Value) -> list[Value]:
        chosen = b.sub(b.reshape(b.dynamic_slice(pivots, [0, step], [batch, 1]), (batch,)), 1)
        here = b.broadcast_to(b.convert(step, torch.int32), (batch,))
        return [_exchange(b, order, b.iota(order.shape, 1, torch.int32), here, chosen), pivots]

    start = b.iota((batch, rows, 1), 1, torch.int32)
    return b.reshape(b.fori(k, [start, pivots], swap)[0], (batch, rows))


def _permutation(b: OpBuilder, order: Value, dtype: torch.dtype) -> Value:
    """P with a = P (a[order])."""
    shape = (*order.shape, order.shape[1])
    hit = b.eq(b.iota(shape, 1, torch.int32), b.broadcast_in_dim(order, shape, [0, 2]))
    return b.convert(hit, dtype)


def _unpack(b: OpBuilder, lu: Value) -> tuple[Value, Value]:
    _, m, n = lu.shape
    k = min(m, n)
    left = tril(b, b.slice_dim(lu, 2, 0, k), -1)
    return b.add(left, eye(b, left.shape, lu.dtype)), triu(b, b.slice_dim(lu, 1, 0, k))


def lu_solve(b: OpBuilder, lu: Value, order: Value, y: Value, adjoint_system: bool) -> Value:
    """x with a x = y, or a^H x = y, for the factors of a square ``a``."""
    if y.numel == 0:
        return y
    if not adjoint_system:
        half = b.triangular_solve(lu, permute_rows(b, y, order), unit_diagonal=True)
        return b.triangular_solve(lu, half, lower=False)
    half = b.triangular_solve(lu, y, lower=False, transpose="ADJOINT")
    half = b.triangular_solve(lu, half, unit_diagonal=True, transpose="ADJOINT")
    return permute_rows(b, half, inverse_permutation(b, order))


# -- the ops ---------------------------------------------------------------------------------


@lower("aten.linalg_lu_factor_ex")
def linalg_lu_factor_ex(
    b: OpBuilder, a: Value, pivot: bool = True, check_errors: bool = False
) -> tuple[Value, Value, Value]:
    refuse_check("linalg.lu_factor_ex", check_errors)
    with full_precision(b):
        out = factor(b, as_batch(b, a), pivot)
    parts = (out.lu, out.pivots, out.info)
    return tuple(b.reshape(v, s) for v, (s, _) in zip(parts, b.results, strict=True))  # type: ignore


@lower("aten.linalg_lu")
def linalg_lu(b: OpBuilder, a: Value, pivot: bool = True) -> tuple[Value, Value, Value]:
    with full_precision(b):
        out = factor(b, as_batch(b, a), pivot)
    left, right = _unpack(b, out.lu)
    swaps = _permutation(b, out.order, a.dtype)
    shapes = [s for s, _ in b.results]
    first = b.reshape(swaps, shapes[0]) if pivot else b.constant(0, a.dtype, shapes[0])
    return first, b.reshape(left, shapes[1]), b.reshape(right, shapes[2])


@lower("aten.lu_unpack")
def lu_unpack(
    b: OpBuilder,
    lu: Value,
    pivots: Value,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Value, Value, Value]:
    shapes = [s for s, _ in b.results]
    parts = [b.constant(0, lu.dtype, s) for s in shapes]
    if unpack_pivots:
        rows = b.reshape(pivots, (parts[0].numel // lu.shape[-2] ** 2, pivots.shape[-1]))
        order = order_of(b, b.convert(rows, torch.int32), lu.shape[-2])
        parts[0] = b.reshape(_permutation(b, order, lu.dtype), shapes[0])
    if unpack_data:
        left, right = _unpack(b, as_batch(b, lu))
        parts[1:] = [b.reshape(left, shapes[1]), b.reshape(right, shapes[2])]
    return parts[0], parts[1], parts[2]


def _solve_either_side(
    b: OpBuilder, lu: Value, order: Value, y: Value, left: bool, adjoint_system: bool
) -> Value:
    """As :func:`lu_solve`; the right-hand system x a = y is the left one of the adjoints."""
    if left:
        return lu_solve(b, lu, order, y, adjoint_system)
    return adjoint(b, lu_solve(b, lu, order, adjoint(b, y), not adjoint_system))


@lower("aten.linalg_lu_solve")
def linalg_lu_solve(
    b: OpBuilder,
    lu: Value,
    pivots: Value,
    y: Value,
    left: bool = True,
    adjoint: bool = False,
) -> Value:
    batch = b.out_shape[:-2]
    n = lu.shape[-1]
    with full_precision(b):
        rows = b.reshape(b.broadcast_to(pivots, (*batch, n)), (-1, n))
        order = order_of(b, b.convert(rows, torch.int32), n)
        packed, target = as_batch(b, lu, batch), as_batch(b, y, batch)
        out = _solve_either_side(b, packed, order, target, left, adjoint)
    return b.reshape(out, b.out_shape)


@lower("aten._linalg_solve_ex")
def linalg_solve_ex(
    b: OpBuilder, a: Value, y: Value, left: bool = True, check_errors: bool = False
) -> tuple[Value, Value, Value, Value]:
    refuse_check("linalg.solve_ex", check_errors)
    (shape, _), (lu_shape, _), (pivots_shape, _), (info_shape, _) = b.results
    vector = y.rank == 1 or (a.rank - 1 == y.rank and y.shape == a.shape[:-1])
    full = (*shape, 1) if vector else shape
    target = b.unsqueeze(y, -1) if vector else y
    with full_precision(b):
        out = factor(b, as_batch(b, a))
        lu, order = out.lu, out.order
        if full[:-2] != a.shape[:-2]:
            lu = as_batch(b, b.reshape(lu, a.shape), full[:-2])
            rows = b.broadcast_to(
                b.reshape(order, (*a.shape[:-2], a.shape[-1])), (*full[:-2], a.shape[-1])
            )
            order = b.reshape(rows, lu.shape[:2])
        solved = _solve_either_side(b, lu, order, as_batch(b, target, full[:-2]), left, False)
    return (
        b.reshape(solved, shape),
        b.reshape(out.lu, lu_shape),
        b.reshape(out.pivots, pivots_shape),
        b.reshape(out.info, info_shape),
    )


@lower("aten.linalg_inv_ex")
def linalg_inv_ex(b: OpBuilder, a: Value, check_errors: bool = False) -> tuple[Value, Value]:
    refuse_check("linalg.inv_ex", check_errors)
    with full_precision(b):
        matrix = as_batch(b, a)
        out = factor(b, matrix)
        inverse = lu_solve(b, out.lu, out.order, eye(b, matrix.shape, a.dtype), False)
    return b.reshape(inverse, a.shape), b.reshape(out.info, a.shape[:-2])


def _takes_transpose(b: OpBuilder, a: Value) -> bool:
    """Whether PyTorch's determinants factor the transpose of ``a``; their backward relies on it."""
    return not a.is_complex and a.name not in b.strided


def _sign_of_order(b: OpBuilder, pivots: Value, dtype: torch.dtype) -> Value:
    """-1 for an odd number of exchanges, else 1; [batch]."""
    at = b.add(b.iota(pivots.shape, 1, torch.int32), 1)
    swaps = b.reduce(b.convert(b.ne(pivots, at), torch.int32), "add", [1])
    odd = b.ne(b.and_(swaps, 1), 0)
    return b.select(odd, b.constant(-1, dtype), b.constant(1, dtype))


@lower("aten._linalg_det")
def linalg_det(b: OpBuilder, a: Value) -> tuple[Value, Value, Value]:
    with full_precision(b):
        matrix = as_batch(b, a)
        out = factor(b, transposed(b, matrix) if _takes_transpose(b, a) else matrix)
    product = b.reduce(diagonal(b, out.lu), "mul", [1])
    value = b.mul(product, _sign_of_order(b, out.pivots, a.dtype))
    parts = (value, out.lu, out.pivots)
    return tuple(b.reshape(v, s) for v, (s, _) in zip(parts, b.results, strict=True))  # type: ignore


@lower("aten._linalg_slogdet")
def linalg_slogdet(b: OpBuilder, a: Value) -> tuple[Value, Value, Value, Value]:
    with full_precision(b):
        matrix = as_batch(b, a)
        out = factor(b, transposed(b, matrix) if _takes_transpose(b, a) else matrix)
    entries = diagonal(b, out.lu)
    size = b.abs(entries)
    if a.is_complex:
        zero = b.eq(size, 0)
        phase = b.div(entries, b.convert(b.select(zero, 1, size), a.dtype))
        unit = b.select(zero, 0, phase)
    else:
        unit = b.sign(entries)
    sign = b.mul(b.reduce(unit, "mul", [1]), _sign_of_order(b, out.pivots, a.dtype))
    log = b.reduce(b.log(size), "add", [1])
    parts = (sign, log, out.lu, out.pivots)
    return tuple(b.reshape(v, s) for v, (s, _) in zip(parts, b.results, strict=True))  # type: ignore
