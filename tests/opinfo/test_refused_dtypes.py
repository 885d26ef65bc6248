"""A dtype that an op does not take raises what the CPU raises, and never reaches the compiler.

`make test` takes every eighth entry of PyTorch's database; the marker `full` takes all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.conftest import SHARE
from torch_tpu import _C

from .compare import all_ops
from .exceptions import REFUSAL_EXCEPTIONS
from .refusals import check, refused_dtypes

CASES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "fmod": (lambda x: torch.fmod(x, 2), torch.complex64),
    "and": (lambda x: x & x, torch.float32),
    "maximum": (lambda x: torch.maximum(x, x), torch.complex64),
    "floor": (lambda x: torch.floor(x), torch.complex64),
    "gelu": (lambda x: torch.nn.functional.gelu(x), torch.int64),
    "softmax": (lambda x: torch.softmax(x, 0), torch.int64),
    "shift": (lambda x: torch.bitwise_left_shift(x, x), torch.float32),
    "shift operator": (lambda x: x << x, torch.bool),
    "leaky_relu": (lambda x: torch.nn.functional.leaky_relu(x), torch.int64),
    "lerp": (lambda x: torch.lerp(x, x, 0.5), torch.int64),
    "gcd": (lambda x: torch.gcd(x, x), torch.float32),
    "abs in place": (lambda x: x.abs_(), torch.bool),
    "abs out": (lambda x: torch.abs(x, out=torch.empty_like(x)), torch.bool),
    "foreach": (lambda x: torch._foreach_abs([x])[0], torch.bool),
    "factory": (lambda x: torch.rand(3, dtype=x.dtype, device=x.device), torch.int64),
    "number": (lambda x: torch.lerp(x, x, 2), torch.int64),
    "count": (lambda x: torch.bincount(x), torch.float32),
}
OPS = all_ops()
REFUSING = [name for name, op in OPS.items() if refused_dtypes(op)]


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, dtype = CASES[name]
    x = torch.ones(3, dtype=dtype)
    with pytest.raises(Exception) as on_cpu:
        call(x)
    on_tpu = x.to("tpu")
    before = _C.stats()
    with pytest.raises(type(on_cpu.value)) as on_device:
        call(on_tpu)
    assert str(on_device.value) == str(on_cpu.value)
    after = _C.stats()
    assert after["compiles"] == before["compiles"]
    assert after["fallbacks"] == before["fallbacks"]


def test_values_do_not_refuse() -> None:
    """The CPU is asked about zeros and ones, whose own faults are none of the call's."""
    x = torch.tensor([True, True], device="tpu")
    assert (x // torch.tensor([1, 2], device="tpu")).tolist() == [1, 0]
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        torch.randint_like(x, 2, 5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integers_that_cuda_counts_are_taken(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 3, 1, 3, 2, 3], dtype=dtype)
    got = torch.histc(x.to("tpu"), bins=4, min=0, max=3)
    assert got.dtype is dtype and got.tolist() == torch.bincount(x, minlength=4).tolist()


def refuse(name: str) -> None:
    errors, checked = [], 0
    for dtype in refused_dtypes(OPS[name]):
        try:
            checked += check(OPS[name], dtype)
        except AssertionError as error:
            errors.append(str(error))
    if errors and name not in REFUSAL_EXCEPTIONS:
        pytest.fail("\n".join(errors))
    if errors:
        pytest.xfail(REFUSAL_EXCEPTIONS[name])
    if name in REFUSAL_EXCEPTIONS:
        pytest.fail(f"{name} refuses; remove it from REFUSAL_EXCEPTIONS")
    if not checked:
        pytest.skip("the CPU takes its sample in every dtype, or it cannot be cast")


@pytest.mark.parametrize("name", REFUSING[:: 8 * SHARE])
def test_sampled(name: str) -> None:
    refuse(name)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSING)
def test_all(name: str) -> None:
    refuse(name)
