"""Products of int8 and float8 operands: values beside the CPU's own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torch_tpu import _C

aten = torch.ops.aten
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def no_fallback() -> object:
    before = _C.stats()["fallbacks"]
    yield
    assert _C.stats()["fallbacks"] == before


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def int8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def both(call: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """What the CPU and the device make of it."""
    return call(*tensors), call(*(t.to("tpu") for t in tensors)).cpu()


@pytest.mark.parametrize("shape", [(32, 16, 24), (17, 1, 8), (32, 512, 8)], ids=str)
def test_int_mm(shape: tuple[int, int, int]) -> None:
    """Exact, also where an int8 or float32 accumulator would not be."""
    m, k, n = shape
    want, got = both(torch._int_mm, int8(m, k), int8(k, n, seed=1))
    assert got.dtype is torch.int32
    assert torch.equal(got, want)


def test_int_mm_of_extremes() -> None:
    x, y = torch.full((17, 4096), -128, dtype=torch.int8), torch.full((4096, 8), 127).to(torch.int8)
    want, got = both(torch._int_mm, x, y)
    assert torch.equal(got, want)
    assert want[0, 0] == -128 * 127 * 4096


def test_int_mm_out_and_transposed() -> None:
    x, y = int8(32, 16), int8(24, 16, seed=1)
    want = torch._int_mm(x, y.t())
    out = torch.empty(32, 24, dtype=torch.int32, device="tpu")
    torch._int_mm(x.to("tpu"), y.to("tpu").t(), out=out)
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weight_int8pack_mm(dtype: torch.dtype) -> None:
    x, scales = random(5, 64).to(dtype), random(32, seed=2, scale=0.01).abs().to(dtype)
    weight = int8(32, 64, seed=1)
    want, got = both(aten._weight_int8pack_mm, x, weight, scales)
    exact = x.double() @ weight.double().t() * scales.double()
    largest, step = exact.abs().max().item(), torch.finfo(dtype).eps
    assert_close(got, want, rtol=0, atol=4 * step * largest)
    assert_close(got.double(), exact, rtol=0, atol=2 * step * largest)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_scaled_mm(dtype: torch.dtype, out_dtype: torch.dtype, rows: bool) -> None:
    m, k, n = 16, 64, 32
    x = random(m, k).to(dtype)
    y = random(n, k, seed=1).to(dtype).t()
    scale_x = random(m, 1, seed=2).abs() if rows else torch.tensor(0.5)
    scale_y = random(1, n, seed=3).abs() if rows else torch.tensor(0.25)

    def call(x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor) -> Tensor:
        return torch._scaled_mm(x, y, scale_x, scale_y, out_dtype=out_dtype)

    tensors = (x, y, scale_x, scale_y)
    got = call(*(t.to("tpu") for t in tensors)).cpu()
    want = (x.double() @ y.double()) * scale_x.double() * scale_y.double()
    assert got.dtype is out_dtype
    assert_close(got, want.to(out_dtype), rtol=2 * torch.finfo(out_dtype).eps, atol=1e-5)
    if dtype is torch.float8_e4m3fn or not rows:
        assert_close(got, call(*tensors), rtol=2 * torch.finfo(out_dtype).eps, atol=1e-4)


def test_scaled_mm_bias_and_float8_result() -> None:
    x, y = random(16, 32).to(FLOAT8[0]), random(16, 32, seed=1).to(FLOAT8[0]).t()
    one, bias = torch.tensor(1.0), random(16, seed=2).to(torch.bfloat16)
    got = torch._scaled_mm(
        *(t.to("tpu") for t in (x, y, one, one)), bias=bias.to("tpu"), out_dtype=torch.bfloat16
    )
    want = x.double() @ y.double() + bias.double()
    assert_close(got.cpu(), want.to(torch.bfloat16), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    "source", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
def test_conversion_to_float8(dtype: torch.dtype, source: torch.dtype) -> None:
    """Rounds as the CPU does, also at ties, subnormals and past the largest number."""
    special = torch.tensor(
        [math.inf, -math.inf, math.nan, 1e6, -1e6, 0.0, -0.0, 448.0, 464.0, 500.0]
    )
    ties = torch.arange(-256, 256) / 32
    x = torch.cat([random(512, scale=300.0), random(512, seed=1, scale=1e-2), ties, special])
    want, got = both(lambda t: t.to(dtype).float(), x.to(source))
    assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    zeros = want == 0
    assert torch.equal(got[zeros].signbit(), want[zeros].signbit())


def test_integers_to_float8() -> None:
    want, got = both(lambda t: t.to(FLOAT8[0]).float(), torch.tensor([-1000, -3, 0, 17, 447, 1000]))
    assert torch.equal(got, want)
