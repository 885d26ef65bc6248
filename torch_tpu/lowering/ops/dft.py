"""Discrete Fourier transforms in double precision as matrix products (Cooley and Tukey, 1965)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.types import Value

# Longer transforms are split in two where the length has factors.
_LARGEST_MATRIX = 256


def transform(b: OpBuilder, x: Value, kind: str, length: Sequence[int]) -> Value:
    """``kind`` FFT, IFFT, RFFT or IRFFT over the last ``len(length)`` dims, scaled like ``b.fft``.

    RFFT and IRFFT take one dim.
    """
    if kind == "RFFT":
        n = length[0]
        full = _along_last(b, b.complex(x, b.full(x.shape, 0.0, x.dtype)), n, forward=True)
        return b.slice_dim(full, -1, 0, n // 2 + 1)
    if kind == "IRFFT":
        n = length[0]
        mirror = b.conj(b.reverse(b.slice_dim(x, -1, 1, (n + 1) // 2), [x.rank - 1]))
        full = b.concatenate([x, mirror], x.rank - 1) if n > 2 else x
        return b.mul(b.real(_along_last(b, full, n, forward=False)), 1.0 / n)
    for i, n in enumerate(reversed(length)):
        dim = x.rank - 1 - i
        x = b.move_dim(_along_last(b, b.move_dim(x, dim, -1), n, kind == "FFT"), -1, dim)
    return x if kind == "FFT" else b.mul(x, 1.0 / math.prod(length))


def _along_last(b: OpBuilder, x: Value, n: int, forward: bool) -> Value:
    """Unnormalised transform of the last dim, of ``n`` elements."""
    p = _divisor(n)
    if p == 1:
        return b.dot_general(x, _roots(b, n, n, n, forward), ([x.rank - 1], [0]))
    q = n // p
    lead = list(x.shape[:-1])
    # Element q*i + j: transform over i, turn by the root of k*j, transform over j.
    columns = b.swap(b.reshape(x, [*lead, p, q]), -1, -2)
    columns = b.swap(_along_last(b, columns, p, forward), -1, -2)
    turned = b.mul(columns, b.broadcast_to(_roots(b, p, q, n, forward), columns.shape))
    # Frequency k + p*m stands at (k, m).
    return b.reshape(b.swap(_along_last(b, turned, q, forward), -1, -2), [*lead, n])


def _divisor(n: int) -> int:
    """The divisor of ``n`` next to its root, 1 if one matrix will do (or ``n`` is a prime)."""
    if n <= _LARGEST_MATRIX:
        return 1
    return next(p for p in range(math.isqrt(n), 0, -1) if n % p == 0)


def _roots(b: OpBuilder, rows: int, columns: int, n: int, forward: bool) -> Value:
    """exp(-+2 pi i r c / n) at (r, c); r c is reduced exactly, so that the angle is small."""
    shape = (rows, columns)
    place = b.mul(b.iota(shape, 0, torch.int64), b.iota(shape, 1, torch.int64))
    place = b.convert(b.remainder(place, n), torch.float64)
    angle = b.mul(place, (-2.0 if forward else 2.0) * math.pi / n)
    return b.complex(b.cos(angle), b.sin(angle))
