"""An infinity or a NaN reaches the results that read it and no others, as on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import torch_tpu  # noqa: F401

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.interpolate(x[0], size=9, mode="linear"),
    "bilinear": lambda x: F.interpolate(x, size=(9, 5), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(9, 5), mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True),
    "area": lambda x: F.interpolate(x, size=(4, 3), mode="area"),
    "adaptive 1d": lambda x: F.adaptive_avg_pool1d(x[0], 3),
    "adaptive 2d": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive 3d": lambda x: F.adaptive_avg_pool3d(x, (2, 4, 3)),
    "average": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
    "running maximum": lambda x: torch.cummax(x, -1).values,
}
# Their gradients multiply by weights that are zero on the CPU as well, in another order.
FORWARD_ONLY = frozenset({"bilinear", "bicubic"})


def with_nonfinite(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[[3, 7, 20]] = torch.tensor([math.nan, math.inf, -math.inf])
    return x


@pytest.mark.parametrize("name", CASES)
def test_nonfinite_stays_apart(name: str) -> None:
    x = with_nonfinite((2, 3, 7, 8)).requires_grad_()
    y = x.detach().to("tpu").requires_grad_()
    want, got = CASES[name](x), CASES[name](y)
    assert want.isfinite().any() and not want.isfinite().all()
    assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    if name in FORWARD_ONLY:
        return
    grad = with_nonfinite(tuple(want.shape))
    want.backward(grad)
    got.backward(grad.to("tpu"))
    assert x.grad is not None and y.grad is not None
    assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4, equal_nan=True)
