"""Batches of matrices as [batch, rows, columns] values: reshaping, triangles, row permutations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.types import Value


@contextmanager
def full_precision(b: OpBuilder) -> Iterator[None]:
    """Matrix products inside run at the dtype's own precision, whatever the user's setting."""
    saved, b.matmul_precision = b.matmul_precision, "HIGHEST"
    try:
        yield
    finally:
        b.matmul_precision = saved


def as_batch(b: OpBuilder, x: Value, batch: Sequence[int] | None = None) -> Value:
    """The last two dims as matrices, the others (expanded to ``batch``) as one leading dim."""
    if batch is not None:
        x = b.broadcast_to(x, (*batch, *x.shape[-2:]))
    return b.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


def transposed(b: OpBuilder, x: Value) -> Value:
    return b.swap(x, x.rank - 2, x.rank - 1)


def adjoint(b: OpBuilder, x: Value) -> Value:
    """The conjugate transpose."""
    return b.conj(transposed(b, x))


def lower_mask(b: OpBuilder, shape: Sequence[int], diagonal: int = 0) -> Value:
    """True where column - row <= ``diagonal``."""
    n = len(shape)
    rows, columns = b.iota(shape, n - 2, torch.int32), b.iota(shape, n - 1, torch.int32)
    return b.le(b.sub(columns, rows), diagonal)


def tril(b: OpBuilder, x: Value, diagonal: int = 0) -> Value:
    return b.select(lower_mask(b, x.shape, diagonal), x, 0)


def triu(b: OpBuilder, x: Value, diagonal: int = 0) -> Value:
    return b.select(lower_mask(b, x.shape, diagonal - 1), 0, x)


def eye(b: OpBuilder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Ones on the main diagonal of every matrix of ``shape``."""
    n = len(shape)
    same = b.eq(b.iota(shape, n - 2, torch.int32), b.iota(shape, n - 1, torch.int32))
    return b.convert(same, dtype)


def diagonal(b: OpBuilder, x: Value) -> Value:
    """The main diagonals, [..., min(m, n)]."""
    k = min(x.shape[-2:])
    x = b.slice(x, [0] * x.rank, [*x.shape[:-2], k, k])
    on = b.convert(eye(b, x.shape, torch.bool), torch.bool)
    return b.reduce(b.select(on, x, 0), "add", [x.rank - 1])


def mat_vec_rows(b: OpBuilder, x: Value, scale: Value) -> Value:
    """Columns of ``x`` [batch, m, n] times the entries of ``scale`` [batch, n]."""
    return b.mul(x, b.broadcast_in_dim(scale, x.shape, [0, 2]))


def permute_rows(b: OpBuilder, x: Value, order: Value) -> Value:
    """Row ``i`` of the result is row ``order[:, i]`` of ``x`` [batch, m, n]; order [batch, k]."""
    if x.shape[0] == 1:
        rows = b.take_rows(b.reshape(x, x.shape[1:]), b.reshape(order, order.shape[1:]))
        return b.reshape(rows, (1, *rows.shape))
    return b.gather(
        x,
        order,
        offset_dims=[2],
        collapsed=[1],
        start_index_map=[1],
        index_vector_dim=2,
        slice_sizes=[1, 1, x.shape[2]],
        operand_batching=[0],
        indices_batching=[0],
    )


def inverse_permutation(b: OpBuilder, order: Value) -> Value:
    """For ``order`` [batch, m] the i32 permutation that undoes it."""
    shape = (order.shape[0], order.shape[1], order.shape[1])
    hit = b.eq(b.broadcast_in_dim(order, shape, [0, 1]), b.iota(shape, 2, order.dtype))
    where = b.select(hit, b.iota(shape, 1, torch.int32), 0)
    return b.reduce(where, "add", [1])
