"""CSR, CSC, BSR and BSC tensors on the device, compared with the CPU."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tpu  # noqa: F401
from torch_tpu.eager import sparse

from .compare import check, gradients
from .test_coo import _leaf, coalesced, drawn, full, matrix


def csr() -> torch.Tensor:
    return coalesced().to_sparse_csr()


OPS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "to_dense": (lambda a: a.to_dense(), lambda: (csr(),)),
    "from dense": (
        lambda d: [d.to_sparse_csr(), d.to_sparse_csc(), d.to_sparse_bsr((1, 2))],
        lambda: (full(3, 4),),
    ),
    "from coo": (lambda a: [a.to_sparse_csr(), a.to_sparse_csc()], lambda: (matrix(),)),
    "between": (
        lambda a: [a.to_sparse_csc(), a.to_sparse_csc().to_sparse_csr(), a.to_sparse()],
        lambda: (csr(),),
    ),
    "blocks": (lambda d: d.to_sparse_bsr((1, 2)).to_sparse_bsc((1, 2)), lambda: (full(3, 4),)),
    "batched": (lambda d: d.to_sparse_csr().to_dense(), lambda: (torch.ones(2, 3, 4),)),
    "mm": (lambda a, d: a @ d, lambda: (csr(), full(4, 2))),
    "csc mm": (lambda a, d: a.to_sparse_csc() @ d, lambda: (full(3, 4), full(4, 2))),
    "mm sparse": (lambda a, b: a @ b, lambda: (csr(), drawn(4, 5).to_sparse_csr())),
    "mv": (lambda a, d: a @ d, lambda: (csr(), full(4))),
    "addmm": (
        lambda a, d, c: torch.addmm(c, a, d, beta=0.5),
        lambda: (csr(), full(4, 2), full(3, 2)),
    ),
    "linear": (lambda a, d: torch.nn.functional.linear(d, a), lambda: (csr(), full(2, 4))),
    "add": (lambda a, b: a + b, lambda: (csr(), drawn(3, 4).to_sparse_csr())),
    "dense + csr": (lambda a, d: d + a, lambda: (csr(), full(3, 4))),
    "mul": (lambda a: [a * 2, a * a], lambda: (csr(),)),
    "unary": (lambda a: [a.sin(), a.abs(), a.relu()], lambda: (csr(),)),
    "sum": (lambda a: a.sum(), lambda: (csr(),)),
    "sum dim": (
        lambda a: [a.sum((0,), keepdim=True), a.sum((1,), keepdim=True)],
        lambda: (csr(),),
    ),
    "sampled_addmm": (
        lambda a, x, y: torch.sparse.sampled_addmm(a, x, y, alpha=2, beta=0.5),
        lambda: (csr(), full(3, 5), full(5, 4)),
    ),
    "select": (lambda a: a[1], lambda: (csr(),)),
    "transpose": (lambda a: a.t(), lambda: (csr(),)),
    **{
        f"mm {reduce}": (
            lambda a, d, r=reduce: torch.sparse.mm(a, d, r),
            lambda: (csr(), full(4, 3)),
        )
        for reduce in ("sum", "mean", "amax", "amin")
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", list(OPS))
def test_op(name: str) -> None:
    fn, arguments = OPS[name]
    check(fn, *arguments())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reduce", [None, "sum", "mean", "amax", "amin"])
def test_gradient_of_mm(reduce: str | None) -> None:
    def product(a: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return a @ d if reduce is None else torch.sparse.mm(a, d, reduce)

    check(gradients(product), _leaf(csr()), _leaf(full(4, 3)))


def test_invariants_are_checked() -> None:
    def build(device: str) -> torch.Tensor:
        pointers = torch.tensor([0, 1, 2, 3], device=device)
        columns = torch.tensor([2, 0, 7], device=device)
        values = torch.ones(3, device=device)
        return torch.sparse_csr_tensor(pointers, columns, values, (3, 4), check_invariants=True)

    with pytest.raises(RuntimeError) as on_cpu:
        build("cpu")
    with pytest.raises(RuntimeError, match=str(on_cpu.value)[:40].replace("(", r"\(")):
        build("tpu")


def _kernels_of_the_cpu_alone(key: str) -> set[str]:
    """What PyTorch's own table registers for the CPU's sparse tensors and not for CUDA's."""
    table = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    found = set()
    op = ""
    for line in table.read_text().splitlines():
        if line.startswith("- func: "):
            op = line.removeprefix("- func: ").partition("(")[0]
        keys = {k.strip() for k in line.partition(":")[0].split(",")}
        if f"{key}CPU" in keys and f"{key}CUDA" not in keys:
            found.add(op)
    assert found
    return found


@pytest.mark.parametrize("key,own", [("Sparse", sparse.COO), ("SparseCsr", sparse.COMPRESSED)])
def test_every_kernel_of_the_cpu_alone_is_written(key: str, own: dict[str, Any]) -> None:
    assert _kernels_of_the_cpu_alone(key) <= set(own)
