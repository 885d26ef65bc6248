"""Programs for many sizes compile on the real TPU compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.bounded.test_values import BOUND, OPS, D
from torch_tpu import _C
from torch_tpu.plugin import libtpu_path
from torch_tpu.program.bounded import policy

from .capture import captured_programs
from .compiler import TpuCompiler

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.strict_mode,
    pytest.mark.skipif(
        libtpu_path() is None,
        reason="the TPU compiler, libtpu, is not installed (pip install 'torch-tpu[tpu]')",
    ),
]

SOME = ("masked attention", "cat with a token", "merge and split", "cross_entropy", "sort")


@pytest.fixture(scope="module")
def compiler() -> Iterator[TpuCompiler]:
    compiler = TpuCompiler()
    yield compiler
    compiler.close()


def check(name: str, compiler: TpuCompiler) -> None:
    policy.clear()
    with captured_programs() as programs:
        x = torch.randn(2, 19, D).to("tpu")
        _C.pad_storage(x, [0, BOUND, 0])
        x.requires_grad_()
        out = OPS[name](x)
        if out.grad_fn is not None:
            out.sum().backward()
    bounded = [p for p in programs if "%ints" in p.text and f"x{BOUND}x" in p.text]
    assert bounded
    for program in bounded:
        error = compiler.compile(program.text)
        assert error is None, f"{program.op}: {error}\n{program.text}"


@pytest.mark.parametrize("name", SOME)
def test_some(name: str, compiler: TpuCompiler) -> None:
    check(name, compiler)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in OPS if n not in SOME])
def test_all(name: str, compiler: TpuCompiler) -> None:
    check(name, compiler)
