"""Debug mode: errors that tell line, op and arguments; the search for NaN and Inf."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch

from torch_tpu import _C

EagerMode = torch.tpu.EagerMode
DEBUG = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


def line_after(text: str) -> int:
    """The number of the line of this file that holds ``text`` in the calling test."""
    frame = inspect.currentframe().f_back
    lines, start = inspect.getsourcelines(frame.f_code)
    return start + next(
        i for i, line in enumerate(lines) if text in line and "line_after" not in line
    )


@pytest.mark.strict_mode
def test_the_mode_holds_inside() -> None:
    with torch.tpu.debug():
        assert torch.tpu.eager_mode is DEBUG
        with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
            assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
    # Nothing of it is left: a NaN passes.
    assert torch.full((2,), -1.0, device="tpu").log().isnan().all()


def test_an_asynchronous_error_is_raised_at_its_line() -> None:
    x = torch.ones(3, device="tpu")
    index = torch.tensor([5], device="tpu")
    with pytest.raises(IndexError, match="index out of range") as caught, torch.tpu.debug():
        x[index]  # here
    message = str(caught.value)
    assert f"test_debug.py:{line_after('# here')} in test_an_asyn" in message
    assert "in aten::index.Tensor(self=float32[3], indices=[int64[1]])" in message


def test_a_shape_error_carries_a_note() -> None:
    a, b = torch.ones(3, device="tpu"), torch.ones(2, 4, device="tpu").t()
    with pytest.raises(RuntimeError, match="must match the size") as caught, torch.tpu.debug():
        torch.add(a, b, alpha=2)  # here
    (note,) = caught.value.__notes__
    assert f"test_debug.py:{line_after('# here')} in test_a_shape" in note
    assert (
        "in aten::add.Tensor(self=float32[3], other=float32[4, 2] strides [1, 4], alpha=2)" in note
    )


@pytest.mark.strict_mode
def test_strict_mode_leaves_errors_alone() -> None:
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        torch.ones(3, device="tpu") + torch.ones(4, device="tpu")
    assert not hasattr(caught.value, "__notes__")


def test_nan_is_found_where_it_is_made() -> None:
    x = torch.tensor([1.0, -1.0], device="tpu")
    with (
        pytest.raises(RuntimeError, match="aten::log: made NaN") as caught,
        torch.tpu.debug(check_nan=True),
    ):
        y = x * 2
        z = y.log()  # here
        z + 1
    assert f":{line_after('# here')} in " in str(caught.value)
    assert "in aten::log(self=float32[2])" in str(caught.value)


def test_nan_that_was_given_is_no_error() -> None:
    x = torch.tensor([1.0, float("nan")], device="tpu")
    with torch.tpu.debug(check_nan=True):
        assert (x + 1).isnan().sum() == 1
        assert torch.full((2,), float("nan"), device="tpu").isnan().all()
        x.mul_(2)


def test_nan_written_in_place_is_found() -> None:
    x = torch.zeros(4, 4, device="tpu")
    with (
        pytest.raises(RuntimeError, match=r"aten::div_\.Tensor: made NaN in "),
        torch.tpu.debug(check_nan=True),
    ):
        x[1:, 1].div_(torch.zeros((), device="tpu"))


def test_nan_in_a_list_is_found() -> None:
    xs = [torch.zeros(2, device="tpu"), torch.full((2,), -1.0, device="tpu")]
    with (
        pytest.raises(RuntimeError, match=r"_foreach_sqrt.*made NaN"),
        torch.tpu.debug(check_nan=True),
    ):
        torch._foreach_sqrt(xs)


def test_inf_has_a_switch_of_its_own() -> None:
    x = torch.tensor([1.0, 0.0], device="tpu")
    with torch.tpu.debug(check_nan=True):
        assert x.reciprocal().isinf().sum() == 1
    with torch.tpu.debug(check_inf=True):
        x.masked_fill(x == 0, float("-inf"))  # a number of the caller's
        with pytest.raises(RuntimeError, match="aten::reciprocal: made Inf"):
            x.reciprocal()


def test_the_backward_pass_names_the_forward_line() -> None:
    x = torch.zeros(3, device="tpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="made NaN") as caught, torch.tpu.debug(check_nan=True):
        y = torch.sqrt(x * 1)  # here
        y.mul(0).sum().backward()
    assert f"test_debug.py:{line_after('# here')} in " in str(caught.value)
    assert "(backward of it)" in str(caught.value)


@pytest.mark.strict_mode
def test_a_backward_pass_of_unseen_ops_names_the_call() -> None:
    x = torch.zeros(3, device="tpu", requires_grad=True)
    y = torch.sqrt(x * 1).mul(0).sum()
    with pytest.raises(RuntimeError, match="made NaN") as caught, torch.tpu.debug(check_nan=True):
        y.backward()  # here
    assert f"test_debug.py:{line_after('# here')} in " in str(caught.value)


def test_checks_belong_to_the_thread() -> None:
    found = []

    def other() -> None:
        found.append(torch.full((2,), -1.0, device="tpu").log().isnan().all().item())

    with torch.tpu.debug(check_nan=True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [True]


@pytest.mark.parametrize("mode", [EagerMode.DEFER_NEVER, DEBUG])
def test_training_gives_the_same_numbers(mode) -> None:
    def losses(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 12).view(3, 4).to(device)
        out = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    expected = losses("cpu")
    with torch.tpu.set_eager_mode(mode), torch.tpu.debug(check_nan=True, check_inf=True):
        got = losses("tpu")
    torch.testing.assert_close(got, expected)


def test_wrong_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="no such checks"):
        _C.exchange_number_checks(7)
