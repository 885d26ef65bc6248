"""QR factorisation and products of Householder reflectors."""

from __future__ import annotations

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.matrices import adjoint, as_batch, full_precision, triu
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value


def reflectors(b: OpBuilder, a: Value) -> tuple[Value, Value]:
    """LAPACK's geqrf of ``a`` [batch, m, n]: R over the reflectors, and tau [batch, min(m, n)]."""
    batch, m, n = a.shape
    packed, tau = b.custom_call("Qr", [a], [(a.shape, a.dtype), ((batch, min(m, n)), a.dtype)])
    return packed, tau


def orthogonal(b: OpBuilder, packed: Value, tau: Value, columns: int) -> Value:
    """The first ``columns`` columns of Q [batch, m, columns] from its reflectors."""
    have = packed.shape[2]
    if columns < have:
        packed = b.slice_dim(packed, 2, 0, columns)
    elif columns > have:
        packed = b.pad_dim(packed, 2, 0, 0, columns - have)
    if tau.shape[1] > columns:
        tau = b.slice_dim(tau, 1, 0, columns)
    (q,) = b.custom_call(
        "ProductOfElementaryHouseholderReflectors", [packed, tau], [(packed.shape, packed.dtype)]
    )
    return q


@lower(
    "aten.geqrf",
    specs=lambda a: [(a.shape, a.dtype), ((*a.shape[:-2], min(a.shape[-2:])), a.dtype)],
)
def geqrf(b: OpBuilder, a: Value) -> tuple[Value, Value]:
    with full_precision(b):
        packed, tau = reflectors(b, as_batch(b, a))
    return b.reshape(packed, b.results[0][0]), b.reshape(tau, b.results[1][0])


@lower("aten.linalg_qr")
def linalg_qr(b: OpBuilder, a: Value, mode: str = "reduced") -> tuple[Value, Value]:
    (q_shape, _), (r_shape, _) = b.results
    with full_precision(b):
        packed, tau = reflectors(b, as_batch(b, a))
        right = triu(b, b.slice_dim(packed, 1, 0, min(r_shape[-2], packed.shape[1])))
        if mode == "r":
            return b.constant(0, a.dtype, q_shape), b.reshape(right, r_shape)
        left = orthogonal(b, packed, tau, q_shape[-1])
    return b.reshape(left, q_shape), b.reshape(right, r_shape)


@lower("aten.linalg_householder_product")
def linalg_householder_product(b: OpBuilder, a: Value, tau: Value) -> Value:
    packed = as_batch(b, a)
    with full_precision(b):
        q = orthogonal(b, packed, b.reshape(tau, (packed.shape[0], tau.shape[-1])), a.shape[-1])
    return b.reshape(q, a.shape)


@lower("aten.ormqr")
def ormqr(
    b: OpBuilder,
    a: Value,
    tau: Value,
    other: Value,
    left: bool = True,
    transpose: bool = False,
) -> Value:
    packed, target = as_batch(b, a), as_batch(b, other)
    rows = packed.shape[1]
    with full_precision(b):
        q = orthogonal(b, packed, b.reshape(tau, (packed.shape[0], tau.shape[-1])), rows)
        if transpose:
            q = adjoint(b, q)
        out = b.matmul(q, target) if left else b.matmul(target, q)
    return b.reshape(out, b.out_shape)
