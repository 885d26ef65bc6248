"""Autocast on the device: bfloat16 unless told otherwise."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def ab() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4, device="tpu"), torch.randn(4, 4, device="tpu")


def test_the_default_is_bfloat16(ab) -> None:
    assert torch.get_autocast_dtype("tpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("tpu")
    with torch.autocast("tpu"):
        assert torch.is_autocast_enabled("tpu")
        assert torch.mm(*ab).dtype == torch.bfloat16
    assert torch.mm(*ab).dtype == torch.float32


def test_float16(ab) -> None:
    with torch.amp.autocast("tpu", dtype=torch.float16):
        assert (ab[0] @ ab[1]).dtype == torch.float16


def test_disabled_inside(ab) -> None:
    with torch.autocast("tpu"), torch.autocast("tpu", enabled=False):
        assert torch.mm(*ab).dtype == torch.float32


def test_policies(ab) -> None:
    a, b = ab
    half = a.bfloat16()
    with torch.autocast("tpu"):
        assert torch.nn.functional.linear(a, b).dtype == torch.bfloat16
        assert torch.exp(half).dtype == torch.float32
        assert torch.softmax(half, -1).dtype == torch.float32
        assert half.sum().dtype == torch.float32
        assert torch.norm(half).dtype == torch.float32
        assert torch.addcmul(a, half, half).dtype == torch.float32
        assert (half + half).dtype == torch.bfloat16
        assert torch.mm(a.double(), b.double()).dtype == torch.float64
        probabilities = torch.sigmoid(half)
        loss = torch.nn.functional.binary_cross_entropy(probabilities, torch.ones_like(half))
        assert loss.dtype == torch.float32


def test_other_devices_are_left_alone() -> None:
    a = torch.randn(2, 2)
    with torch.autocast("tpu"):
        assert (a @ a).dtype == torch.float32
    x = torch.randn(2, 2, device="tpu")
    with torch.autocast("cpu"):
        assert (x @ x).dtype == torch.float32


def test_an_unsupported_dtype_disables(ab) -> None:
    with pytest.warns(UserWarning, match="not supported"):
        context = torch.autocast("tpu", dtype=torch.int32)
    with context:
        assert torch.mm(*ab).dtype == torch.float32


def test_gradients_come_back_in_float32() -> None:
    layer = torch.nn.Linear(8, 4).to("tpu")
    x = torch.randn(2, 8, device="tpu")
    with torch.autocast("tpu"):
        out = layer(x)
        assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    expected = x.bfloat16().float().sum(0).expand(4, 8)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-2, atol=1e-2)


def test_the_weight_cache_casts_once() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4, device="tpu"))
    x = torch.randn(4, 4, device="tpu")
    with torch.autocast("tpu"):
        y = (x @ weight) @ weight
    y.float().sum().backward()
    assert weight.grad is not None


def test_custom_function_decorators() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu", cast_inputs=torch.float32)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    a = torch.randn(3, 3, device="tpu", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("tpu"):
        y = Product.apply(a, a)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert a.grad.dtype == torch.bfloat16


def test_grad_scaler() -> None:
    layer = torch.nn.Linear(4, 4).to("tpu")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("tpu", init_scale=2.0**8)
    before = layer.weight.detach().cpu().clone()
    with torch.autocast("tpu", dtype=torch.float16):
        loss = layer(torch.ones(2, 4, device="tpu")).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(layer.weight.cpu(), before - 0.1 * 2, rtol=1e-3, atol=1e-3)

    layer.weight.grad = torch.full_like(layer.weight, float("inf"))
    unchanged = layer.weight.detach().cpu().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight.detach().cpu(), unchanged)
    assert scaler.get_scale() == 2.0**7
