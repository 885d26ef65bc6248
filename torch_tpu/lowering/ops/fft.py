"""Fourier transforms over any dims, normalised as PyTorch asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops import dft
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim

_NONE, _BY_ROOT_N, _BY_N = 0, 1, 2  # the ``normalization`` argument of the aten ops


def _factor(size: int, normalization: int) -> float:
    return {_NONE: 1.0, _BY_ROOT_N: 1.0 / math.sqrt(size), _BY_N: 1.0 / size}[normalization]


def _dims(x: Value, dim: Sequence[int]) -> list[int]:
    return [canonical_dim(d, x.rank) for d in dim]


def _transform(b: OpBuilder, x: Value, kind: str, length: Sequence[int]) -> Value:
    """``b.fft`` over the last dims; the TPU's has single precision only."""
    if b.target == "tpu" and x.dtype in (torch.float64, torch.complex128):
        return dft.transform(b, x, kind, length)
    return b.fft(x, kind, length)


def _over_last(b: OpBuilder, x: Value, dim: int, kind: str, length: int) -> Value:
    """One transform along ``dim``, which is moved to the minor place and back."""
    return b.move_dim(_transform(b, b.move_dim(x, dim, -1), kind, [length]), -1, dim)


def _complex(b: OpBuilder, x: Value, dims: Sequence[int], forward: bool) -> Value:
    """Unnormalised complex transform, up to three adjacent minor dims at a time."""
    kind = "FFT" if forward else "IFFT"
    rest = list(dims)
    while rest:
        group, rest = rest[-3:], rest[:-3]
        others = [d for d in range(x.rank) if d not in group]
        order = [*others, *group]
        back = [order.index(d) for d in range(x.rank)]
        length = [x.shape[d] for d in group]
        y = _transform(b, b.transpose(x, order), kind, length)
        x = b.transpose(y if forward else b.mul(y, math.prod(length)), back)
    return x


def _scaled(b: OpBuilder, x: Value, size: int, normalization: int) -> Value:
    return b.mul(x, _factor(size, normalization))


def _extent(x: Value, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


@lower("aten._fft_c2c")
def fft_c2c(b: OpBuilder, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    dims = _dims(x, dim)
    return _scaled(b, _complex(b, x, dims, forward), _extent(x, dims), normalization)


def _real_to_complex(b: OpBuilder, x: Value, dims: Sequence[int], onesided: bool) -> Value:
    """Unnormalised forward transform of a real tensor; the last of ``dims`` is halved."""
    last = dims[-1]
    n = x.shape[last]
    half = _complex(b, _over_last(b, x, last, "RFFT", n), dims[:-1], forward=True)
    if onesided or n < 3:
        return half
    # The other half is the conjugate at the negative frequencies of every transformed dim.
    mirror = b.reverse(b.slice_dim(half, last, 1, n - n // 2), [last])
    for d in dims[:-1]:
        first = b.slice_dim(mirror, d, 0, 1)
        tail = b.slice_dim(mirror, d, 1, mirror.shape[d])
        mirror = b.concatenate([first, b.reverse(tail, [d])], d)
    return b.concatenate([half, b.conj(mirror)], last)


@lower("aten._fft_r2c")
def fft_r2c(
    b: OpBuilder, x: Value, dim: Sequence[int], normalization: int, onesided: bool
) -> Value:
    dims = _dims(x, dim)
    return _scaled(b, _real_to_complex(b, x, dims, onesided), _extent(x, dims), normalization)


def _complex_to_real(b: OpBuilder, x: Value, dims: Sequence[int], size: int) -> Value:
    """Unnormalised inverse transform to a real tensor of ``size`` along the last of ``dims``."""
    last = dims[-1]
    x = _complex(b, x, dims[:-1], forward=False)
    x = b.slice_dim(x, last, 0, size // 2 + 1)
    return b.mul(_over_last(b, x, last, "IRFFT", size), size)


@lower("aten._fft_c2r")
def fft_c2r(
    b: OpBuilder, x: Value, dim: Sequence[int], normalization: int, last_dim_size: int
) -> Value:
    dims = _dims(x, dim)
    out = _complex_to_real(b, x, dims, last_dim_size)
    size = _extent(x, dims[:-1]) * last_dim_size
    return _scaled(b, out, size, normalization)


@lower("prims.fft_c2c")
def prims_fft_c2c(b: OpBuilder, x: Value, dim: Sequence[int], forward: bool) -> Value:
    return _complex(b, x, _dims(x, dim), forward)


@lower("prims.fft_r2c")
def prims_fft_r2c(b: OpBuilder, x: Value, dim: Sequence[int], onesided: bool) -> Value:
    return _real_to_complex(b, x, _dims(x, dim), onesided)


@lower("prims.fft_c2r")
def prims_fft_c2r(b: OpBuilder, x: Value, dim: Sequence[int], last_dim_size: int) -> Value:
    return _complex_to_real(b, x, _dims(x, dim), last_dim_size)
