"""Where PyTorch's CPU has a convention of its own, the device follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


Form = Callable[[torch.Tensor], Any]
# Results that share memory with the argument although no schema says so.
ALIASING: dict[str, Form] = {
    "_unsafe_view": lambda x: [aten._unsafe_view(x, [3, 4])],
    "unsafe_split": lambda x: torch.unsafe_split(x, 5),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [3, 9]),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 3),
}


@pytest.mark.parametrize("name", ALIASING)
def test_hidden_views_are_views(name: str) -> None:
    x = torch.arange(12.0)
    y = x.to("tpu")
    for tensor in (x, y):
        for i, part in enumerate(ALIASING[name](tensor)):
            part.add_(i + 1)
    assert torch.equal(y.cpu(), x)


# Calls whose out= argument is resized, or whose result is computed in its dtype.
OUT: dict[str, tuple[Callable[..., Any], int, torch.dtype]] = {
    "kron": (lambda x, out: torch.kron(x, x, out=out[0]), 1, torch.float32),
    "logsumexp": (lambda x, out: torch.logsumexp(x, (0, 1), out=out[0]), 1, torch.float32),
    "geqrf": (lambda x, out: torch.geqrf(x, out=out), 2, torch.float32),
    "lstsq": (lambda x, out: torch.linalg.lstsq(x, x, driver="gelsd", out=out), 4, torch.float32),
    "split": (lambda x, out: torch.split_with_sizes_copy(x, [1, 2], out=out), 2, torch.float32),
    "unbind": (lambda x, out: torch.unbind_copy(x, out=out), 3, torch.float32),
    "cumsum": (lambda x, out: torch.cumsum(x, 0, out=out[0]), 1, torch.int64),
    "cumprod": (lambda x, out: torch.cumprod(x, 1, out=out[0]), 1, torch.float64),
    "sum": (lambda x, out: torch.sum(x, 0, out=out[0]), 1, torch.float64),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(0,), (2, 7), (3, 3)], ids=str)
@pytest.mark.parametrize("name", OUT)
def test_out(name: str, shape: tuple[int, ...]) -> None:
    call, count, dtype = OUT[name]
    x = torch.tensor([[4.0, 1.5, 0.5], [0.25, 3.0, 1.0], [1.0, -1.0, 5.0]])
    kinds = [torch.int64 if name == "lstsq" and i == 2 else dtype for i in range(count)]
    want = [torch.zeros(shape, dtype=d) for d in kinds]
    got = [torch.zeros(shape, dtype=d, device="tpu") for d in kinds]
    call(x, want)
    call(x.to("tpu"), got)
    for w, g in zip(want, got, strict=True):
        assert g.shape == w.shape and g.dtype is w.dtype
        assert_close(g.cpu(), w)


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


def test_probabilities_outside_their_range_raise() -> None:
    """At the next synchronisation, in the CPU's class and words; NaN is outside too."""
    target = torch.tensor([0.0, 1.0, 1.0])
    for bad in (1.5, -0.5, float("nan")):
        x = torch.tensor([0.2, bad, 1.0])
        with pytest.raises(RuntimeError) as on_cpu:
            torch.nn.functional.binary_cross_entropy(x, target)
        y, wanted = x.to("tpu"), target.to("tpu")
        with pytest.raises(RuntimeError, match=str(on_cpu.value)):
            torch.nn.functional.binary_cross_entropy(y, wanted).cpu()
    right = torch.tensor([0.2, 0.0, 1.0])
    want = torch.nn.functional.binary_cross_entropy(right, target)
    got = torch.nn.functional.binary_cross_entropy(right.to("tpu"), target.to("tpu"))
    assert_close(got.cpu(), want)
