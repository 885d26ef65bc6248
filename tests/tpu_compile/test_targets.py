"""Where a program for the TPU is written differently from one for the CPU, both compute the same.

The TPU's form is run here on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_tpu import _C
from torch_tpu.program import call, options

from ..opinfo.compare import all_ops, check_sample, samples


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
    assert any([check_sample(op, s, grad) for s, grad in samples(op, torch.float32, 10)])


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin, torch.sum])
def test_large_reductions(reduce: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(64, 32, 16)
    x[3, 4, 5] = torch.nan
    torch.testing.assert_close(
        reduce(x.to("tpu"), (0, 1)).cpu(), reduce(x, (0, 1)), equal_nan=True
    )


def test_grouped_convolution() -> None:
    x, w = torch.randn(2, 8, 12, 12), torch.randn(16, 2, 3, 3)

    def run(device: str) -> list[torch.Tensor]:
        a, k = (t.to(device).requires_grad_() for t in (x, w))
        out = F.conv2d(a, k, stride=2, padding=1, groups=4)
        out.square().sum().backward()
        return [out.detach().cpu(), a.grad.cpu(), k.grad.cpu()]

    torch.testing.assert_close(run("tpu"), run("cpu"), rtol=1e-4, atol=1e-4)
