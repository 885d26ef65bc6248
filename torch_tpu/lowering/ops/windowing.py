"""Sliding windows as a dim of their own (unfold, im2col) and the sums that invert them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.addressing import gather_rows
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value, canonical_dim, opmath_dtype

# Kernels with more positions than this are walked by a loop instead of unrolled code.
MAX_UNROLLED = 25


def _positions(b: OpBuilder, shape: tuple[int, int], steps: tuple[int, int]) -> Value:
    """A table i * steps[0] + j * steps[1] of element positions."""
    rows = b.mul(b.iota(shape, 0, torch.int32), steps[0])
    return b.add(rows, b.mul(b.iota(shape, 1, torch.int32), steps[1]))


@lower("aten.unfold.default", "aten.unfold_copy.default")
def unfold(b: OpBuilder, x: Value, dimension: int, size: int, step: int) -> Value:
    if x.rank == 0:
        return b.broadcast_to(x, b.out_shape)
    dim = canonical_dim(dimension, x.rank)
    count = b.out_shape[dim]
    if step == size:
        parts = b.slice_dim(x, dim, 0, count * size)
        parts = b.reshape(parts, (*x.shape[:dim], count, size, *x.shape[dim + 1 :]))
    else:
        parts = gather_rows(b, x, dim, _positions(b, (count, size), (step, 1)))
    return b.move_dim(parts, dim + 1, parts.rank - 1)


def overlap_add(b: OpBuilder, windows: Value, step: int, length: int) -> Value:
    """Sum windows (…, count, size) that start ``step`` apart into (…, length).

    Windows are cut into blocks of ``step``. Block k of window i belongs to place i + k: writing
    the blocks row by row with one more column than they are read with shifts row k by k places,
    so that one reduction adds everything up, without a scatter.
    """
    *lead, count, size = windows.shape
    blocks = -(-size // step)
    x = b.pad_dim(windows, -1, 0, 0, blocks * step - size)
    x = b.reshape(x, (*lead, count, blocks, step))
    n = len(lead)
    if blocks > 1:
        x = b.swap(x, n, n + 1)
        x = b.pad_dim(x, n + 1, 0, 0, blocks)
        x = b.reshape(x, (*lead, blocks * (count + blocks), step))
        places = count + blocks - 1
        x = b.slice_dim(x, n, 0, blocks * places)
        x = b.reduce(b.reshape(x, (*lead, blocks, places, step)), "add", [n])
        x = b.reshape(x, (*lead, places * step))
    else:
        x = b.reshape(x, (*lead, count * step))
    return b.pad_dim(x, -1, 0, 0, length - x.shape[-1])


@lower("aten.unfold_backward.default")
def unfold_backward(
    b: OpBuilder, grad: Value, sizes: Sequence[int], dim: int, size: int, step: int
) -> Value:
    if not sizes:
        return b.reshape(grad, ())
    if grad.numel == 0:
        return b.constant(0, grad.dtype, b.out_shape)
    dim = canonical_dim(dim, len(sizes))
    windows = b.convert(b.move_dim(grad, dim, grad.rank - 2), opmath_dtype(grad.dtype))
    out = b.convert(overlap_add(b, windows, step, sizes[dim]), grad.dtype)
    return b.move_dim(out, out.rank - 1, dim)


def _extent(size: int, kernel: int, dilation: int, stride: int) -> int:
    """How many windows fit into a padded dim of ``size``."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


@lower("aten.im2col.default")
def im2col(
    b: OpBuilder,
    x: Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """(N, C, H, W) -> (N, C * kh * kw, windows); also without N."""
    n = x.rank - 3
    pads = [0] * (n + 1) + list(padding)
    x = b.pad(x, 0, pads, pads)
    lead = x.shape[: n + 1]
    counts = [_extent(x.shape[n + 1 + i], kernel_size[i], dilation[i], stride[i]) for i in range(2)]
    (oh, ow), (kh, kw) = counts, kernel_size
    if tuple(stride) == tuple(kernel_size) and tuple(dilation) == (1, 1):
        x = b.slice(x, [0] * x.rank, [*lead, oh * kh, ow * kw])
        x = b.reshape(x, (*lead, oh, kh, ow, kw))
        x = b.transpose(x, [*range(n + 1), n + 2, n + 4, n + 1, n + 3])
        return b.reshape(x, b.out_shape)

    # One strided slice of the image per kernel position: four times faster than a gather.
    spans = [(counts[i] - 1) * stride[i] + 1 for i in range(2)]

    def place(k: Operand, row: Operand, col: Operand, image: Value, out: Value) -> Value:
        at = [0] * (n + 1)
        part = b.dynamic_slice(image, [*at, row, col], [*lead, *spans])
        ends = list(part.shape)
        part = b.slice(part, [0] * part.rank, ends, [1] * (n + 1) + list(stride))
        return b.dynamic_update_slice(out, b.unsqueeze(part, n + 1), [*at, k, 0, 0])

    out = b.constant(0, x.dtype, (*lead, kh * kw, oh, ow))
    if kh * kw <= MAX_UNROLLED:
        for i in range(kh):
            for j in range(kw):
                out = place(i * kw + j, i * dilation[0], j * dilation[1], x, out)
        return b.reshape(out, b.out_shape)

    def step(k: Value, out: Value, image: Value) -> list[Value]:
        row, col = b.mul(b.div(k, kw), dilation[0]), b.mul(b.remainder(k, kw), dilation[1])
        return [place(k, row, col, image, out), image]

    return b.reshape(b.fori(kh * kw, [out, x], step)[0], b.out_shape)


@lower("aten.col2im.default")
def col2im(
    b: OpBuilder,
    x: Value,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """(N, C * kh * kw, windows) -> (N, C, H, W), overlaps summed; one dim after the other."""
    *lead, rows, _ = x.shape
    kh, kw = kernel_size
    full = [output_size[i] + 2 * padding[i] for i in range(2)]
    counts = [_extent(full[i], kernel_size[i], dilation[i], stride[i]) for i in range(2)]
    channels = rows // (kh * kw)
    n = len(lead)
    dtype = x.dtype
    x = b.convert(b.reshape(x, (*lead, channels, kh, kw, *counts)), opmath_dtype(dtype))
    # (…, C, kh, oh, ow, kw), the last pair to W; then (…, C, W, oh, kh), the last pair to H.
    x = b.transpose(x, [*range(n + 1), n + 1, n + 3, n + 4, n + 2])
    x = _fold_last(b, x, dilation[1], stride[1], full[1])
    x = b.transpose(x, [*range(n + 1), n + 3, n + 2, n + 1])
    x = _fold_last(b, x, dilation[0], stride[0], full[0])
    x = b.convert(b.swap(x, n + 1, n + 2), dtype)
    crops = [0] * (n + 1) + [-p for p in padding]
    return b.pad(x, 0, crops, crops)


def _fold_last(b: OpBuilder, x: Value, dilation: int, stride: int, length: int) -> Value:
    """Overlap-add of (…, windows, kernel) with gaps of ``dilation`` inside each window."""
    if dilation > 1:
        gaps = [0] * (x.rank - 1) + [dilation - 1]
        x = b.pad(x, 0, [0] * x.rank, [0] * x.rank, gaps)
    return overlap_add(b, x, stride, length)
