"""What PyTorch's database says must fail, fails on the device in the CPU's class."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torch_tpu  # noqa: F401
from tests.conftest import SHARE

from .compare import all_ops, name_of, on_cpu, on_device
from .exceptions import ERROR_EXCEPTIONS
from .refusals import error_of

OPS = {name: op for name, op in all_ops().items() if op.error_inputs_func is not None}


def run(name: str) -> None:
    op = OPS[name]
    torch.manual_seed(0)
    wrong, checked = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.error_inputs("cpu"))
        for i, error_input in enumerate(samples):
            sample = error_input.sample_input
            arguments: list[Any] = []
            try:
                arguments = [on_cpu(sample), on_device(name_of(op), sample)]
            except Exception:  # wrong for what is no tensor: it cannot be moved
                continue
            want, got = (error_of(op, a) for a in arguments)
            if want is None:
                continue
            checked += 1
            if type(want) is not type(got):
                wrong.append(
                    f"#{i}: {type(got).__name__} {str(got)[:200]}; the CPU raises "
                    f"{type(want).__name__}: {str(want)[:200]}"
                )
    reason = ERROR_EXCEPTIONS.get(name)
    if wrong and reason is None:
        pytest.fail("\n".join(wrong))
    if wrong:
        pytest.xfail(f"{reason}")
    if reason is not None:
        pytest.fail(f"{name} fails as the CPU does; remove it from ERROR_EXCEPTIONS")
    if not checked:
        pytest.skip("the CPU takes it all")


CASES = [n for n in OPS if n not in ERROR_EXCEPTIONS]
SAMPLE = sorted({*CASES[::6], "complex", "aminmax", "multinomial", "masked_scatter", "bucketize"})


@pytest.mark.parametrize("name", SAMPLE[::SHARE])
def test_sampled(name: str) -> None:
    run(name)


@pytest.mark.full
@pytest.mark.parametrize("name", list(OPS))
def test_all(name: str) -> None:
    run(name)
