"""torch.compile with sizes that change: one program a bucket, right for every size."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import _C
from torch_tpu.program.bounded import policy


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    policy.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        return x + self.out(F.softmax(scores, -1) @ v)


def programs() -> int:
    return int(_C.stats()["compiles"] + _C.stats()["disk_hits"])


@pytest.mark.strict_mode  # Fused mode compiles what follows a graph, too
def test_training_over_many_lengths() -> None:
    torch.manual_seed(0)
    on_cpu = Block()
    on_device = copy.deepcopy(on_cpu).to("tpu")

    def loss(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x).square().mean()

    compiled = torch.compile(loss, backend="tpu", dynamic=True, fullgraph=True)
    counts = []
    for n in (20, 31, 17, 25, 32, 33, 64, 50):
        x = torch.randn(2, n, 16)
        moved = x.to("tpu").requires_grad_()
        x.requires_grad_()
        before = programs()
        got = compiled(on_device, moved)
        got.backward()
        want = loss(on_cpu, x)
        want.backward()
        counts.append(programs() - before)
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-6)
        assert moved.grad is not None
        torch.testing.assert_close(moved.grad.cpu(), x.grad, rtol=1e-4, atol=1e-6)
    for a, c in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), c.grad, rtol=1e-4, atol=1e-5)
    assert counts[2:5] == [0, 0, 0], counts  # within the bucket of 32
    assert counts[6:] == [0, 0], counts  # within that of 64


@pytest.mark.parametrize("buckets", [1, 4])
def test_as_many_programs_as_buckets(buckets: int) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, 0).cumsum(0).mean(1)

    options = {"num_dynamic_buckets": buckets}
    compiled = torch.compile(f, backend="tpu", options=options, fullgraph=True)
    before = programs()
    for n in (2, 3, 64, 100, 511, 512, 513, 1000, 1025, 1536, 2047, 2048):
        x = torch.randn(n, 4)
        moved = x.to("tpu")
        torch._dynamo.mark_dynamic(moved, 0, min=2, max=2048)
        torch.testing.assert_close(compiled(moved).cpu(), f(x), rtol=1e-4, atol=1e-5)
    assert programs() - before == buckets


def test_sizes_in_python() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        n = x.shape[0]
        if n > 100:
            return x[:100].sum(0), n * 2
        return x.sum(0) / n, n + 1

    compiled = torch.compile(f, backend="tpu", dynamic=True)
    for n in (5, 60, 99, 150, 300):
        x = torch.randn(n, 3)
        got, number = compiled(x.to("tpu"))
        want, expected = f(x)
        assert number == expected
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_bounds_from_checks() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] <= 200)
        return x.exp().sum()

    compiled = torch.compile(f, backend="tpu", dynamic=True)
    before = programs()
    for n in (3, 90, 200):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x.to("tpu")).cpu(), x.exp().sum())
    assert programs() - before == 1
