"""Grouped matrix products: the experts of a mixture, each with rows of its own.

The ragged dim is cut into tiles. A loop visits each tile once for each group that has rows in it,
as MegaBlocks does (Gale et al., https://arxiv.org/abs/2211.15841), so that the work grows with the
rows and not with rows times groups; what of a tile belongs to other groups is masked.
"""

from __future__ import annotations

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

# Rows of a tile. Fewer waste less on the tiles that groups share, more read weights less often.
_TILES = {"cpu": (8, 256), "tpu": (256, 512)}


def _grouped_specs(
    x: Value, y: Value, offs: Value | None, bias: Value | None, out_dtype: torch.dtype | None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Any floating dtype and layout, as on the CPU; PyTorch's meta kernel has CUDA's limits."""
    if x.dtype != y.dtype or not x.dtype.is_floating_point:
        raise RuntimeError(
            f"grouped_mm: expected two operands of one floating dtype; got {x.dtype} and {y.dtype}"
        )
    shared = x.shape[-1] == y.shape[-2]
    if x.rank not in (2, 3) or y.rank not in (2, 3) or not shared:
        raise RuntimeError(
            "grouped_mm: expected operands of rank 2 or 3 with one contraction size; "
            f"got shapes {x.shape} and {y.shape}"
        )
    if (offs is None) == (x.rank == 2 or y.rank == 2):
        raise RuntimeError("grouped_mm: offs is needed exactly when an operand is 2-d")
    groups = [] if x.rank != y.rank else [x.shape[0] if offs is None else offs.shape[0]]
    return [((*groups, x.shape[-2], y.shape[-1]), out_dtype or x.dtype)]


@lower("aten._grouped_mm", specs=_grouped_specs)
def grouped_mm(
    b: OpBuilder,
    x: Value,
    y: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """One product a group; ``offs`` (groups,) holds the cumulative ends along the ragged dim.

    (M, k) x (g, k, n) -> (M, n) ragged rows; (g, m, k) x (k, N) -> (m, N) ragged columns;
    (m, K) x (K, n) -> (g, m, n) ragged contraction; (g, m, k) x (g, k, n) -> (g, m, n).
    """
    if bias is not None:
        raise NotImplementedError("_grouped_mm: bias is not supported")
    work = opmath_dtype(x.dtype)
    if offs is None:
        out = b.matmul(x, y, work)
    elif x.rank == 2 and y.rank == 2:
        out = _ragged_contraction(b, x, y, offs, work)
    elif x.rank == 2:
        out = _ragged_rows(b, x, y, offs, work)
    else:
        turned = _ragged_rows(b, b.swap(y, 0, 1), b.swap(x, 1, 2), offs, work)
        out = b.swap(turned, 0, 1)
    return b.convert(out, b.out_dtype)


def _tile(b: OpBuilder, rows: int, groups: int) -> int:
    """A power of two near the mean group."""
    low, high = _TILES[b.target]
    mean = 1 << max(-(-rows // max(groups, 1)) - 1, 0).bit_length()
    return min(max(mean, low), high, 1 << max(rows - 1, 0).bit_length())


def _visits(b: OpBuilder, offs: Value, rows: int, tile: int) -> Value:
    """The visits, (count, 4) int32: group, first row of the tile, and the rows [low, high) of the
    tile that are the group's. What is left over has no rows."""
    groups = offs.shape[0]
    count = max(-(-rows // tile) + min(groups, rows) - 1, 1)
    ends = b.clamp(b.convert(offs, torch.int32), 0, rows)
    zero = b.constant(0, torch.int32, (1,))
    starts = b.concatenate([zero, b.slice_dim(ends, 0, 0, groups - 1)], 0)
    first = b.div(starts, tile)
    past = b.div(b.add(ends, tile - 1), tile)
    tiles = b.select(b.gt(ends, starts), b.sub(past, first), b.constant(0, torch.int32))
    earlier = b.le(b.iota((groups, groups), 0), b.iota((groups, groups), 1))
    column = b.broadcast_in_dim(tiles, (groups, groups), [0])
    upto = b.reduce(b.select(earlier, column, b.constant(0, torch.int32)), "add", [0])

    visit = b.iota((count,), 0, torch.int32)
    done = b.le(
        b.broadcast_in_dim(upto, (count, groups), [1]),
        b.broadcast_in_dim(visit, (count, groups), [0]),
    )
    group = b.reduce(b.convert(done, torch.int32), "add", [1])
    real = b.lt(group, groups)
    group = b.minimum(group, groups - 1)
    within = b.sub(visit, b.take_rows(b.sub(upto, tiles), group))
    at = b.mul(b.add(b.take_rows(first, group), within), tile)
    at = b.select(real, at, b.constant(0, torch.int32))
    low = b.maximum(b.sub(b.take_rows(starts, group), at), 0)
    high = b.minimum(b.sub(b.take_rows(ends, group), at), tile)
    high = b.select(real, high, b.constant(0, torch.int32))
    return b.stack([group, at, low, high], 1)


def _numbers(b: OpBuilder, visits: Value, i: Value) -> list[Value]:
    row = b.dynamic_slice(visits, [i, 0], [1, 4])
    return [b.reshape(b.slice_dim(row, 1, j, j + 1), ()) for j in range(4)]


def _inside(b: OpBuilder, low: Value, high: Value, tile: int, dim: int) -> Value:
    place = b.iota((tile, 1) if dim == 0 else (1, tile), dim, torch.int32)
    return b.and_(b.ge(place, low), b.lt(place, high))


def _ragged_rows(b: OpBuilder, x: Value, y: Value, offs: Value, work: torch.dtype) -> Value:
    (rows, inner), (groups, _, columns) = x.shape, y.shape
    tile = _tile(b, rows, groups)
    visits = _visits(b, offs, rows, tile)
    padded = b.pad_dim(x, 0, 0, 0, -rows % tile)

    def visit(i: Value, out: Value, visits: Value, x: Value, y: Value) -> list[Value]:
        group, at, low, high = _numbers(b, visits, i)
        mine = b.dynamic_slice(x, [at, 0], [tile, inner])
        weight = b.squeeze(b.dynamic_slice(y, [group, 0, 0], [1, inner, columns]), 0)
        (part,) = b.if_(
            b.gt(high, low),
            lambda: b.matmul(mine, weight, work),
            lambda: b.constant(0, work, (tile, columns)),
            [((tile, columns), work)],
        )
        others = b.dynamic_slice(out, [at, 0], [tile, columns])
        both = b.select(_inside(b, low, high, tile, 0), part, others)
        return [b.dynamic_update_slice(out, both, [at, 0]), visits, x, y]

    start = b.constant(0, work, (padded.shape[0], columns))
    out = b.fori(visits.shape[0], [start, visits, padded, y], visit)[0]
    return b.slice_dim(out, 0, 0, rows)


def _ragged_contraction(b: OpBuilder, x: Value, y: Value, offs: Value, work: torch.dtype) -> Value:
    (rows, inner), columns, groups = x.shape, y.shape[1], offs.shape[0]
    if inner == 0:
        return b.constant(0, b.out_dtype, (groups, rows, columns))
    tile = _tile(b, inner, groups)
    visits = _visits(b, offs, inner, tile)
    padded = [b.pad_dim(x, 1, 0, 0, -inner % tile), b.pad_dim(y, 0, 0, 0, -inner % tile)]

    def visit(
        i: Value, out: Value, total: Value, last: Value, visits: Value, x: Value, y: Value
    ) -> list[Value]:
        group, at, low, high = _numbers(b, visits, i)
        left = b.dynamic_slice(x, [0, at], [rows, tile])
        right = b.dynamic_slice(y, [at, 0], [tile, columns])
        # Both are masked: another group's infinity times zero would be a NaN.
        left = b.select(_inside(b, low, high, tile, 1), left, b.constant(0, x.dtype))
        right = b.select(_inside(b, low, high, tile, 0), right, b.constant(0, y.dtype))
        total = b.select(b.eq(group, last), total, b.constant(0, work))
        (total,) = b.if_(
            b.gt(high, low),
            lambda: b.add(total, b.matmul(left, right, work)),
            lambda: total,
            [((rows, columns), work)],
        )
        row = b.unsqueeze(b.convert(total, out.dtype), 0)
        out = b.dynamic_update_slice(out, row, [group, 0, 0])
        return [out, total, group, visits, x, y]

    start = [
        b.constant(0, b.out_dtype, (groups, rows, columns)),
        b.constant(0, work, (rows, columns)),
        b.constant(-1, torch.int32),
    ]
    return b.fori(visits.shape[0], [*start, visits, *padded], visit)[0]
