"""Ops whose result's shape or whose error depends on values: read once, no CPU fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import torch_tpu  # noqa: F401


@pytest.fixture(autouse=True)
def no_fallback() -> Any:
    before = torch.tpu.stats()["fallbacks"]
    yield
    assert torch.tpu.stats()["fallbacks"] == before


def _full(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


SYSTEMS = {
    "tall": (_full(5, 3), _full(5, 2)),
    "wide": (_full(3, 5), _full(3, 2)),
    "rank one": (_full(5, 3) @ torch.ones(3, 3), _full(5, 2)),
    "vector": (_full(5, 3), _full(5)),
    "batch": (_full(2, 5, 3), _full(2, 5, 2)),
}


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss", None])
@pytest.mark.parametrize("system", list(SYSTEMS))
def test_lstsq_drivers(system: str, driver: str | None) -> None:
    if driver == "gels" and system == "rank one":
        pytest.skip("gels is defined for full rank only")
    a, b = SYSTEMS[system]
    want = torch.linalg.lstsq(a, b, driver=driver)
    got = torch.linalg.lstsq(a.to("tpu"), b.to("tpu"), driver=driver)
    for w, g in zip(want, got, strict=True):
        assert_close(g.cpu(), w, rtol=1e-4, atol=1e-4)


def test_tensor_split_by_a_device_tensor() -> None:
    x = torch.arange(14.0, device="tpu").view(7, 2).requires_grad_()
    parts = torch.tensor_split(x, torch.tensor([1, 4], device="tpu"))
    assert [len(p) for p in parts] == [1, 3, 3]
    parts[1].sum().backward()
    assert x.grad is not None and x.grad.sum().item() == 6


def test_cholesky_raises_for_an_indefinite_matrix() -> None:
    a = torch.eye(3, device="tpu") * 4
    assert_close(torch.cholesky(a).cpu(), torch.eye(3) * 2)
    with pytest.raises(RuntimeError, match="not positive-definite"):
        torch.cholesky(-a)


def test_assert_async() -> None:
    torch._assert_async(torch.ones((), device="tpu"))
    with pytest.raises(RuntimeError, match="nonzero"):
        torch._assert_async(torch.zeros((), device="tpu"))


@pytest.mark.parametrize("op", [torch._foreach_addcmul, torch._foreach_addcdiv])
def test_foreach_with_a_cpu_tensor_of_scalars(op: Any) -> None:
    lists = [[_full(3) + i + j for i in range(2)] for j in range(3)]
    on_device = [[x.to("tpu") for x in entries] for entries in lists]
    for first in op(*on_device, torch.tensor([1.0, 2.0])):
        first.cpu()
    before = torch.tpu.stats()["compiles"]
    scalars = torch.tensor([0.5, -3.0])
    for got, want in zip(op(*on_device, scalars), op(*lists, scalars), strict=True):
        assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    assert torch.tpu.stats()["compiles"] == before


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool]
)
def test_hash_tensor(dtype: torch.dtype) -> None:
    x = (_full(3, 5) * 50).to(dtype)
    assert torch.equal(torch.hash_tensor(x.to("tpu")).cpu(), torch.hash_tensor(x))
    assert torch.equal(torch.hash_tensor(x.to("tpu"), 1).cpu(), torch.hash_tensor(x, 1))
