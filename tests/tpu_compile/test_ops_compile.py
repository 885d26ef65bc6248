"""Every program of the device compiles on the real TPU compiler.

`make test` takes a cross-section; `make test-tpu-compile` one sample of every OpInfo entry, forward
and backward, and notes what it found below build/tpu_compile for scripts/op_coverage.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torch_tpu  # noqa: F401
from tests.opinfo.compare import all_ops
from tests.opinfo.exceptions import EXPECTED_FAILURES as NOT_ON_DEVICE
from torch_tpu.aot import worker
from torch_tpu.plugin import libtpu_path

from .capture import Captured, captured_programs, programs_of
from .compiler import TARGET, TpuCompiler
from .exceptions import EXPECTED_FAILURES

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        libtpu_path() is None,
        reason="the TPU compiler, libtpu, is not installed (pip install 'torch-tpu[tpu]')",
    ),
]

OPS = all_ops()
RESULTS = Path(__file__).parents[2] / "build" / "tpu_compile"


@pytest.fixture(scope="module")
def compiler() -> Iterator[TpuCompiler]:
    compiler = TpuCompiler()
    yield compiler
    compiler.close()


def failures(compiler: TpuCompiler, programs: list[Captured]) -> dict[str, str]:
    """ATen op → why one of its programs does not compile."""
    found = {}
    for program in programs:
        error = compiler.compile(program.text)
        if error is not None:
            found.setdefault(program.op, f"{error}\n{program.text}")
    return found


def check(compiler: TpuCompiler, programs: list[Captured]) -> None:
    """Fail unless exactly the programs that are expected not to compile do not."""
    found = failures(compiler, programs)
    expected = {p.op for p in programs if p.op in EXPECTED_FAILURES}
    unexpected = {op: why for op, why in found.items() if op not in expected}
    if unexpected:
        pytest.fail("\n\n".join(f"{op}: {why}" for op, why in unexpected.items()), pytrace=False)
    if cured := expected - set(found):
        pytest.fail(f"compile; remove them from EXPECTED_FAILURES: {', '.join(sorted(cured))}")
    if expected:
        pytest.xfail("; ".join(EXPECTED_FAILURES[op] for op in sorted(expected)))


def note(name: str, compiler: TpuCompiler, programs: list[Captured]) -> None:
    """Leave the outcome of one OpInfo entry for scripts/op_coverage.py."""
    found = failures(compiler, programs)
    ops = {p.op: p.op not in found for p in programs}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / (re.sub(r"[^\w.]", "_", name) + ".json")
    path.write_text(json.dumps({"entry": name, "target": TARGET, "ops": ops}, indent=1) + "\n")


@pytest.mark.full
@pytest.mark.parametrize("name", list(OPS))
def test_op(name: str, compiler: TpuCompiler) -> None:
    try:
        programs = programs_of(OPS[name])
    except NotImplementedError:
        # What the device itself does not run has its reason in the table of tests/opinfo.
        reasons = [why for (entry, _), why in NOT_ON_DEVICE.items() if entry == name]
        if not reasons:
            raise
        pytest.xfail(reasons[0])
    if programs is None:
        pytest.skip("the CPU runs no sample of it")
    note(name, compiler, programs)
    check(compiler, programs)


# One entry of each family of lowerings.
CROSS_SECTION = (
    "add",
    "mm",
    "bmm",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "softmax",
    "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.max_pool2d",
    "nn.functional.interpolate.bilinear",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "sort",
    "topk",
    "scatter_add",
    "gather",
    "index_select",
    "cumsum",
    "var",
    "linalg.cholesky",
    "linalg.qr",
    "linalg.eigh",
    "linalg.svd",
    "linalg.lu",
    "fft.fft",
    "lgamma",
    "normal",
    "multinomial",
    "nonzero",
)


@pytest.mark.parametrize("name", CROSS_SECTION)
def test_cross_section(name: str, compiler: TpuCompiler) -> None:
    programs = programs_of(OPS[name])
    assert programs
    check(compiler, programs)


def fused_adamw() -> None:
    weights = [torch.ones(8, 16, device="tpu"), torch.ones(16, device="tpu")]
    for w in weights:
        w.requires_grad_().grad = torch.ones_like(w)
    torch.optim.AdamW(weights, fused=True).step()


def index_put() -> None:
    x = torch.zeros(8, 4, device="tpu")
    x[torch.tensor([1, 2], device="tpu")] = 1.0
    x[x > 0] = 2.0
    x.index_put_((torch.tensor([3, 3], device="tpu"),), torch.ones(4, device="tpu"), True)


def unique() -> None:
    torch.unique(torch.tensor([3, 1, 3], device="tpu"), return_inverse=True, return_counts=True)


def views() -> None:
    x = torch.zeros(4, 6, 8, device="tpu")
    x[1:, ::2, 3].add_(1)
    x.transpose(0, 2).flip(1).mul_(2)
    x.as_strided((3, 5), (7, 3), 2).fill_(1)
    (x.view(torch.int32)[0] + x.unfold(1, 3, 2).sum().int()).relu()


def random() -> None:
    x = torch.rand(64, device="tpu")
    torch.nn.functional.dropout(x, 0.5)
    torch.randint(0, 10, (8,), device="tpu")
    torch.randn(8, dtype=torch.float64, device="tpu")
    torch.randperm(16, device="tpu")


def lower_precision() -> None:
    x = torch.ones(16, 32, device="tpu", dtype=torch.bfloat16)
    torch.nn.functional.layer_norm(x @ x.mT, (16,)).float().softmax(0)
    torch.nn.functional.silu(x.half()).sum(0)


def wide_types() -> None:
    x = torch.ones(3, 8, device="tpu", dtype=torch.float64)
    torch.fft.irfft(torch.fft.rfft(x) * 2)
    (x @ x.mT + torch.eye(3, device="tpu")).inverse().sin()
    x.long() @ x.long().mT


@pytest.mark.parametrize(
    "run",
    [fused_adamw, index_put, unique, views, random, lower_precision, wide_types],
    ids=lambda run: run.__name__,
)
def test_programs(run: Callable[[], None], compiler: TpuCompiler) -> None:
    with captured_programs() as programs:
        run()
    assert programs
    check(compiler, programs)


def test_a_crash_costs_one_program(compiler: TpuCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = "module { func.func @main() -> tensor<i32> {\n" + (
        "%0 = stablehlo.constant dense<7> : tensor<i32>\n return %0 : tensor<i32> } }"
    )
    assert compiler.compile(sound) is None
    with monkeypatch.context() as broken:
        # The process finds its input closed and ends without an answer.
        broken.setattr(worker, "send", lambda stream, request: stream.close())
        assert (compiler.compile(sound.replace("<7>", "<8>")) or "").startswith("CRASH")
    assert compiler.compile(sound.replace("<7>", "<9>")) is None
    assert "nonsense" in (compiler.compile("module { nonsense }") or "")
