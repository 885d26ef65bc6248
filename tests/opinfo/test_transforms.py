"""Forward-mode AD, second derivatives, vmap and Jacobians of OpInfo entries against the CPU.

`make test` takes every twelfth entry; the marker `full` takes all.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_tpu  # noqa: F401
from torch_tpu import _C

from .compare import all_ops, samples
from .exceptions import EXPECTED_FAILURES, TRANSFORM_FAILURES
from .transforms import TRANSFORMS, check, supports

OPS = all_ops()
NAMES = [n for n, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")]


def run(name: str, transform: str, count: int) -> None:
    op = OPS[name]
    if not supports(op, transform):
        pytest.skip("PyTorch does not derive it")
    reason = EXPECTED_FAILURES.get((name, "float32"))
    if count >= 4:
        reason = reason or TRANSFORM_FAILURES.get((name, transform))
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = samples(op, torch.float32, count)
            ran = [check(op, s, transform) for s, grad in given if grad or transform == "vmap"]
    except Exception:
        if reason is None:
            raise
        pytest.xfail(reason)
    if reason is not None and any(ran):
        pytest.fail(f"{name} {transform} passes; remove its exception ({reason})")
    if not any(ran):
        pytest.skip("the CPU refuses every sample, or results are random")


@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("name", NAMES[::12])
def test_sampled(name: str, transform: str) -> None:
    run(name, transform, 1)


@pytest.mark.full
@pytest.mark.parametrize("transform", list(TRANSFORMS))
@pytest.mark.parametrize("name", NAMES)
def test_all(name: str, transform: str) -> None:
    try:
        run(name, transform, 4)
    finally:
        _C.clear_programs()
