"""Autograd on the device: threads, hooks, functions."""

from __future__ import annotations

import threading

import pytest
import torch


def test_backward() -> None:
    x = torch.arange(1.0, 5.0, device="tpu", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.device == x.device
    assert x.grad.tolist() == [2, 4, 6, 8]


def test_gradients_accumulate_and_clear() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    for _ in range(3):
        (x * 2).sum().backward()
    assert x.grad.tolist() == [6, 6]
    x.grad.zero_()
    assert x.grad.tolist() == [0, 0]


def test_higher_order() -> None:
    x = torch.tensor(2.0, device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad(x**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (12, 12)


def test_through_devices() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    y = (x.to("tpu:0") * 2).to("tpu:1") * 3
    y.cpu().sum().backward()
    assert x.grad.tolist() == [[6, 6], [6, 6]]


def test_a_gradient_on_another_device_is_refused() -> None:
    y = torch.ones(2, device="tpu", requires_grad=True) * 2
    with pytest.raises(RuntimeError):
        y.backward(torch.ones(3, device="tpu"))


def test_hooks() -> None:
    seen = []
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = x * 3
    y.register_hook(lambda grad: seen.append(grad.device.type))
    y.retain_grad()
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.tolist()))
    y.sum().backward()
    assert seen == ["tpu", [3, 3]]
    assert y.grad.tolist() == [1, 1]


def test_custom_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            assert torch.tpu.current_device() == 1
            return grad * 3 * x**2

    x = torch.tensor([2.0], device="tpu:1", requires_grad=True)
    Cube.apply(x).backward()
    assert x.grad.item() == 12


def test_gradcheck() -> None:
    x = torch.randn(3, 3, dtype=torch.float64, device="tpu", requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: (x @ x).tanh(), x)


def test_in_place_on_saved_tensors_is_noticed() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_modes() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference()
    assert (x.detach() * 2).requires_grad is False


def test_forward_mode() -> None:
    import torch.autograd.forward_ad as fwad

    with fwad.dual_level():
        x = fwad.make_dual(torch.full((2,), 3.0, device="tpu"), torch.ones(2, device="tpu"))
        assert fwad.unpack_dual(x * x).tangent.tolist() == [6, 6]


def test_saved_tensor_hooks() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = x.exp()
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_backward_from_several_threads() -> None:
    x = torch.ones(64, device="tpu", requires_grad=True)
    failures = []

    def work() -> None:
        try:
            for _ in range(10):
                (grad,) = torch.autograd.grad((x * x).sum(), x)
                assert (grad == 2).all()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_forward_mode_through_a_composite_that_writes_in_place() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    tangents = []
    for device in ("cpu", "tpu"):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.to(device), x.to(device))
            out = torch.autograd.forward_ad.unpack_dual(dual.quantile(0.25))
            tangents.append(out.tangent.cpu())
    torch.testing.assert_close(tangents[1], tangents[0])
