"""A dtype that an op does not take raises what the CPU raises, and never reaches the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_tpu import _C

CASES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "fmod": (lambda x: torch.fmod(x, 2), torch.complex64),
    "and": (lambda x: x & x, torch.float32),
    "maximum": (lambda x: torch.maximum(x, x), torch.complex64),
    "floor": (lambda x: torch.floor(x), torch.complex64),
    "gelu": (lambda x: torch.nn.functional.gelu(x), torch.int64),
    "softmax": (lambda x: torch.softmax(x, 0), torch.int64),
    "shift": (lambda x: torch.bitwise_left_shift(x, x), torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, dtype = CASES[name]
    x = torch.ones(3, dtype=dtype)
    with pytest.raises(Exception) as on_cpu:
        call(x)
    before = _C.stats()
    with pytest.raises(type(on_cpu.value)) as on_device:
        call(x.to("tpu"))
    assert str(on_device.value) == str(on_cpu.value)
    after = _C.stats()
    assert after["compiles"] == before["compiles"]
    assert after["fallbacks"] == before["fallbacks"]
