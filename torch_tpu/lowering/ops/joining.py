"""Joining, repeating, reversing and rearranging blocks of elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.ops.data_dependent import repeat_interleave_padded
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, canonical_dim


@lower("aten.cat.default", "prims.cat.default")
def cat(b: OpBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Empty operands add nothing, PyTorch's legacy (0,) of any rank among them."""
    parts = [b.convert(v, b.out_dtype) for v in tensors if v.numel]
    return b.concatenate(parts, canonical_dim(dim, parts[0].rank))


@lower("aten.stack.default", "aten._stack.default")
def stack(b: OpBuilder, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = [b.convert(v, b.out_dtype) for v in tensors]
    return b.stack(parts, canonical_dim(dim, parts[0].rank + 1))


@lower("aten.repeat.default")
def repeat(b: OpBuilder, x: Value, repeats: Sequence[int]) -> Value:
    lead = len(repeats) - x.rank
    sizes = (1,) * lead + x.shape
    pairs = [n for r, s in zip(repeats, sizes, strict=True) for n in (r, s)]
    kept = [2 * (lead + d) + 1 for d in range(x.rank)]
    return b.reshape(b.broadcast_in_dim(x, pairs, kept), b.out_shape)


@lower("aten.repeat_interleave.Tensor")
def repeat_interleave(b: OpBuilder, repeats: Value, *, output_size: int | None = None) -> Value:
    """Indices for ``index_select``; the size must be static."""
    if output_size is None:
        raise NotImplementedError(
            "repeat_interleave: a result without output_size is data-dependent"
        )
    index, total = repeat_interleave_padded(b, repeats, output_size)
    b.note_bad_index(b.ne(total, output_size))
    return index


@lower("aten.flip.default")
def flip(b: OpBuilder, x: Value, dims: Sequence[int]) -> Value:
    return b.reverse(x, [canonical_dim(d, x.rank) for d in dims]) if x.rank else x


def _roll_dim(b: OpBuilder, x: Value, dim: int, shift: int) -> Value:
    size = x.shape[dim]
    cut = (size - shift) % size
    if cut == 0:
        return x
    return b.concatenate([b.slice_dim(x, dim, cut, size), b.slice_dim(x, dim, 0, cut)], dim)


@lower("aten.roll.default")
def roll(b: OpBuilder, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        flat = b.reshape(x, (x.numel,))
        return b.reshape(_roll_dim(b, flat, 0, shifts[0]), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        if x.rank:
            x = _roll_dim(b, x, canonical_dim(dim, x.rank), shift)
    return x


@lower("aten.rot90.default")
def rot90(b: OpBuilder, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = (canonical_dim(d, x.rank) for d in dims)
    turns = k % 4
    if turns == 1:
        return b.swap(b.reverse(x, [second]), first, second)
    if turns == 2:
        return b.reverse(x, [first, second])
    if turns == 3:
        return b.reverse(b.swap(x, first, second), [second])
    return x


@lower("aten.block_diag.default")
def block_diag(b: OpBuilder, tensors: Sequence[Value]) -> Value:
    cols = b.out_shape[1]
    parts, left = [], 0
    for v in tensors:
        block = b.convert(v, b.out_dtype)
        if block.rank < 2:
            block = b.reshape(block, (1, block.numel))
        width = block.shape[1]
        if block.shape[0]:
            parts.append(b.pad_dim(block, 1, 0, left, cols - left - width))
        left += width
    return b.concatenate(parts, 0)


@lower("aten.trace.default")
def trace(b: OpBuilder, x: Value) -> Value:
    rows, cols = x.shape
    size = min(rows, cols)
    if size == 0:
        return b.constant(0, b.out_dtype)
    flat = b.reshape(x, (rows * cols,))
    diagonal = b.slice(flat, [0], [(size - 1) * (cols + 1) + 1], [cols + 1])
    wide = b.out_dtype
    if wide in (torch.float16, torch.bfloat16):
        wide = torch.float32
    return b.convert(b.reduce(b.convert(diagonal, wide), "add", [0]), b.out_dtype)


# -- channels to space and back ----------------------------------------------------------------


@lower("aten.pixel_shuffle.default")
def pixel_shuffle(b: OpBuilder, x: Value, upscale_factor: int) -> Value:
    *lead, channels, height, width = x.shape
    r, n = upscale_factor, len(lead)
    x = b.reshape(x, (*lead, channels // (r * r), r, r, height, width))
    x = b.transpose(x, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return b.reshape(x, b.out_shape)


@lower("aten.pixel_unshuffle.default")
def pixel_unshuffle(b: OpBuilder, x: Value, downscale_factor: int) -> Value:
    *lead, channels, height, width = x.shape
    r, n = downscale_factor, len(lead)
    x = b.reshape(x, (*lead, channels, height // r, r, width // r, r))
    x = b.transpose(x, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return b.reshape(x, b.out_shape)


@lower("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(b: OpBuilder, x: Value, groups: int) -> Value:
    count, channels, *rest = x.shape
    x = b.reshape(x, (count, groups, channels // groups, *rest))
    return b.reshape(b.swap(x, 1, 2), b.out_shape)
