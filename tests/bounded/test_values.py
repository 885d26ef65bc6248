"""Ops over a length that changes, with hostile padding, against the CPU; forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_tpu import _C
from torch_tpu.program.bounded import policy

from .padding import is_bounded, pad

BOUND = 32
SIZES = (1, 2, 17, BOUND - 1, BOUND)
D = 8

torch.manual_seed(0)
W = torch.randn(D, D)
TABLE = torch.randn(50, D)
KERNEL = torch.randn(4, D, 3)
MASK = torch.ones(64, 64, dtype=torch.bool).tril()

# x is (2, n, D); constants are moved to x's device.
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ W.to(x.device),
    "linear": lambda x: F.linear(x, W.to(x.device)),
    "scores": lambda x: x @ x.transpose(1, 2),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x.transpose(1, 2), -1),
    "attention": lambda x: F.softmax(x @ x.transpose(1, 2), -1) @ x,
    "masked attention": lambda x: (
        F.softmax(
            (x @ x.transpose(1, 2)).masked_fill(
                ~MASK[: x.shape[1], : x.shape[1]].to(x.device), float("-inf")
            ),
            -1,
        )
        @ x
    ),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "layer_norm": lambda x: F.layer_norm(x, (D,)),
    "mean": lambda x: x.mean(1),
    "var": lambda x: x.var(1, unbiased=False),
    "std": lambda x: x.std((0, 1)),
    "sum of squares": lambda x: (x * x).sum(),
    "max": lambda x: x.amax(1),
    "max with indices": lambda x: x.max(1)[0],
    "argmax": lambda x: x.argmax(1).float(),
    "prod": lambda x: (x * 0.1 + 1).prod(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "mse": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "cross_entropy": lambda x: F.cross_entropy(
        x.reshape(-1, D), (x.detach().reshape(-1, D).argmax(1) + 1) % D
    ),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat with a token": lambda x: torch.cat([x, x[:, :1]], 1),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "pad": lambda x: F.pad(x, (0, 0, 2, 3), value=1.5),
    "arange": lambda x: x + torch.arange(x.shape[1], device=x.device)[:, None],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1).reshape(2, -1, 3 * D),
    "merge": lambda x: x.reshape(-1, D) * 2,
    "merge and split": lambda x: F.relu(x.reshape(-1, D)).reshape(2, -1, 2, D // 2),
    "heads": lambda x: (
        x.view(2, -1, 2, 4).transpose(1, 2) @ x.view(2, -1, 2, 4).permute(0, 2, 3, 1)
    ),
    "flatten": lambda x: x.flatten(),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "slice": lambda x: x[:, :-1] - x[:, 1:],
    "last": lambda x: x[:, -1],
    "gather": lambda x: x.gather(1, x.detach().argsort(1)),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, x.detach().argsort(1), x),
    "index_select": lambda x: x.index_select(1, torch.arange(x.shape[1], device=x.device).flip(0)),
    "embedding": lambda x: (
        F.embedding((x.detach()[..., 0].abs() * 9).long() % 50, TABLE.to(x.device)) + x
    ),
    "sort": lambda x: x.sort(1)[0],
    "sort descending": lambda x: x.sort(1, descending=True)[0],
    "topk": lambda x: x.topk(1, 1)[0],
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: (x * 0.1 + 1).cumprod(1),
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), KERNEL.to(x.device), padding=1),
    "avg_pool": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1),
    "max_pool": lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1),
    "where": lambda x: torch.where(x > 0, x, -0.5 * x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "gelu": lambda x: F.gelu(x),
    "tril": lambda x: (x @ x.transpose(1, 2)).tril(),
    "outer": lambda x: torch.einsum("bnd,bmd->bnm", x, x),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
}
# Refused for now: they have programs for their own sizes.
NOT_BOUNDED = frozenset({"cumprod"})


@pytest.mark.parametrize("name", list(OPS))
def test_against_the_cpu(name: str) -> None:
    op = OPS[name]
    policy.clear()
    for n in SIZES:
        torch.manual_seed(n)
        x = torch.randn(2, n, D)
        on_device = x.to("tpu")
        if n >= 2:
            _C.pad_storage(on_device, [0, BOUND, 0], 0xFF)  # NaN beyond the contents
        x.requires_grad_()
        on_device.requires_grad_()
        want, got = op(x), op(on_device)
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=2e-5, atol=2e-5)
        if want.grad_fn is not None:
            weight = torch.randn_like(want)
            want.backward(weight)
            got.backward(weight.to("tpu"))
            assert x.grad is not None and on_device.grad is not None
            torch.testing.assert_close(on_device.grad.cpu(), x.grad, rtol=2e-5, atol=2e-5)
    broken = {f.reason for f in policy._families.values() if f.reason.startswith("internal")}
    assert not broken, broken


@pytest.mark.parametrize("name", [n for n in OPS if n not in NOT_BOUNDED])
def test_one_program_for_all_sizes(name: str) -> None:
    """From the second size of a bucket on nothing is compiled."""
    op = OPS[name]

    def run(n: int) -> None:
        x = torch.randn(2, n, D).to("tpu")
        _C.pad_storage(x, [0, BOUND, 0], 0xFF)
        op(x.requires_grad_()).detach().cpu()

    # Tensors made on the way (masks, positions) are known to change at their third size.
    for n in (18, 19, 20, 21):
        run(n)
    torch.tpu.synchronize()
    before = _C.stats()["compiles"] + _C.stats()["disk_hits"]
    for n in (22, 25, 27):
        run(n)
    assert _C.stats()["compiles"] + _C.stats()["disk_hits"] == before


def test_dropout_draws_and_scales() -> None:
    x = pad(torch.ones(4, 20, 50).to("tpu"), "all")
    y = F.dropout(x, 0.25)
    assert is_bounded(y)
    values = y.cpu()
    assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((values == 0).float().mean().item() - 0.25) < 0.03


def test_several_dims_and_shared_symbols() -> None:
    for n, m in [(5, 7), (6, 9), (14, 3), (7, 7)]:
        x, y = torch.randn(n, m), torch.randn(m, n)
        a, c = (pad(t.to("tpu"), "all") for t in (x, y))
        torch.testing.assert_close((a @ c).cpu(), x @ y)
        torch.testing.assert_close((a + c.T).cpu(), x + y.T)
        torch.testing.assert_close(torch.cat([a, c.T]).sum(0).cpu(), torch.cat([x, y.T]).sum(0))


def test_sizes_that_do_not_fit_raise_as_ever() -> None:
    a = pad(torch.randn(5, 8).to("tpu"), "first")
    c = pad(torch.randn(6, 8).to("tpu"), "first")
    with pytest.raises(RuntimeError, match="size of tensor a"):
        a + c
    with pytest.raises(RuntimeError):
        a @ c
    with pytest.raises(IndexError):
        a.sum(2)


def test_in_place_and_views() -> None:
    x = torch.randn(3, 13, 8)
    a = pad(x.clone().to("tpu"), "all")
    for t in (x, a):
        t[:, 2:5] *= 2
        t.add_(1)
        t[1].zero_()
        t.transpose(1, 2)[..., -1].fill_(4)
        t[:, 3] = t[:, 4]
    torch.testing.assert_close(a.cpu(), x)
    a.resize_(2, 13, 8)
    torch.testing.assert_close(a.cpu(), x[:2])


def test_a_padded_tensor_is_a_tensor(tmp_path: Any) -> None:
    x = torch.randn(5, 6)
    a = pad(x.to("tpu"), "all")
    assert a.is_contiguous() and a.untyped_storage().nbytes() == x.nbytes
    assert a[2, 3].item() == x[2, 3].item()
    assert torch.equal(a.clone().cpu(), x)
    assert torch.equal(a.to("tpu:1").cpu(), x)
    assert torch.equal(a.view(30).cpu(), x.view(30))
    assert torch.equal(a.view(torch.int32).cpu(), x.view(torch.int32))
    torch.save(a, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", map_location="cpu"), x)
    b = torch.empty(5, 6, device="tpu")
    b.copy_(a)
    b.set_(a)
    assert torch.equal(b.cpu(), x)
