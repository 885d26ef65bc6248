"""Where a program for the TPU is written differently from one for the CPU, both compute the same.

The TPU's form is run here on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.opinfo.compare import all_ops, check_sample, samples
from torch_tpu import _C
from torch_tpu.program import call, options


@pytest.fixture(autouse=True)
def tpu_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs are written for the TPU, whichever thread asks."""
    compile_call = call.compile_call

    def for_tpu(*args: Any) -> Any:
        with options.for_target("tpu"):
            return compile_call(*args)

    monkeypatch.setattr(call, "compile_call", for_tpu)
    _C.clear_programs()
    yield
    _C.clear_programs()


@pytest.mark.parametrize(
    "name",
    [
        "nn.functional.conv1d",
        "nn.functional.conv2d",
        "nn.functional.conv3d",
        "nn.functional.conv_transpose1d",
        "nn.functional.conv_transpose2d",
        "nn.functional.conv_transpose3d",
        "amax",
        "sum",
        "softmax",
    ],
)
def test_opinfo(name: str) -> None:
    op = all_ops()[name]
    ran = [check_sample(op, s, grad) for s, grad in samples(op, torch.float32, 4)]
    assert any(ran)


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin, torch.sum])
def test_large_reductions(reduce: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(64, 32, 16)
    x[3, 4, 5] = torch.nan
    actual = reduce(x.to("tpu"), (0, 1)).cpu()
    torch.testing.assert_close(actual, reduce(x, (0, 1)), equal_nan=True, rtol=1e-4, atol=1e-4)


def test_integer_matmul() -> None:
    x, y = torch.randint(-(2**62), 2**62, (3, 4, 5)), torch.randint(-(2**62), 2**62, (3, 5, 2))
    for a, c in ((x, y), (x[0], y[0]), (x[0], y[0, :, 0]), (x[0, 0], y[0, :, 0]), (x, y[0])):
        torch.testing.assert_close((a.to("tpu") @ c.to("tpu")).cpu(), a @ c)
    torch.testing.assert_close((x[:, :, :0].to("tpu") @ y[:, :0].to("tpu")).cpu(), (x @ y) * 0)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 257, 600, 1024])
def test_double_precision_transforms(n: int) -> None:
    x = torch.randn(3, n, dtype=torch.float64)
    for transform in (torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.ihfft):
        torch.testing.assert_close(transform(x.to("tpu")).cpu(), transform(x))
    half = torch.fft.rfft(x)
    torch.testing.assert_close(torch.fft.irfft(half.to("tpu"), n).cpu(), x)
    torch.testing.assert_close(torch.fft.fft2(x.to("tpu")).cpu(), torch.fft.fft2(x))


def test_grouped_convolution() -> None:
    x, w = torch.randn(2, 8, 12, 12), torch.randn(16, 2, 3, 3)

    def run(device: str) -> list[torch.Tensor]:
        a, k = (t.to(device).requires_grad_() for t in (x, w))
        out = F.conv2d(a, k, stride=2, padding=1, groups=4)
        out.square().sum().backward()
        return [out.detach().cpu(), a.grad.cpu(), k.grad.cpu()]

    torch.testing.assert_close(run("tpu"), run("cpu"), rtol=1e-4, atol=1e-4)


def test_grouped_products() -> None:
    """Tiles are larger on a TPU."""
    ends = torch.tensor([100, 100, 530, 600], dtype=torch.int32)
    x, y, z = torch.randn(600, 8), torch.randn(4, 8, 12), torch.randn(600, 12)
    on_tpu = [t.to("tpu") for t in (x, y, z, ends)]
    rows = torch._grouped_mm(on_tpu[0], on_tpu[1], on_tpu[3]).cpu()
    torch.testing.assert_close(rows, torch._grouped_mm(x, y, ends), rtol=1e-4, atol=1e-4)
    sums = torch._grouped_mm(on_tpu[0].T, on_tpu[2], on_tpu[3]).cpu()
    torch.testing.assert_close(sums, torch._grouped_mm(x.T, z, ends), rtol=1e-4, atol=1e-3)
