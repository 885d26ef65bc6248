"""Nested tensors, strided and jagged, on the device, compared with the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tpu  # noqa: F401

from .compare import check

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def parts(width: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    return [torch.randn(n, width, generator=generator) for n in (2, 4)]


def strided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([a, b])


def jagged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([a, b], layout=torch.jagged)


def _norm(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(3, device=x.device)
    return torch.nn.functional.layer_norm(x, (3,), weight, weight)


COMMON: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: torch.nn.functional.gelu(x * 2 + x),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(5, 3, device=x.device)),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": _norm,
    "unbind": lambda x: x.unbind(),
    "padded": lambda x: x.to_padded_tensor(0.5),
}


def _padded(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to_padded_tensor(-7.0) if x.is_nested else x
    return [_padded(y) for y in x]


@pytest.mark.parametrize("name", list(COMMON))
@pytest.mark.parametrize("make", [strided, jagged])
def test_op(name: str, make: Callable[..., torch.Tensor]) -> None:
    check(lambda a, b: _padded(COMMON[name](make(a, b))), *parts())


@pytest.mark.parametrize("make", [strided, jagged])
def test_gradient(make: Callable[..., torch.Tensor]) -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        out = _norm(make(a, b) * 2).to_padded_tensor(0.0)
        return torch.autograd.grad(out.square().sum() + (out**3).sum(), [a, b])

    check(run, *[x.requires_grad_() for x in parts()])


def test_matmul() -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        x = strided(a, b)
        return _padded(torch.matmul(x, x.transpose(1, 2)))

    check(run, *parts())


@pytest.mark.parametrize("make", [strided, jagged])
def test_attention(make: Callable[..., torch.Tensor]) -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        x = make(a, b)
        if make is jagged:
            x = x.unflatten(-1, (2, 4)).transpose(1, 2)
        else:
            x = torch.nested.as_nested_tensor([y.view(-1, 2, 4).transpose(0, 1) for y in (a, b)])
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return [y.contiguous() for y in out.unbind()]

    check(run, *parts(8))


def test_jagged_from_padded() -> None:
    def run(x: torch.Tensor) -> Any:
        start = torch.tensor([0, 1], device=x.device)
        length = torch.tensor([2, 3], device=x.device)
        nested = torch.nested.narrow(x, 1, start, length, layout=torch.jagged)
        return nested.contiguous().values()

    check(run, torch.arange(30.0).view(2, 5, 3))
    offsets = torch.tensor([0, 2, 5])
    check(
        lambda x, o: torch.ops.aten._padded_dense_to_jagged_forward(x, [o], 5),
        torch.arange(30.0).view(2, 5, 3).to(torch.float32),
        offsets,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_transformer_encoder_takes_its_fast_path(masked: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    on_cpu = torch.nn.TransformerEncoder(layer, 1).eval()
    on_device = copy.deepcopy(on_cpu).to("tpu")
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool() if masked else None
    with torch.no_grad():
        want = on_cpu(x, src_key_padding_mask=mask)
        before = torch.tpu.stats()["fallbacks"]
        got = on_device(x.to("tpu"), src_key_padding_mask=None if mask is None else mask.to("tpu"))
        assert torch.tpu.stats()["fallbacks"] == before
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
