"""Reports of compiles: which part of the key differed, at which line."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from torch_tpu import _C
from torch_tpu.program import recompiles
from torch_tpu.program.recompiles import Change, Compile, differences, report_compile


@pytest.fixture(autouse=True)
def fresh():
    _C.clear_programs()
    recompiles.clear()
    yield
    recompiles.clear()


def compiles_of(name: str) -> list[Compile]:
    return [c for c in recompiles.reports() if c.name == name]


def last_changes(name: str, *calls: Callable[[], object]) -> list[str]:
    for call in calls:
        call()
    return [str(change) for change in compiles_of(name)[-1].changes]


@pytest.mark.strict_mode
def test_every_compile_is_reported_and_hits_are_not() -> None:
    x = torch.ones(4, device="tpu")
    recompiles.clear()
    before = torch.tpu.stats()
    for n in (1.0, 2.0, 3.0):
        (x * n).exp()
    made = [torch.tpu.stats()[k] - before[k] for k in ("compiles", "disk_hits", "remote_hits")]
    assert sum(made) == len(recompiles.reports()) == 2


def test_the_line_and_the_shape() -> None:
    for n in (128, 129):
        torch.ones(n, 2, device="tpu").exp()
    line = inspect.currentframe().f_lineno - 1
    first, second = compiles_of("aten::exp")
    assert not first.is_recompile and second.is_recompile
    assert second.line.line == line and second.line.file == __file__
    assert second.line.text == 'torch.ones(n, 2, device="tpu").exp()'
    assert second.nearest.number == 1
    (change,) = second.changes
    assert change.dims() == [(0, 128, 129)]
    text = "shape of argument 1 (self): (128, 2) → (129, 2) (dim 0: 128 → 129)"
    assert text in str(second) and f"{__file__}:{line} in test_the_line" in str(second)
    assert "the first of this name" in str(first)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="tpu")


def with_precision() -> torch.Tensor:
    with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        return x(2, 3) @ x(3, 2)


# What differs, the op, the first call, the second call, the only difference that is reported.
CASES = {
    "shape": (
        "aten::add.Tensor",
        lambda: x(3, 4) + x(3, 1),
        lambda: x(3, 4) + x(1, 4),
        "shape of argument 2 (other): (3, 1) → (1, 4) (dim 0: 3 → 1, dim 1: 1 → 4)",
    ),
    "rank": (
        "aten::exp",
        lambda: x(3).exp(),
        lambda: x(3, 1).exp(),
        "shape of argument 1 (self): (3,) → (3, 1)",
    ),
    "dtype": (
        "aten::exp",
        lambda: x(3).exp(),
        lambda: x(3, dtype=torch.float16).exp(),
        "dtype of argument 1 (self): torch.float32 → torch.float16",
    ),
    "view": (
        "aten::exp",
        lambda: x(3, 3).exp(),
        lambda: x(3, 3).t().exp(),
        "layout of argument 1 (self): all of its storage → "
        "strides (1, 3) over a storage of shape (3, 3)",
    ),
    "static argument": (
        "aten::cumsum",
        lambda: x(3, 3).cumsum(0),
        lambda: x(3, 3).cumsum(1),
        "static argument `dim`: 0 → 1",
    ),
    "static list": (
        "aten::sum.dim_IntList",
        lambda: x(3, 3).sum((0, 1)),
        lambda: x(3, 3).sum((1,)),
        "static argument `dim`: [0, 1] → [1]",
    ),
    "default number": (
        "aten::add.Tensor",
        lambda: x(3) + x(3),
        lambda: torch.add(x(3), x(3), alpha=2.5),
        "argument `alpha`: 1 → any Python float",
    ),
    "list": (
        "aten::_foreach_exp",
        lambda: torch._foreach_exp([x(3), x(4)]),
        lambda: torch._foreach_exp([x(3), x(5)]),
        "shapes of argument 1 (self): [1]: (4,) → (5,)",
    ),
    "precision": (
        "aten::mm",
        lambda: x(2, 3) @ x(3, 2),
        with_precision,
        "float32 matmul precision: HIGHEST → DEFAULT",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_exactly_the_part_that_differs(what: str) -> None:
    name, first, second, expected = CASES[what]
    assert last_changes(name, first, second) == [expected]


def test_sharing_a_storage_is_part_of_the_key() -> None:
    a = x(3)
    changes = last_changes("aten::add.Tensor", lambda: x(3) + x(3), lambda: a + a)
    assert changes == ["arguments that share a storage: absent → (('self', 'other'),)"]


def test_the_nearest_program_is_compared() -> None:
    x(8, 2).exp()
    x(9, dtype=torch.float16).exp()
    x(8, 3).exp()
    third = compiles_of("aten::exp")[-1]
    assert third.nearest.number == 1 and len(third.changes) == 1


def test_a_dropped_program_is_told() -> None:
    a = x(3)
    a.exp()
    _C.clear_programs()
    a.exp()
    again = compiles_of("aten::exp")[-1]
    assert again.is_recompile and again.changes == ()
    assert "TORCH_TPU_MAX_PROGRAMS" in str(again)


def test_no_recompile_is_without_a_reason() -> None:
    """Descriptions tell apart what the core's keys tell apart."""
    tensors = [
        x(4, 4),
        x(4, 4).t(),
        x(4, 4)[1:3],
        x(4, 8)[:, ::2],
        x(16).view(4, 4),
        x(4, 4).view(torch.int32),
        x(4, 1).expand(4, 4),
        x(0, 4),
        x(4, 4, dtype=torch.float64),
        x(4, 4, dtype=torch.int64),
        x(40).as_strided((4, 4), (3, 2)),
    ]
    others = [2, 2.5, True, torch.tensor(2), torch.tensor(2.5), torch.tensor(2.5).double(), x(4)]
    for tensor in tensors:
        for other in others:
            torch.add(tensor, other)
            torch.mul(tensor, other)
            tensor.clone().clamp_(min=0).add_(1)
        tensor.sum(0), tensor.sum(0, keepdim=True), tensor.sum(0, dtype=torch.float64)
    seen = [c for c in recompiles.reports() if c.is_recompile]
    assert len(seen) > 50
    assert [str(c) for c in seen if not c.changes] == []
    for compiled in seen:
        before, after = compiled.nearest.description, compiled.description
        assert compiled.changes == differences(before, after)


def test_programs_of_graphs_are_reported_alike() -> None:
    report_compile("forward", {"shape of argument 1 (x)": (4, 8)})
    report = report_compile("forward", {"shape of argument 1 (x)": (5, 8)})
    assert report.changes == (Change("shape of argument 1 (x)", (4, 8), (5, 8)),)
    assert report.line.function == "test_programs_of_graphs_are_reported_alike"
    assert "forward at" in str(report) and "(dim 0: 4 → 5)" in str(report)


def test_a_description_that_is_not_the_whole_key() -> None:
    for _ in range(2):
        report = report_compile("fused calls", {"call 0": "aten::exp"}, exact=False)
    assert report.changes == () and "TORCH_TPU_MAX_PROGRAMS" not in str(report)
    assert "differs in layouts or in which results are wanted" in str(report)


def test_torch_logging(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="torch.tpu.__recompiles"):
        x(3).exp()
        assert not [r for r in caplog.records if "aten::exp" in r.getMessage()]
        x(4).exp()
    (message,) = {r.getMessage() for r in caplog.records if "aten::exp" in r.getMessage()}
    assert "(3,) → (4,)" in message


def test_the_environment_variable(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nfor n in (3, 4):\n    torch.empty(n, device='tpu').fill_(1)\n")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TORCH_TPU_LOG": "recompiles,nonsense"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert any(f"{script}:3 in <module>: new program, the first" in line for line in lines)
    assert any("(3,) → (4,)" in line for line in lines)
    assert "no such log: nonsense; there is recompiles" in run.stderr
