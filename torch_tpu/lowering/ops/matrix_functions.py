"""Functions of matrices: exponential, least squares."""

from __future__ import annotations

import math

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.matrices import adjoint, as_batch, eye, full_precision, triu
from torch_tpu.lowering.ops.qr import orthogonal, reflectors
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value

# The 1-norm up to which 20 terms of the exponential series are exact to rounding.
_SERIES_RADIUS = {torch.float32: 3.0, torch.float64: 1.0}


def _series(b: OpBuilder, a: Value) -> Value:
    """The exponential series of ``a`` [batch, n, n] up to degree 19, with seven products
    (Paterson and Stockmeyer, 1973)."""
    powers = [eye(b, a.shape, a.dtype), a]
    for _ in range(4):
        powers.append(b.matmul(powers[-1], a))
    total: Value | None = None
    for block in (3, 2, 1, 0):
        part = b.mul(powers[0], 1.0 / math.factorial(5 * block))
        for i in range(1, 5):
            part = b.add(part, b.mul(powers[i], 1.0 / math.factorial(5 * block + i)))
        total = part if total is None else b.add(part, b.matmul(total, powers[5]))
    assert total is not None
    return total


def _power_of_two(b: OpBuilder, exponent: Value) -> Value:
    """2 ** exponent, exactly, for whole numbers in the range of normal floats."""
    integer, bias, shift = (
        (torch.int64, 1023, 52) if exponent.dtype is torch.float64 else (torch.int32, 127, 23)
    )
    bits = b.shift_left(b.add(b.convert(exponent, integer), bias), shift)
    return b.bitcast(bits, exponent.dtype)


@lower("aten.linalg_matrix_exp", promote="result")
def linalg_matrix_exp(b: OpBuilder, a: Value) -> Value:
    """Scaling by a power of two, series, and as many squarings."""
    matrix = as_batch(b, a)
    with full_precision(b):
        norm = b.reduce(b.reduce(b.abs(matrix), "add", [1]), "max", [1])
        ratio = b.div(norm, _SERIES_RADIUS[norm.dtype])
        doublings = b.ceil(b.mul(b.log(b.maximum(ratio, 1.0)), 1.0 / math.log(2.0)))
        doublings = b.select(b.is_finite(doublings), b.minimum(doublings, 100.0), 0.0)
        scale = _power_of_two(b, b.neg(doublings))
        spread = b.convert(b.broadcast_in_dim(scale, matrix.shape, [0]), a.dtype)
        out = _series(b, b.mul(matrix, spread))
        rounds = b.convert(doublings, torch.int32)
        most = b.reduce(rounds, "max", [0])

        def square(i: Value, out: Value, rounds: Value, most: Value) -> list[Value]:
            due = b.lt(b.broadcast_to(i, rounds.shape), rounds)
            due = b.broadcast_in_dim(due, out.shape, [0])
            return [b.add(i, 1), b.select(due, b.matmul(out, out), out), rounds, most]

        start = b.constant(0, torch.int32)
        out = b.while_([start, out, rounds, most], lambda i, _o, _r, most: b.lt(i, most), square)[1]
    return b.reshape(out, b.out_shape)


def lstsq_full_rank(b: OpBuilder, a: Value, y: Value) -> tuple[Value, Value]:
    """Least squares for a matrix of full rank, by QR; of least norm when it is wide.

    Returns the solution (…, n, k) and the squared residuals (…, k), which are 0 unless it is tall.
    """
    (shape, _), (residual_shape, real) = b.results
    batch = shape[:-2]
    m, n = a.shape[-2:]
    if a.numel == 0 or y.numel == 0:
        # Nothing to fit: residuals are those of a zero solution.
        target = as_batch(b, y, batch)
        squares = b.reduce(b.mul(b.abs(target), b.abs(target)), "add", [1])
        return b.constant(0, a.dtype, shape), b.reshape(squares, residual_shape)
    matrix, target = as_batch(b, a, batch), as_batch(b, y, batch)
    residuals = b.constant(0, real, residual_shape)
    with full_precision(b):
        if m >= n:
            packed, tau = reflectors(b, matrix)
            q = orthogonal(b, packed, tau, n)
            right = triu(b, b.slice_dim(packed, 1, 0, n))
            out = b.triangular_solve(right, b.matmul(adjoint(b, q), target), lower=False)
            if m > n:
                off = b.abs(b.sub(b.matmul(matrix, out), target))
                residuals = b.reshape(b.reduce(b.mul(off, off), "add", [1]), residual_shape)
        else:
            packed, tau = reflectors(b, adjoint(b, matrix))
            q = orthogonal(b, packed, tau, m)
            right = triu(b, b.slice_dim(packed, 1, 0, m))
            half = b.triangular_solve(right, target, lower=False, transpose="ADJOINT")
            out = b.matmul(q, half)
    return b.reshape(out, shape), residuals
