"""float32 products by bfloat16 passes: error sizes are those of theory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from torch_tpu import testing
from torch_tpu.tpu.numerics import Precision, emulate_precision, precision

N = 512


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def convolution(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    images = x.reshape(8, N // 8, 8, N // 8)
    return F.conv2d(images, y.reshape(N // 2, N // 8, 4, 4)[:64])


@pytest.mark.parametrize("op", [matmul, convolution])
@pytest.mark.parametrize("mode, bits", [(Precision.DEFAULT, 8), (Precision.HIGH, 16)])
def test_error_sizes(op: Callable[..., torch.Tensor], mode: Precision, bits: int) -> None:
    """Operands rounded to ``bits`` bits: relative root mean square error about 2^-bits / sqrt(3).

    Uniform rounding of a significand in [1, 2) to b bits has error 2^-b / sqrt(3) at most, 0.43 of
    2^-b on average over magnitudes; two operands give sqrt(2) of it.
    """
    torch.manual_seed(0)
    x, y = torch.randn(N, N), torch.randn(N, N)
    exact = op(x.double(), y.double())
    with emulate_precision(), precision(mode):
        got = op(x.to("tpu"), y.to("tpu")).cpu()
    error = ((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert 0.15 * 2.0**-bits < error < 1.2 * 2.0**-bits


def test_highest_is_float32() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(N, N), torch.randn(N, N)
    exact = x.double() @ y.double()
    plain = (x.to("tpu") @ y.to("tpu")).cpu().double() - exact
    with emulate_precision(), precision(Precision.HIGHEST):
        got = (x.to("tpu") @ y.to("tpu")).cpu().double() - exact
    assert got.square().mean().sqrt() < 3 * plain.square().mean().sqrt()


def test_one_pass_is_the_product_of_rounded_operands() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 96), torch.randn(96, 32)
    expected = x.bfloat16().float() @ y.bfloat16().float()
    with emulate_precision(), precision(Precision.DEFAULT):
        got = (x.to("tpu") @ y.to("tpu")).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_without_it_nothing_changes_and_infinities_pass() -> None:
    x = torch.tensor([[1.0, 1.0001], [torch.inf, 3.0]])
    y = torch.eye(2) + 1
    with precision(Precision.DEFAULT):
        torch.testing.assert_close((x.to("tpu") @ y.to("tpu")).cpu(), x @ y)
    with emulate_precision(), precision(Precision.HIGHEST):
        got = (x.to("tpu") @ y.to("tpu")).cpu()
    torch.testing.assert_close(got, x @ y, rtol=1e-6, atol=1e-6)


def test_other_dtypes_are_left_alone() -> None:
    x = torch.randn(16, 16, dtype=torch.float64)
    with emulate_precision(), precision(Precision.DEFAULT):
        torch.testing.assert_close((x.to("tpu") @ x.to("tpu")).cpu(), x @ x)


@pytest.mark.parametrize("mode", list(Precision))
@pytest.mark.parametrize("n", [8, 512])
def test_tolerances_hold_and_are_not_slack(mode: Precision, n: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, n), torch.randn(n, 64)
    exact = (x.double() @ y.double()).float()
    with emulate_precision(), precision(mode):
        got = (x.to("tpu") @ y.to("tpu")).cpu()
        testing.assert_close(got, exact, contraction=n)
    lower = {Precision.HIGHEST: Precision.HIGH, Precision.HIGH: Precision.DEFAULT}.get(mode)
    if lower is not None:
        with emulate_precision(), precision(lower):
            worse = (x.to("tpu") @ y.to("tpu")).cpu()
        with pytest.raises(AssertionError, match="elements differ"):
            testing.assert_close(worse, exact, contraction=n, precision=mode)


def test_report_says_where_and_how() -> None:
    expected = torch.arange(12.0).reshape(3, 4) + 1
    actual = expected.clone()
    actual[1, 2] += 1
    with pytest.raises(AssertionError) as caught:
        testing.assert_close(actual, expected)
    text = str(caught.value)
    assert "1 of 12 elements differ" in text and "worst at (1, 2): got 8.0; expected 7.0" in text
    assert "only at 1 of 3 positions of dim 0: [1]" in text or "only at 1 of 4" in text
    with pytest.raises(AssertionError, match="shapes differ: got"):
        testing.assert_close(actual, expected[0])
    with pytest.raises(AssertionError, match="dtypes differ"):
        testing.assert_close(actual, expected.double())
    with pytest.raises(AssertionError, match="size of bfloat16 rounding"):
        x = torch.randn(64, 64)
        testing.assert_close(x.bfloat16().float() * 1.001, x)
    with pytest.raises(AssertionError, match="NaN only in what was got: 1"):
        testing.assert_close(torch.tensor([torch.nan, 1.0]), torch.tensor([0.0, 1.0]))
    testing.assert_close({"a": expected, "b": 3}, {"a": expected, "b": 3})
    with pytest.raises(AssertionError, match="structures differ"):
        testing.assert_close([expected], [expected, expected])
