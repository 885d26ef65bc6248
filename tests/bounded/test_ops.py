"""Every OpInfo entry on operands that are longer than what they hold, against the CPU.

Whatever stands beyond an operand's contents must not show, neither in a program for many sizes nor
in one for the call's own sizes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torch_tpu  # noqa: F401
from tests.opinfo import compare
from tests.opinfo.exceptions import EXPECTED_FAILURES
from torch_tpu import _C
from torch_tpu.program.bounded import policy

from .padding import pad

OPS = {
    name: op
    for name, op in compare.all_ops().items()
    if torch.float32 in op.supported_dtypes("cpu") and (name, "float32") not in EXPECTED_FAILURES
}


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    policy.clear()


def run(name: str, which: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move = compare.move

    def move_and_pad(value: Any, device: str, widen: bool = False) -> Any:
        moved = move(value, device, widen)
        if device == compare.DEVICE:
            for t in compare.tensors(moved):
                if t.layout is torch.strided and t.device.type == compare.DEVICE:
                    pad(t.detach(), which)
        return moved

    monkeypatch.setattr(compare, "move", move_and_pad)
    op = OPS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample, grad in compare.samples(op, torch.float32, count):
            compare.check_sample(op, sample, grad)
    broken = {f.reason for f in policy._families.values() if f.reason.startswith("internal")}
    assert not broken, broken


@pytest.mark.parametrize("name", list(OPS)[::12])
def test_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, "first", 1, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("which", ["first", "last", "all"])
@pytest.mark.parametrize("name", list(OPS))
def test_all(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        run(name, which, 3, monkeypatch)
    finally:
        # XLA:CPU maps memory for every program: all of them would exceed what Linux allows.
        _C.clear_programs()
