"""Constant, reflection and replication padding with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Operand, Value


def padded_dims(rank: int, pad: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dim, low, high) of PyTorch's flat pad list, which starts at the last dim."""
    for i in range(len(pad) // 2):
        yield rank - 1 - i, pad[2 * i], pad[2 * i + 1]


@lower("aten.constant_pad_nd.default")
def constant_pad_nd(b: OpBuilder, x: Value, pad: Sequence[int], value: Operand = 0) -> Value:
    low, high = [0] * x.rank, [0] * x.rank
    for dim, lo, hi in padded_dims(x.rank, pad):
        low[dim], high[dim] = lo, hi
    return b.pad(x, value, low, high)


# -- edges that copy the input: per dim, low edge + input + high edge --------------------------


def _mirror(b: OpBuilder, x: Value, dim: int, low: int, high: int) -> tuple[Value, Value]:
    n = x.shape[dim]
    first = b.slice_dim(x, dim, 1, 1 + low)
    last = b.slice_dim(x, dim, n - 1 - high, n - 1)
    return b.reverse(first, [dim]), b.reverse(last, [dim])


def _replicate(b: OpBuilder, x: Value, dim: int, low: int, high: int) -> tuple[Value, Value]:
    n = x.shape[dim]

    def spread(edge: Value, size: int) -> Value:
        return b.broadcast_to(edge, (*x.shape[:dim], size, *x.shape[dim + 1 :]))

    first, last = b.slice_dim(x, dim, 0, 1), b.slice_dim(x, dim, n - 1, n)
    return spread(first, low), spread(last, high)


Edges = Callable[[OpBuilder, Value, int, int, int], tuple[Value, Value]]


def _pad_edges(b: OpBuilder, x: Value, pad: Sequence[int], edges: Edges) -> Value:
    for dim, low, high in padded_dims(x.rank, pad):
        before, after = edges(b, x, dim, max(low, 0), max(high, 0))
        parts = [p for p in (before, x, after) if p.shape[dim]]
        x = b.concatenate(parts, dim)
        # Negative amounts crop what the edges were made from, so they come last.
        x = b.slice_dim(x, dim, max(-low, 0), x.shape[dim] - max(-high, 0))
    return x


# -- and their transposes: each edge is added back to where it was copied from -----------------


def _mirror_back(b: OpBuilder, edge: Value, dim: int, size: int, low: bool) -> Value:
    edge = b.reverse(edge, [dim])
    width = edge.shape[dim]
    start = 1 if low else size - 1 - width
    return b.pad_dim(edge, dim, 0, start, size - start - width)


def _replicate_back(b: OpBuilder, edge: Value, dim: int, size: int, low: bool) -> Value:
    total = b.reduce(edge, "add", [dim], keepdim=True)
    return b.pad_dim(total, dim, 0, 0 if low else size - 1, size - 1 if low else 0)


EdgeBack = Callable[[OpBuilder, Value, int, int, bool], Value]


def _pad_edges_backward(
    b: OpBuilder, grad: Value, sizes: Sequence[int], pad: Sequence[int], back: EdgeBack
) -> Value:
    for dim, low, high in padded_dims(grad.rank, pad):
        size = sizes[dim]
        grad = b.pad_dim(grad, dim, 0, max(-low, 0), max(-high, 0))
        before, after = max(low, 0), max(high, 0)
        whole = grad
        grad = b.slice_dim(whole, dim, before, before + size)
        if before:
            edge = b.slice_dim(whole, dim, 0, before)
            grad = b.add(grad, back(b, edge, dim, size, True))
        if after:
            edge = b.slice_dim(whole, dim, before + size, before + size + after)
            grad = b.add(grad, back(b, edge, dim, size, False))
    return grad


PADS: dict[str, tuple[Edges, EdgeBack]] = {
    "reflection": (_mirror, _mirror_back),
    "replication": (_replicate, _replicate_back),
}


def _register(name: str, edges: Edges, back: EdgeBack) -> None:
    @lower(f"aten.{name}.default")
    def forward(b: OpBuilder, x: Value, padding: Sequence[int]) -> Value:
        return _pad_edges(b, x, padding, edges)

    @lower(f"aten.{name}_backward.default", promote="result")
    def backward(b: OpBuilder, grad: Value, x: Value, padding: Sequence[int]) -> Value:
        return _pad_edges_backward(b, grad, x.shape, padding, back)


for _kind, _functions in PADS.items():
    for _n in (1, 2, 3):
        _register(f"{_kind}_pad{_n}d", *_functions)
