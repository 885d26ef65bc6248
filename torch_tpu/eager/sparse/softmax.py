"""Softmax of COO tensors: elements that are not there count as minus infinity."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_tpu.eager.sparse import coo, patterns


def _groups(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """The number of each entry's row along sparse dim ``dim``, and how many rows there are."""
    others = [d for d in range(x.sparse_dim()) if d != dim]
    indices = x._indices()
    flat = patterns.positions(indices[others], [x.shape[d] for d in others])
    distinct, inverse = torch.unique(flat, return_inverse=True)
    return inverse, distinct.shape[0]


def _largest(values: Tensor, group: Tensor, count: int) -> Tensor:
    start = values.new_full((count, *values.shape[1:]), -torch.inf)
    return start.index_reduce_(0, group, values, "amax")


def _forward(self: Tensor, dim: int, half_to_float: bool, log: bool) -> Tensor:
    name = "log_softmax" if log else "softmax"
    if half_to_float:
        raise RuntimeError(
            f"{name} with half to float conversion is not supported on sparse tensors"
        )
    x = self.coalesce()
    dim %= x.dim()
    values = x._values()
    if dim >= x.sparse_dim():
        dense = getattr(torch, name)(values, dim - x.sparse_dim() + 1)
        return coo.make(x._indices(), dense, x.shape, True)
    group, count = _groups(x, dim)
    shifted = values - _largest(values, group, count)[group]
    exponents = shifted.exp()
    total = patterns.add_rows(count, group, exponents)[group]
    result = shifted - total.log() if log else exponents / total
    return coo.make(x._indices(), result, x.shape, True)


def _backward(grad: Tensor, output: Tensor, dim: int, log: bool) -> Tensor:
    output = output.coalesce()
    dim %= output.dim()
    y = output._values()
    g = coo.sparse_mask(grad, output)._values()
    if dim >= output.sparse_dim():
        inner = dim - output.sparse_dim() + 1
        sums = (g if log else g * y).sum(inner, keepdim=True)
    else:
        group, count = _groups(output, dim)
        sums = patterns.add_rows(count, group, g if log else g * y)[group]
    result = g - y.exp() * sums if log else y * (g - sums)
    return coo.make(output._indices(), result, output.shape, True)


def softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _forward(self, dim, half_to_float, log=False)


def log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _forward(self, dim, half_to_float, log=True)


def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, self: Tensor) -> Tensor:
    return _backward(grad_output, output, dim, log=False)


def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, self: Tensor) -> Tensor:
    return _backward(grad_output, output, dim, log=True)


KERNELS = {
    "_sparse_softmax": softmax,
    "_sparse_log_softmax": log_softmax,
    "_sparse_softmax_backward_data": softmax_backward,
    "_sparse_log_softmax_backward_data": log_softmax_backward,
}
