"""Every OpInfo entry, forward and backward, against the CPU.

`make test` takes the first samples in float32; the marker `full` adds samples and dtypes.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import torch_tpu  # noqa: F401
from tests.conftest import MODE, SHARE
from torch_tpu import _C

from .compare import all_ops, check_sample, samples
from .exceptions import EXPECTED_FAILURES

OPS = all_ops()
FULL_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(name: str, dtype: torch.dtype, count: int) -> None:
    op = OPS[name]
    reason = EXPECTED_FAILURES.get((name, dtype_name(dtype)))
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ran = [check_sample(op, s, grad) for s, grad in samples(op, dtype, count)]
    except Exception:
        if reason is None:
            raise
        pytest.xfail(reason)
    if reason is not None:
        pytest.fail(f"{name} {dtype} passes; remove it from EXPECTED_FAILURES ({reason})")
    if ran and not any(ran):
        pytest.skip("the CPU refuses every sample")


@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")][::SHARE]
)
def test_float32(name: str) -> None:
    run(name, torch.float32, 2 if MODE == "strict" else 1)


@pytest.mark.parametrize(
    "name", [n for n, op in OPS.items() if torch.float32 not in op.supported_dtypes("cpu")]
)
def test_other_dtype(name: str) -> None:
    """Ops without a float32 form: their first supported dtype of ours."""
    supported = OPS[name].supported_dtypes("cpu")
    dtype = next((d for d in FULL_DTYPES if d in supported), None)
    if dtype is None:
        pytest.skip("the CPU has it for none of these dtypes (float8 only, or CUDA only)")
    run(name, dtype, 2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", FULL_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", list(OPS))
def test_all_dtypes(name: str, dtype: torch.dtype) -> None:
    if dtype not in OPS[name].supported_dtypes("cpu"):
        pytest.skip("the CPU does not support this dtype")
    try:
        run(name, dtype, 20)
    finally:
        # XLA:CPU maps memory for every program: all of them would exceed what Linux allows.
        _C.clear_programs()
