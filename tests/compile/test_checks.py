"""Errors that depend on values: a compiled graph raises what eager execution raises, at the next
synchronisation."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import torch_tpu  # noqa: F401


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="tpu", fullgraph=True, **kwargs)


def raised(fn, *args):
    """What ``fn`` raises, on reading its result at the latest; later work is not disturbed."""
    with pytest.raises(Exception) as caught:
        out = fn(*args)
        torch.tpu.synchronize()
        out.cpu()
    assert torch.ones(2, device="tpu").add(1).sum().item() == 4
    return caught.value


def test_assertions_on_values(counted):
    def f(x):
        torch._assert_async((x > 0).all(), "x must be positive")
        return x.log()

    step = compiled(f)
    good, bad = torch.ones(4, device="tpu"), torch.tensor([1.0, -1, 2, 3], device="tpu")
    counted()
    assert step(good).sum().item() == 0
    error = raised(step, bad)
    assert type(error) is type(raised(f, bad)) is RuntimeError
    assert str(error) == str(raised(f, bad)) == "x must be positive"
    assert counted()["fallbacks"] == 0
    assert step(good).sum().item() == 0


def test_the_first_assertion_that_fails_is_raised():
    def f(x):
        torch._assert_async((x < 9).all(), "below nine")
        torch._assert_async((x < 5).all(), "below five")
        return x + 1

    step = compiled(f)
    assert str(raised(step, torch.tensor([7.0], device="tpu"))) == "below five"
    assert str(raised(step, torch.tensor([9.0], device="tpu"))) == "below nine"
    assert step(torch.zeros(1, device="tpu")).item() == 1


def test_assertions_in_branches_and_loops():
    def branches(x):
        def then(x):
            torch._assert_async((x < 5).all(), "then: below five")
            return x + 1

        def otherwise(x):
            torch._assert_async((x > -5).all(), "otherwise: above minus five")
            return x - 1

        return torch.cond(x.sum() > 0, then, otherwise, (x,))

    step = compiled(branches)
    for value, text in ((7.0, "then: below five"), (-7.0, "otherwise: above minus five")):
        assert str(raised(step, torch.tensor([value], device="tpu"))) == text
    assert step(torch.tensor([1.0], device="tpu")).item() == 2


def test_an_index_out_of_range_names_op_and_line():
    table = torch.arange(12.0, device="tpu").view(6, 2)

    def f(i):
        return F.embedding(i, table) + 1

    step = compiled(f)
    assert step(torch.tensor([5], device="tpu")).sum().item() == 23
    error = raised(step, torch.tensor([6], device="tpu"))
    assert type(error) is IndexError
    assert re.search(r"embedding.*test_checks.py:\d+.*index out of range", str(error)), error


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_factorisation_that_fails(batch, counted):
    """PyTorch's own error, with the place in the batch and the leading minor."""
    matrix = torch.eye(3).expand(*batch, 3, 3).contiguous()
    bad = matrix.clone()
    bad[..., 1, 1] = -1
    if batch:
        bad[0] = matrix[0]
    step = compiled(torch.linalg.cholesky)
    counted()
    torch.testing.assert_close(step(matrix.to("tpu")).cpu(), matrix)
    assert counted()["executions"] == 1
    error = raised(step, bad.to("tpu"))
    with pytest.raises(torch.linalg.LinAlgError) as want:
        torch.linalg.cholesky(bad)
    assert type(error) is torch.linalg.LinAlgError
    assert str(error) == str(want.value)


def test_singular_systems():
    singular = torch.zeros(2, 2)
    for fn in (torch.linalg.inv, lambda a: torch.linalg.solve(a, a)):
        with pytest.raises(torch.linalg.LinAlgError) as want:
            fn(singular)
        error = raised(compiled(fn), singular.to("tpu"))
        assert (type(error), str(error)) == (torch.linalg.LinAlgError, str(want.value))


def test_checks_on_sizes():
    def f(x):
        torch._check(x.shape[0] % 2 == 0, lambda: "an even number of rows")
        return x.view(-1, 2).sum(1)

    step = compiled(f)
    assert step(torch.ones(4, device="tpu")).shape == (2,)
    with pytest.raises(Exception, match="an even number of rows"):
        compiled(f)(torch.ones(3, device="tpu"))


def test_prints_come_in_order(capsys):
    def f(x):
        torch._higher_order_ops.print("first {}", x.sum())
        y = x * 2
        torch._higher_order_ops.print("then {v} of {n}", v=y.max(), n=7)
        return y + 1

    step = compiled(f)
    for _ in range(2):
        assert step(torch.ones(3, device="tpu")).sum().item() == 9
    assert capsys.readouterr().out.splitlines() == ["first 3.0", "then 2.0 of 7"] * 2


def test_assertions_in_scans_and_in_backward_passes():
    def total(x):
        def step(carry, row):
            torch._assert_async((row < 5).all(), "rows below five")
            return carry + row, carry * row

        return torch._higher_order_ops.scan(step, torch.zeros(2, device=x.device), x)[0]

    step = compiled(total)
    assert step(torch.tensor([[1.0, 2], [3, 4]], device="tpu")).tolist() == [4, 6]
    assert str(raised(step, torch.tensor([[1.0, 2], [3, 9]], device="tpu"))) == "rows below five"

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            torch._assert_async((grad > 0).all(), "gradients above zero")
            return grad * 2

    loss = compiled(lambda x: Double.apply(x).sum())
    x = torch.ones(3, device="tpu", requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(x), x)
    assert gradient.tolist() == [2, 2, 2]
    error = raised(lambda: torch.autograd.grad(-loss(x), x)[0])
    assert str(error) == "gradients above zero"
