"""Singular values and Hermitian eigenvalues."""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.matrices import (
    adjoint,
    as_batch,
    diagonal,
    eye,
    full_precision,
    mat_vec_rows,
    permute_rows,
    transposed,
    tril,
    triu,
)
from torch_tpu.lowering.ops.qr import orthogonal, reflectors
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, real_dtype

_MAX_SWEEPS = 40


# -- singular values by one-sided Jacobi -----------------------------------------------------


def _pair_rotation(
    b: OpBuilder, x: Value, y: Value, width: int, tolerance: float
) -> tuple[Value, Value, Value]:
    """Rotate the vectors ``x`` and ``y`` [batch, pairs, length] so that their first ``width``
    entries become orthogonal; also how far from orthogonal the worst pair was."""
    head_x, head_y = b.slice_dim(x, 2, 0, width), b.slice_dim(y, 2, 0, width)
    real = real_dtype(x.dtype)

    def dot(u: Value, v: Value) -> Value:
        return b.reduce(b.mul(b.conj(u), v), "add", [2], keepdim=True)

    a, c, g = b.real(dot(head_x, head_x)), b.real(dot(head_y, head_y)), dot(head_x, head_y)
    size = b.abs(g)
    scale = b.mul(b.sqrt(a), b.sqrt(c))
    tiny = torch.finfo(real).tiny / torch.finfo(real).eps
    idle = b.le(size, b.maximum(b.mul(scale, tolerance), tiny))
    safe = b.select(idle, 1, size)
    zeta = b.div(b.sub(c, a), b.mul(safe, 2))
    sign = b.select(b.lt(zeta, 0), b.constant(-1, real), b.constant(1, real))
    magnitude = b.abs(zeta)
    root = b.sqrt(b.add(b.mul(zeta, zeta), 1))
    tangent = b.div(sign, b.add(magnitude, root))
    cosine = b.rsqrt(b.add(b.mul(tangent, tangent), 1))
    sine = b.select(idle, 0, b.mul(tangent, cosine))
    cosine = b.select(idle, 1, cosine)
    if x.is_complex:
        phase = b.select(idle, 1, b.div(b.conj(g), b.convert(safe, x.dtype)))
    else:
        phase = b.select(b.and_(b.lt(g, 0), b.not_(idle)), b.constant(-1, real), 1)
    turned = b.mul(y, phase)
    s, k = b.convert(sine, x.dtype), b.convert(cosine, x.dtype)
    worst = b.select(idle, 0, b.div(size, b.maximum(scale, tiny)))
    return (
        b.sub(b.mul(x, k), b.mul(turned, s)),
        b.add(b.mul(x, s), b.mul(turned, k)),
        b.reduce(worst, "max", [0, 1, 2]),
    )


def _next_pairs(b: OpBuilder, top: Value, bottom: Value) -> tuple[Value, Value]:
    """The next round of a round-robin tournament; after all rounds everyone is back in place."""
    h = top.shape[1]
    if h == 1:
        return top, bottom
    first = b.slice_dim(top, 1, 0, 1)
    new_top = [first, b.slice_dim(bottom, 1, 0, 1), b.slice_dim(top, 1, 1, h - 1)]
    new_bottom = [b.slice_dim(bottom, 1, 1, h), b.slice_dim(top, 1, h - 1, h)]
    new_top = [v for v in new_top if v.shape[1]]
    return b.concatenate(new_top, 1), b.concatenate(new_bottom, 1)


def jacobi(b: OpBuilder, a: Value) -> tuple[Value, Value, Value]:
    """One-sided Jacobi (Hestenes, 1958) on the columns of ``a`` [batch, m, n].

    Returns w and v, transposed as [batch, n, m] and [batch, n, n], with a v = w and orthogonal
    columns of w in descending order of length, and these lengths [batch, n].
    """
    batch, m, n = a.shape
    even = n + n % 2
    half = even // 2
    real = real_dtype(a.dtype)
    tolerance = 16 * torch.finfo(real).eps
    columns = b.pad_dim(transposed(b, a), 1, 0, 0, even - n)
    both = b.concatenate([columns, eye(b, (batch, even, even), a.dtype)], 2)
    top, bottom = b.slice_dim(both, 1, 0, half), b.slice_dim(both, 1, half, even)

    def round_(_: Value, top: Value, bottom: Value, worst: Value) -> list[Value]:
        top, bottom, off = _pair_rotation(b, top, bottom, m, tolerance)
        return [*_next_pairs(b, top, bottom), b.maximum(worst, off)]

    def sweep(count: Value, _: Value, top: Value, bottom: Value) -> list[Value]:
        start = b.constant(0, real)
        top, bottom, worst = b.fori(max(even - 1, 1), [top, bottom, start], round_)
        return [b.add(count, 1), worst, top, bottom]

    def unfinished(count: Value, worst: Value, *_: Value) -> Value:
        return b.and_(b.gt(worst, tolerance), b.lt(count, _MAX_SWEEPS))

    inits = [b.constant(0, torch.int64), b.constant(1, real), top, bottom]
    _, _, top, bottom = b.while_(inits, unfinished, sweep)
    both = b.concatenate([top, bottom], 1)
    w, v = b.slice_dim(both, 2, 0, m), b.slice_dim(both, 2, m, m + even)
    square = b.mul(b.real(w), b.real(w))
    if w.is_complex:
        square = b.add(square, b.mul(b.imag(w), b.imag(w)))
    length = b.sqrt(b.reduce(square, "add", [2]))
    position = b.iota(length.shape, 1, torch.int32)
    key = b.select(b.lt(position, n), length, -1)  # the padding goes last, even among zeros
    key, order = b.sort([key, position], 1, lambda p, q, *_: b.total_less(p, q, True))
    w, v = (b.slice_dim(permute_rows(b, t, order), 1, 0, n) for t in (w, v))
    return w, b.slice_dim(v, 2, 0, n), b.slice_dim(key, 1, 0, n)


def _unit_scale(b: OpBuilder, a: Value) -> tuple[Value, Value]:
    """``a`` [batch, m, n] divided by its largest entry, and that entry [batch] (1 if zero)."""
    largest = b.reduce(b.abs(a), "max", [1, 2])
    largest = b.select(b.eq(largest, 0), 1, largest)
    return b.div(a, b.convert(b.broadcast_in_dim(largest, a.shape, [0]), a.dtype)), largest


def singular(
    b: OpBuilder, a: Value, vectors: bool, full: bool
) -> tuple[Value, Value | None, Value | None]:
    """Singular values [batch, k] of ``a`` [batch, m, n], m >= n, then u and v (columns).

    A QR factorisation comes first; Jacobi then works on R^H, whose columns are nearly ordered
    (Drmač and Veselić, 2008). Lengths and directions of the rotated columns come from another
    QR, which also completes the basis when some are zero.
    """
    m, n = a.shape[1:]
    a, unit = _unit_scale(b, a)
    packed, tau = reflectors(b, a)
    right = triu(b, b.slice_dim(packed, 1, 0, n))
    w, rotation, length = jacobi(b, adjoint(b, right))  # R^H J = W
    spread = b.broadcast_in_dim(unit, length.shape, [0])
    if not vectors:
        return b.mul(length, spread), None, None
    second, second_tau = reflectors(b, transposed(b, w))
    entries = diagonal(b, second)
    size = b.abs(entries)
    none = b.eq(size, 0)
    if a.is_complex:
        phase = b.div(entries, b.convert(b.select(none, 1, size), a.dtype))
        phase = b.select(none, 1, phase)
    else:
        phase = b.select(b.lt(entries, 0), b.constant(-1, a.dtype), 1)
    v = mat_vec_rows(b, orthogonal(b, second, second_tau, n), phase)
    q = orthogonal(b, packed, tau, m if full else n)
    j = transposed(b, rotation)
    if full and m > n:
        u = b.matmul(b.slice_dim(q, 2, 0, n), j)
        u = b.concatenate([u, b.slice_dim(q, 2, n, m)], 2)
    else:
        u = b.matmul(q, j)
    return b.mul(size, spread), u, v


@lower("aten._linalg_svd", "prims.svd")
def linalg_svd(
    b: OpBuilder,
    a: Value,
    full_matrices: bool = False,
    compute_uv: bool = True,
    driver: str | None = None,
) -> tuple[Value, Value, Value]:
    (u_shape, _), (s_shape, _), (v_shape, _) = b.results
    wide = a.shape[-2] < a.shape[-1]
    with full_precision(b):
        matrix = as_batch(b, a)
        matrix = adjoint(b, matrix) if wide else matrix
        if 0 in matrix.shape:
            # No singular values; a full basis may still be asked for.
            bases = [
                b.broadcast_to(eye(b, s[-2:], a.dtype), s) if len(s) > 1 else None
                for s in (u_shape, v_shape)
            ]
            left, right = (
                b.constant(0, a.dtype, s) if t is None else t
                for t, s in zip(bases, (u_shape, v_shape), strict=True)
            )
            return left, b.constant(0, real_dtype(a.dtype), s_shape), right
        values, u, v = singular(b, matrix, compute_uv, full_matrices)
    values = b.reshape(values, s_shape)
    if u is None or v is None:
        return b.constant(0, a.dtype, u_shape), values, b.constant(0, a.dtype, v_shape)
    u, v = (v, u) if wide else (u, v)
    return b.reshape(u, u_shape), values, b.reshape(adjoint(b, v), v_shape)


# -- eigenvalues of Hermitian matrices -------------------------------------------------------


def _hermitian(b: OpBuilder, a: Value, lower_half: bool) -> Value:
    """The Hermitian matrix that one triangle of ``a`` stands for."""
    half = tril(b, a, -1) if lower_half else adjoint(b, triu(b, a, 1))
    entries = b.convert(b.real(diagonal(b, a)), a.dtype)
    main = b.mul(eye(b, a.shape, a.dtype), b.broadcast_in_dim(entries, a.shape, [0, 2]))
    return b.add(b.add(half, adjoint(b, half)), main)


def _eigh_by_call(b: OpBuilder, a: Value) -> tuple[Value, Value]:
    """XLA's own eigensolver; its options: lower triangle, ascending, most sweeps, tolerance."""
    specs = [(a.shape, a.dtype), (a.shape[:2], real_dtype(a.dtype))]
    vectors, values = b.custom_call("Eigh", [a], specs, 'backend_config = "1,1,100,1e-6"')
    return values, vectors


def _eigh_by_jacobi(b: OpBuilder, a: Value) -> tuple[Value, Value]:
    """Eigenpairs from the singular pairs of a + c, which is positive for c >= |eigenvalues|.

    For double precision: XLA's eigensolver stops at 1e-8 there.
    """
    bound = b.reduce(b.reduce(b.abs(a), "add", [2]), "max", [1])
    shift = b.mul(eye(b, a.shape, bound.dtype), b.broadcast_in_dim(bound, a.shape, [0]))
    _, vectors, length = jacobi(b, b.add(a, b.convert(shift, a.dtype)))
    values = b.sub(length, b.broadcast_in_dim(bound, length.shape, [0]))
    return b.reverse(values, [1]), transposed(b, b.reverse(vectors, [1]))


@lower("aten._linalg_eigh")
def linalg_eigh(
    b: OpBuilder, a: Value, UPLO: str = "L", compute_v: bool = True
) -> tuple[Value, Value]:
    (values_shape, real), (vectors_shape, _) = b.results
    solve = _eigh_by_jacobi if real is torch.float64 else _eigh_by_call
    with full_precision(b):
        values, vectors = solve(b, _hermitian(b, as_batch(b, a), UPLO.upper() == "L"))
    values = b.reshape(values, values_shape)
    if not compute_v:
        return values, b.constant(0, a.dtype, vectors_shape)
    return values, b.reshape(vectors, vectors_shape)


# -- pseudo-inverse --------------------------------------------------------------------------


def _cut(b: OpBuilder, values: Value, atol: Value | None, rtol: Value | None, a: Value) -> Value:
    """Reciprocals of the ``values`` [*batch, k] above max(atol, rtol * largest), else 0."""
    batch = a.shape[:-2]
    real = values.dtype
    largest = b.reduce(values, "max", [values.rank - 1])
    default = max(a.shape[-2:]) * torch.finfo(real).eps
    absolute = b.constant(0, real, batch)
    relative = b.constant(default if rtol is None else 0, real, batch)
    if atol is not None:
        absolute = b.broadcast_to(b.convert(atol, real), batch)
        if rtol is None:  # a given absolute tolerance replaces the default relative one
            relative = b.select(b.gt(absolute, 0), 0, relative)
    if rtol is not None:
        relative = b.broadcast_to(b.convert(rtol, real), batch)
    limit = b.unsqueeze(b.maximum(absolute, b.mul(relative, largest)), -1)
    kept = b.gt(values, b.broadcast_to(limit, values.shape))
    return b.select(kept, b.div(1, b.select(kept, values, 1)), 0)


@lower(
    "aten.linalg_pinv.atol_rtol_tensor",
    specs=lambda a, *_: [((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.dtype)],
)
def linalg_pinv(
    b: OpBuilder,
    a: Value,
    atol: Value | None = None,
    rtol: Value | None = None,
    hermitian: bool = False,
) -> Value:
    """V S^+ U^H of the singular value decomposition, or of the eigenpairs when ``hermitian``."""
    wide = a.shape[-2] < a.shape[-1]
    with full_precision(b):
        matrix = as_batch(b, a)
        if hermitian:
            values, u = b.call("aten._linalg_eigh.default", matrix, "L", True)
            size = b.abs(values)
            v = mat_vec_rows(b, u, b.convert(b.sign(values), a.dtype))
        else:
            size, left, right = singular(b, adjoint(b, matrix) if wide else matrix, True, False)
            assert left is not None and right is not None
            u, v = (right, left) if wide else (left, right)
        spread = b.reshape(size, (*a.shape[:-2], size.shape[-1]))
        inverse = b.reshape(_cut(b, spread, atol, rtol, a), size.shape)
        out = b.matmul(mat_vec_rows(b, v, b.convert(inverse, a.dtype)), adjoint(b, u))
    return b.reshape(out, b.out_shape)
