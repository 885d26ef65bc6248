"""PyTorch's databases of ops and modules under torch.compile, forward and backward.

`make test` takes a sample across families; the marker `full` takes everything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db

from tests.modules.test_modules import check
from tests.opinfo.compare import all_ops, check_sample, samples
from torch_tpu import _C

OPS = all_ops()
# One or two of each family: pointwise, reductions, views, indexing, matmuls, scans, sorting, random
# numbers, convolution and pooling, norms, losses, linear algebra, complex numbers.
SAMPLE = (
    *("add", "where", "nn.functional.gelu", "clamp", "pow", "sum", "var_mean", "amax", "argmax"),
    *("transpose", "expand", "as_strided", "unfold", "cat", "roll", "flip", "index_select"),
    *("index_put", "gather", "scatter_add", "masked_fill", "nn.functional.embedding", "matmul"),
    *("addmm", "baddbmm", "einsum", "cumsum", "logcumsumexp", "sort", "topk"),
    *("nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.avg_pool2d"),
    *("nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.cross_entropy"),
    *("linalg.cholesky", "linalg.solve_triangular", "linalg.solve", "fft.rfft", "tril"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.rrelu", "normal.in_place"),
    *(
        "_unsafe_masked_index",
        "nn.functional.linear_cross_entropy.chunked",
        "geqrf",
        "item",
        "histogram",
    ),
    *(
        "nn.functional.pad.reflect",
        "view_as_complex",
        "softmax",
        "nn.functional.interpolate.bilinear",
    ),
)
# Graphs with these run op by op after a warning: the device has no algorithm for the op, or no
# such dtype.
NO_PROGRAM = {
    "chalf": "complex32",
    "linalg.eig": "general eigenvalues are the CPU's",
    "linalg.eigvals": "general eigenvalues are the CPU's",
    "linalg.ldl_factor": "the pivoted LDL factorisation is the CPU's",
    "linalg.ldl_factor_ex": "the pivoted LDL factorisation is the CPU's",
    "linalg.ldl_solve": "the pivoted LDL factorisation is the CPU's",
}
MODULES = ("Linear", "Conv2d", "BatchNorm2d", "Embedding", "MultiLabelMarginLoss")


@contextmanager
def _watched() -> Iterator[None]:
    """No op may run on the CPU, and no graph op by op."""
    before = _C.stats()["fallbacks"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*runs op by op.*")
        yield
    assert _C.stats()["fallbacks"] == before


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="tpu", dynamic=False)


def check_op(name: str, count: int) -> None:
    op = OPS[name]
    torch.manual_seed(0)
    ran = []
    with _watched():
        for sample, differentiable in samples(op, torch.float32, count):
            # A function of its own: OpInfo's call is not one that Dynamo traces.
            def run(*args: Any, _op: Any = op.op, **kwargs: Any) -> Any:
                return _op(*args, **kwargs)

            ran.append(check_sample(op, sample, differentiable, _compiled(run)))
    if ran and not any(ran):
        pytest.skip("the CPU refuses every sample")


@pytest.mark.parametrize("name", SAMPLE)
def test_op(name: str) -> None:
    check_op(name, 1)


def _marked(name: str) -> Any:
    reason = NO_PROGRAM.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(reason=reason) if reason else ())


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [_marked(n) for n, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")]
)
def test_every_op(name: str) -> None:
    try:
        check_op(name, 4)
    finally:
        _C.clear_programs()


def check_module(info: ModuleInfo, training: bool) -> None:
    with _watched():
        check(info, training, _compiled)


@pytest.mark.parametrize(
    "info", [i for i in module_db if i.module_cls.__name__ in MODULES], ids=lambda i: i.name
)
def test_module(info: ModuleInfo) -> None:
    check_module(info, True)


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda i: i.name)
def test_every_module(info: ModuleInfo, training: bool) -> None:
    if torch.float32 not in info.dtypes:
        pytest.skip("the module has no float32 form")
    try:
        check_module(info, training)
    finally:
        _C.clear_programs()
