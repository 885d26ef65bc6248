"""Where PyTorch's CPU has a convention of its own, the device follows it."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import torch_tpu  # noqa: F401

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_truncated_quotient_is_rounded_first(dtype: torch.dtype) -> None:
    """17.97 is 18 in bfloat16, before its fraction is dropped."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20000, generator=generator).mul(9).to(dtype) for _ in range(2))
    want = torch.div(x, y, rounding_mode="trunc")
    assert not torch.equal(want, (x.double() / y.double()).trunc().to(dtype))
    got = torch.div(x.to("tpu"), y.to("tpu"), rounding_mode="trunc")
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_evaluation_keeps_no_batch_statistics(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4).to(dtype)
    zeros, ones = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    calls = {
        "native": lambda *t: aten.native_batch_norm(*t, False, 0.1, 1e-5),
        "legit": lambda *t: aten._native_batch_norm_legit(*t, False, 0.1, 1e-5),
        "no training": lambda *t: aten._native_batch_norm_legit_no_training(*t, 0.1, 1e-5),
        "no update": lambda *t: aten._batch_norm_no_update(*t, 0.1, 1e-5),
    }
    tensors = (x, ones, zeros, zeros, ones)
    for name, call in calls.items():
        want = call(*tensors)
        got = call(*(t.to("tpu") for t in tensors))
        for a, b in zip(want, got, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert_close(got[0].cpu(), want[0])
