"""Eager modes and numeric precision: defaults, overrides, threads."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_tpu import _C

EagerMode, Precision = torch.tpu.EagerMode, torch.tpu.Precision
DEBUG = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


@pytest.fixture(autouse=True)
def defaults():
    yield
    torch.tpu.eager_mode = EagerMode.DEFER_NEVER
    torch.tpu.allow_excess_precision = False
    torch.set_float32_matmul_precision("highest")


def in_thread(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


class Probe(torch.autograd.Function):
    """Notes the modes that hold where its backward runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((torch.tpu.eager_mode, _C.matmul_precision(), threading.get_ident()))
        return grad, None


@pytest.mark.strict_mode
def test_strict_is_the_default() -> None:
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_the_default_can_be_assigned() -> None:
    torch.tpu.eager_mode = DEBUG
    assert torch.tpu.eager_mode is DEBUG
    assert in_thread(lambda: torch.tpu.eager_mode) is DEBUG


def test_an_override_is_the_threads_own() -> None:
    with torch.tpu.set_eager_mode(DEBUG):
        assert torch.tpu.eager_mode is DEBUG
        assert in_thread(lambda: torch.tpu.eager_mode) is EagerMode.DEFER_NEVER
        with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
            assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
        assert torch.tpu.eager_mode is DEBUG
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_an_override_ends_with_an_error() -> None:
    with pytest.raises(KeyError), torch.tpu.set_eager_mode(DEBUG):
        raise KeyError
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER


def test_overrides_reach_the_backward_pass() -> None:
    seen: list = []
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = Probe.apply(x, seen).sum()
    with torch.tpu.set_eager_mode(DEBUG), torch.tpu.precision(Precision.HIGH):
        y.backward(retain_graph=True)
    y.backward()
    assert seen[0][:2] == (DEBUG, 3)
    assert seen[1][:2] == (EagerMode.DEFER_NEVER, 6)
    assert seen[0][2] != threading.get_ident()  # it was autograd's own thread


@pytest.mark.parametrize("value", [1, "DEFER_NEVER", None])
def test_only_the_enum_is_taken(value) -> None:
    with pytest.raises(TypeError, match="EagerMode"):
        torch.tpu.eager_mode = value
    with pytest.raises(TypeError, match="Precision"), torch.tpu.precision(value):
        pass


def test_debug_raises_at_the_line() -> None:
    x = torch.arange(4.0, device="tpu")
    index = torch.tensor([9], device="tpu")
    with torch.tpu.set_eager_mode(DEBUG), pytest.raises(IndexError):
        x.index_select(0, index)


@pytest.mark.parametrize(
    ("variable", "mode"),
    [
        ("TORCH_TPU_LAUNCH_BLOCKING", DEBUG.name),
        ("TORCH_TPU_DEFER_AND_FUSE", EagerMode.DEFER_AND_FUSE.name),
        ("UNRELATED", EagerMode.DEFER_NEVER.name),
    ],
)
def test_mode_from_the_environment(run_python, variable, mode) -> None:
    code = "import torch, torch_tpu; print(torch.tpu.eager_mode.name)"
    environment = {"TORCH_TPU_LAUNCH_BLOCKING": "0", "TORCH_TPU_DEFER_AND_FUSE": "0"}
    assert run_python(code, **(environment | {variable: "1"})).strip() == mode


@pytest.mark.parametrize(("name", "passes"), [("medium", 1), ("high", 3), ("highest", 6)])
def test_precision_follows_pytorchs_switch(name, passes) -> None:
    torch.set_float32_matmul_precision(name)
    assert _C.matmul_precision() == passes
    with torch.tpu.precision(Precision.DEFAULT):
        assert _C.matmul_precision() == 1
    assert _C.matmul_precision() == passes


def test_precision_is_the_threads_own() -> None:
    with torch.tpu.precision(Precision.DEFAULT):
        assert in_thread(_C.matmul_precision) == 6


def test_precision_survives_the_newer_setters(run_python) -> None:
    code = """
        import torch, torch_tpu
        from torch_tpu import _C
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        print(_C.matmul_precision())
        print((torch.ones(2, 2, device="tpu") @ torch.ones(2, 2, device="tpu")).sum().item())
    """
    assert run_python(code).split()[1] == "8.0"


def test_excess_precision() -> None:
    assert torch.tpu.allow_excess_precision is False
    torch.tpu.allow_excess_precision = True
    assert _C.allow_excess_precision() is True
    with pytest.raises(TypeError):
        torch.tpu.allow_excess_precision = "yes"


def test_matmul_error_shrinks_with_precision() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact = a.double() @ b.double()
    errors = []
    for mode in Precision:
        with torch.tpu.precision(mode):
            got = (a.to("tpu") @ b.to("tpu")).cpu()
        errors.append((got - exact).abs().max().item())
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[2] < 1e-4
