"""COO tensors: every kernel of ours, PyTorch's own on top, gradients, sparse optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_tpu  # noqa: F401

from .compare import check, gradients


def matrix() -> Tensor:
    """(3, 4) with a repeated index, not coalesced."""
    indices = torch.tensor([[0, 1, 1, 2, 0], [2, 0, 0, 1, 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2, 3, 4, 5]), (3, 4))


def coalesced() -> Tensor:
    return matrix().coalesce()


def hybrid() -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.arange(15.0).view(3, 5), (4, 5))


def drawn(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (x * (x > 0.2)).to_sparse()


def full(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _indices(x: Tensor, *values: int) -> Tensor:
    return torch.tensor(values, device=x.device)


OPS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "to_dense": (lambda a: a.to_dense(), lambda: (matrix(),)),
    "coalesce": (lambda a: a.coalesce(), lambda: (matrix(),)),
    "coalesce hybrid": (lambda a: a.coalesce(), lambda: (hybrid(),)),
    "coalesce bool": (lambda a: a.bool().coalesce(), lambda: (matrix(),)),
    "to_sparse": (lambda a: a.to_sparse(), lambda: (full(3, 4),)),
    "to_sparse 1": (lambda a: a.to_sparse(1), lambda: (full(3, 4),)),
    "dense + sparse": (lambda a, d: d + a, lambda: (matrix(), full(3, 4))),
    "sparse + sparse": (lambda a, b: a + b, lambda: (matrix(), drawn(3, 4))),
    "coalesced + coalesced": (lambda a, b: a + b, lambda: (coalesced(), drawn(3, 4))),
    "add_": (lambda a, d: d.clone().t().add_(a.t(), alpha=2.5), lambda: (matrix(), full(3, 4))),
    "sub": (lambda a, d: d - a, lambda: (matrix(), full(3, 4))),
    "mul number": (lambda a: a * 3, lambda: (matrix(),)),
    "mul 0-d": (lambda a: a * torch.tensor(2.0, device=a.device), lambda: (matrix(),)),
    "mul dense": (lambda a, d: a * d, lambda: (matrix(), full(3, 4))),
    "mul sparse": (lambda a, b: a * b, lambda: (matrix(), drawn(3, 4))),
    "div": (lambda a: a / 2, lambda: (matrix(),)),
    "mm": (lambda a, d: a @ d, lambda: (matrix(), full(4, 2))),
    "mm sparse": (torch.sparse.mm, lambda: (matrix(), drawn(4, 6))),
    "dense @ sparse": (lambda a, d: d @ a, lambda: (matrix(), full(2, 3))),
    "mv": (lambda a, d: a @ d, lambda: (matrix(), full(4))),
    "addmm": (
        lambda a, d, c: torch.sparse.addmm(c, a, d, beta=0.5, alpha=2),
        lambda: (matrix(), full(4, 2), full(3, 2)),
    ),
    "bmm": (torch.bmm, lambda: (drawn(2, 3, 4), full(2, 4, 5))),
    "hspmm": (torch.hspmm, lambda: (matrix(), full(4, 2))),
    "sspaddmm": (lambda a, d: torch.sspaddmm(a, a, d), lambda: (matrix(), full(4, 4))),
    "sum": (torch.sparse.sum, lambda: (matrix(),)),
    "sum 0": (lambda a: torch.sparse.sum(a, 0), lambda: (matrix(),)),
    "sum dense dim": (lambda a: torch.sparse.sum(a, 1), lambda: (hybrid(),)),
    "softmax 0": (lambda a: torch.sparse.softmax(a, 0), lambda: (matrix(),)),
    "softmax 1": (lambda a: torch.sparse.softmax(a, 1), lambda: (matrix(),)),
    "log_softmax": (lambda a: torch.sparse.log_softmax(a, 1), lambda: (matrix(),)),
    "softmax dense dim": (lambda a: torch.sparse.softmax(a, 1), lambda: (hybrid(),)),
    "transpose": (lambda a: a.t(), lambda: (matrix(),)),
    "select": (lambda a: a[1], lambda: (matrix(),)),
    "index_select 0": (lambda a: a.index_select(0, _indices(a, 2, 0, 0)), lambda: (matrix(),)),
    "index_select 1": (lambda a: a.index_select(1, _indices(a, 2, 0)), lambda: (matrix(),)),
    "narrow_copy": (lambda a: a.narrow_copy(0, 1, 2), lambda: (matrix(),)),
    "cat": (lambda a: torch.cat([a, a]), lambda: (matrix(),)),
    "stack": (lambda a: torch.stack([a, a]), lambda: (matrix(),)),
    "sparse_mask": (lambda d, m: d.sparse_mask(m), lambda: (full(3, 4), coalesced())),
    "sparse_mask sparse": (lambda a, m: a.sparse_mask(m), lambda: (drawn(3, 4), coalesced())),
    "unary": (lambda a: [a.sin(), a.relu(), a.neg(), a.sqrt(), a.isnan()], lambda: (matrix(),)),
    "pow": (lambda a: a**2, lambda: (coalesced(),)),
    "norm": (lambda a: torch.norm(a), lambda: (matrix(),)),
    "copies": (
        lambda a: [a.clone(), a.double(), torch.zeros_like(a), a.clone().zero_()],
        lambda: (matrix(),),
    ),
    "repr": (lambda a: repr(a).count("nnz=5"), lambda: (matrix(),)),
}


@pytest.mark.parametrize("name", list(OPS))
def test_op(name: str) -> None:
    fn, arguments = OPS[name]
    check(fn, *arguments())


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "mm": (torch.sparse.mm, lambda: (_leaf(coalesced()), _leaf(full(4, 2)))),
    "mm sparse": (torch.sparse.mm, lambda: (_leaf(coalesced()), _leaf(drawn(4, 6)))),
    "bmm": (torch.bmm, lambda: (_leaf(drawn(2, 3, 4)), _leaf(full(2, 4, 5)))),
    "to_dense": (lambda a: a.to_dense(), lambda: (_leaf(coalesced()),)),
    "to_sparse": (lambda a: a.to_sparse(), lambda: (_leaf(full(3, 4)),)),
    "add": (lambda a, d: d + a, lambda: (_leaf(coalesced()), _leaf(full(3, 4)))),
    "mul": (lambda a, d: a * d, lambda: (_leaf(coalesced()), _leaf(full(3, 4)))),
    "sum": (lambda a: torch.sparse.sum(a, 0), lambda: (_leaf(coalesced()),)),
    "softmax": (lambda a: torch.sparse.softmax(a, 1), lambda: (_leaf(coalesced()),)),
    "log_softmax": (lambda a: torch.sparse.log_softmax(a, 0), lambda: (_leaf(coalesced()),)),
    "sparse_mask": (lambda d, m: d.sparse_mask(m), lambda: (_leaf(full(3, 4)), coalesced())),
    "construction": (
        lambda v, i: torch.sparse_coo_tensor(i, v, (3, 4)),
        lambda: (_leaf(full(5)), matrix()._indices()),
    ),
}


@pytest.mark.parametrize("name", list(GRADIENTS))
def test_gradient(name: str) -> None:
    fn, arguments = GRADIENTS[name]
    check(gradients(fn), *arguments())


def test_embedding_bag_sparse_gradient() -> None:
    def run(weight: Tensor, index: Tensor) -> Tensor:
        out = torch.nn.functional.embedding_bag(index, weight, sparse=True).sum()
        return torch.autograd.grad(out, weight)[0].coalesce()

    check(run, _leaf(full(10, 3)), torch.tensor([[1, 2], [2, 4]]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_sparse_embedding_trains(name: str) -> None:
    def train(device: str) -> Tensor:
        torch.manual_seed(1)
        table = torch.nn.Embedding(10, 4, sparse=True).to(device)
        head = torch.nn.Linear(4, 1).to(device)
        optimizer = OPTIMIZERS[name](list(table.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            rows = torch.tensor([[1, 2, 3 + step], [1, 1, 5]], device=device)
            head(table(rows)).tanh().sum().backward()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
            optimizer.step()
        return table.weight.detach().cpu()

    torch.testing.assert_close(train("tpu"), train("cpu"), rtol=1e-4, atol=1e-5)


def test_refused_calls_raise_what_the_cpu_raises() -> None:
    for refused in (
        lambda a: a + a.to_dense(),
        lambda a: torch.sparse.mm(a, torch.ones(3, 2, device=a.device)),
        lambda a: a * torch.sparse_coo_tensor(size=(4, 4), device=a.device),
        lambda a: a.index_select(0, torch.tensor([7], device=a.device)),
    ):
        with pytest.raises(Exception) as on_cpu:
            refused(matrix())
        with pytest.raises(on_cpu.type):
            refused(matrix().to("tpu"))
