"""PyTorch's other databases: the foreach ops, and the Python reference implementations.

`make test` takes every fifth reference; the marker `full` takes all.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal import common_methods_invocations as databases
from torch.testing._internal.opinfo.core import ForeachFuncInfo, OpInfo

import torch_tpu  # noqa: F401
from torch_tpu import _C

from .compare import assert_close_to_either, check_sample, move, name_of, samples

FOREACH: dict[str, ForeachFuncInfo] = {
    info.name: info
    for kind in ("unary", "binary", "pointwise", "reduce", "other")
    for info in getattr(databases, f"foreach_{kind}_op_db")
}
REFERENCES: dict[str, OpInfo] = {name_of(op): op for op in databases.python_ref_db}
# Results of these references are not defined by values: memory as it comes, other random streams.
UNDEFINED = (
    "empty",
    "new_empty",
    "normal",
    "randn",
    "dropout",
    "exponential",
    "geometric",
    "cauchy",
)
UNDEFINED_ANYWHERE = ("log_normal", "uniform")


def check_foreach(info: ForeachFuncInfo, count: int) -> int:
    """Functional and in-place form of the first samples; how many the CPU took."""
    taken = 0
    for i, sample in enumerate(info.sample_inputs("cpu", torch.float32, noncontiguous=False)):
        if i >= count:
            break
        for form in (info.method_variant, info.inplace_variant):
            if form is None:
                continue

            def run(
                device: str, widen: bool = False, form: Any = form, sample: Any = sample
            ) -> Any:
                # Tensors of scalars stay on the CPU, as PyTorch asks for.
                entries = move(sample.input, device, widen)
                rest = tuple(
                    copy.deepcopy(a) if isinstance(a, torch.Tensor) else move(a, device, widen)
                    for a in sample.args
                )
                result = form(entries, *rest, **sample.kwargs)
                return entries if form is info.inplace_variant else result

            try:
                want = run("cpu")
            except Exception:  # what the CPU refuses is no sample for the device
                continue
            got = run("tpu")
            assert_close_to_either(info.name, want, got, lambda run=run: run("cpu", widen=True))
            taken += 1
    return taken


@pytest.mark.parametrize("name", list(FOREACH))
def test_foreach(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check_foreach(FOREACH[name], 1) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", list(FOREACH))
def test_foreach_all(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_foreach(FOREACH[name], 40)
    _C.clear_programs()


def check_reference(name: str, count: int) -> None:
    op = REFERENCES[name]
    last = name.removeprefix("_refs.").removeprefix("nn.functional.")
    if last.startswith(UNDEFINED) or any(u in last for u in UNDEFINED_ANYWHERE):
        pytest.skip("its values are undefined or random")
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in supported), None)
    if dtype is None:
        pytest.skip("the CPU has it for none of these dtypes")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = [check_sample(op, s, False) for s, _ in samples(op, dtype, count)]
    if not any(ran):
        pytest.skip("the CPU refuses every sample")


@pytest.mark.parametrize("name", list(REFERENCES)[::5])
def test_reference(name: str) -> None:
    check_reference(name, 1)


@pytest.mark.full
@pytest.mark.parametrize("name", list(REFERENCES))
def test_reference_all(name: str) -> None:
    try:
        check_reference(name, 4)
    finally:
        _C.clear_programs()
