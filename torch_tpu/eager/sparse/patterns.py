"""Arithmetic on sparsity patterns: flat positions, grouping, matching and joining.

A *position* is the row-major number of an index tuple, int64. Sizes that are data (how many
positions are distinct, how many pairs join) are read back once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def positions(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """(rank, nnz) index tuples over ``sizes`` as (nnz,) positions."""
    if len(sizes) == 0:
        return indices.new_zeros(indices.shape[1])
    result = indices[0]
    for d in range(1, len(sizes)):
        result = result * sizes[d] + indices[d]
    return result


def tuples(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """The inverse of :func:`positions`: (rank, nnz)."""
    if len(sizes) == 0:
        return flat.new_zeros((0, flat.shape[0]))
    rows = []
    for d in range(len(sizes)):
        step = math.prod(sizes[d + 1 :])
        rows.append((flat // max(step, 1)) % max(sizes[d], 1))
    return torch.stack(rows)


def add_rows(rows: int, at: Tensor, values: Tensor) -> Tensor:
    """(rows, …) zeros to which ``values[i]`` is added at row ``at[i]``; logical or for bool."""
    if values.dtype is torch.bool:
        return add_rows(rows, at, values.to(torch.uint8)).to(torch.bool)
    return values.new_zeros((rows, *values.shape[1:])).index_add_(0, at, values)


def coalesced(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct positions in increasing order over the sparse dims, and their summed values."""
    sizes = sparse.shape[: sparse.sparse_dim()]
    flat = positions(sparse._indices(), sizes)
    if sparse.is_coalesced():
        return flat, sparse._values()
    distinct, inverse = torch.unique(flat, return_inverse=True)
    return distinct, add_rows(distinct.shape[0], inverse, sparse._values())


def find(sorted_positions: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of ``wanted`` stands among distinct sorted positions, and whether it is there."""
    count = sorted_positions.shape[0]
    if count == 0:
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    at = torch.searchsorted(sorted_positions, wanted).clamp_(max=count - 1)
    return at, sorted_positions[at] == wanted


def join(left: Tensor, right: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """All pairs (i, j) with ``left[i] == right[j]``, keys in [0, size), in order of i, then j."""
    order = torch.argsort(right, stable=True)
    counts = torch.bincount(right, minlength=size)
    starts = counts.cumsum(0) - counts
    repeats = counts[left]
    i = torch.repeat_interleave(repeats)
    ends = repeats.cumsum(0)
    within = torch.arange(i.shape[0], device=i.device) - (ends - repeats)[i]
    return i, order[starts[left[i]] + within]


def scale_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values`` (nnz,) times ``rows`` (nnz, …), row by row."""
    return values.reshape(-1, *[1] * (rows.dim() - 1)) * rows


def row_of(pointers: Tensor, nnz: int) -> Tensor:
    """Row numbers of compressed row pointers (rows + 1,), as (nnz,)."""
    counts = pointers.diff()
    return torch.repeat_interleave(counts, output_size=nnz).to(pointers.dtype)


def pointers_of(rows: Tensor, count: int) -> Tensor:
    """Compressed pointers (count + 1,) of sorted row numbers."""
    counts = torch.bincount(rows, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
