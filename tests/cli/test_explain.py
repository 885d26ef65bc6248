"""``python -m torch_tpu explain``: what a script cost, by line, and what to do about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_tpu.program import activity, recompiles
from torch_tpu.program.activity import LineActivity
from torch_tpu.program.advice import advise
from torch_tpu.program.recompiles import Compile, differences
from torch_tpu.program.source_lines import SourceLine

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import sys
import torch
print("arguments", sys.argv[1:])
weight = torch.ones(4, 4).to("tpu").requires_grad_()
for n in (2, 3, 4, 5):
    x = torch.ones(n, 4).to("tpu")
    y = (x @ weight).sum()
    y.backward()
total = y.detach()
for _ in range(12):
    total = total + 1
    total.item()
sys.exit(7)
"""


def explain(*arguments: str, cwd=None, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "torch_tpu", "explain", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
            "TORCH_TPU_DYNAMIC_SHAPES": "0",  # a program for every size, to be advised about
            **environment,
        },
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain") / "train.py"
    path.write_text(SCRIPT)
    return path


def test_json(script) -> None:
    run = explain("--json", str(script), "--lr", "1")
    assert run.returncode == 7, run.stderr
    assert "arguments ['--lr', '1']" in run.stderr
    report = json.loads(run.stdout)
    assert report["exit_code"] == 7
    lines = {(a["file"], a["number"], "backward" in a["line"]): a for a in report["lines"]}
    path = str(script)

    forward = lines[path, 7, False]
    assert forward["programs"] == forward["compiles"] == 8  # mm and sum, of four sizes
    assert forward["hits"] == 0
    assert forward["compile_seconds"] > 0 and forward["execute_seconds"] > 0
    assert forward["ops"] == {"aten::mm": 4, "aten::sum": 4}
    backward = lines[path, 7, True]  # found although autograd's thread has no Python frames
    assert backward["ops"]["aten::mm"] == 4
    upload = lines[path, 6, False]
    assert upload["bytes_to_device"] == (2 + 3 + 4 + 5) * 4 * 4
    added, read = lines[path, 11, False], lines[path, 12, False]
    assert (added["compiles"], added["hits"]) == (1, 11)
    assert (read["waits"], read["bytes_to_host"]) == (12, 12 * 4)

    for key in ("compiles", "hits", "bytes_to_device", "bytes_to_host"):
        assert report["total"][key] == sum(a[key] for a in report["lines"])
        assert report["total"][key] == report["stats"][key]

    (about_mm,) = [r for r in report["recompiles"] if r["name"] == "aten::mm"][:1]
    assert about_mm["changes"]
    advice = [a["text"] for a in report["advice"] if a["line"].startswith(f"{path}:7 ")]
    assert len(advice) == 1 and "because shapes change: dim 0" in advice[0]
    assert "is 2, 3, 4, 5" in advice[0] and "mark_dynamic" in advice[0]
    assert any("waits here 12 times" in a["text"] for a in report["advice"])


@pytest.mark.parametrize("columns", [80, 160])
def test_table(script, columns) -> None:
    run = explain(script.name, cwd=script.parent, COLUMNS=str(columns))
    assert run.returncode == 7, run.stderr
    output = run.stdout
    assert output.startswith("arguments []\n")
    assert "\x1b" not in output  # colours are for terminals
    assert max(len(line) for line in output.splitlines()) <= columns
    assert "train.py:7  y = (x @ weight).sum()" in output
    assert "train.py:7 backward  y = (x @ weight).sum()" in output
    assert "all lines" in output and "compiling" in output and "224 B" in output
    assert "on CPU" not in output  # nothing to say
    assert "because shapes change" in " ".join(output.split())


def test_a_script_that_fails(tmp_path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(
        "import torch\n"
        "def inner():\n"
        "    return torch.ones(2, device='tpu') + torch.ones(3, device='tpu')\n"
        "inner()\n"
    )
    run = explain("--json", str(path))
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert report["exit_code"] == 1 and report["total"]["compiles"] == 2
    assert "RuntimeError: The size of tensor a" in run.stderr
    assert "runpy" not in run.stderr and "explain.py" not in run.stderr


# ---- recording and advice, in this process ----


def test_recording() -> None:
    x = torch.ones(11, device="tpu")  # no other test has a program of this text
    with activity.record() as recording:
        for _ in range(3):
            x = x * 2
        x.cpu()
        with pytest.raises(RuntimeError, match="already"), activity.record():
            pass
    x + 1  # not recorded
    by_text = {a.line.text: a for a in recording.lines()}
    assert set(by_text) == {"x = x * 2", "x.cpu()"}
    multiplied = by_text["x = x * 2"]
    assert multiplied.ops == {"aten::mul.Tensor": 3}
    assert multiplied.hits + multiplied.compiles == 3 and multiplied.programs == 1
    assert by_text["x.cpu()"].bytes_to_host == 44
    assert activity.total(recording.lines()).ops == {"aten::mul.Tensor": 3}


def compiles(label: str, *values: object, name: str = "aten::op") -> list[Compile]:
    line = SourceLine("train.py", 3, "step")
    out: list[Compile] = []
    for number, value in enumerate(values, 1):
        description = {label: value, "dtype of argument 1 (self)": "float32"}
        nearest = out[-1] if out else None
        changes = differences(nearest.description, description) if nearest else ()
        out.append(Compile(name, number, line, description, nearest, changes))
    return out


def line(**figures: object) -> LineActivity:
    return LineActivity(SourceLine("train.py", 3, "step"), **figures)


@pytest.mark.parametrize(
    ("label", "values", "expected"),
    [
        ("shape of argument 2 (other)", [(1, 5), (1, 6), (1, 7)], "dim 1 of the shape of"),
        ("argument `k`", [1, 2, 3, 4], "a static argument takes many values"),
        ("dtype of argument 2 (other)", ["a", "b", "c"], "Cast once"),
        ("layout of argument 2 (other)", ["a", "b", "c"], ".contiguous()"),
        ("kind of argument 2 (other)", ["a", "b", "c"], "Always pass the same kind"),
        ("float32 matmul precision", ["a", "b", "c"], "Set it once"),
        ("argument `k`", [1, 1, 1], "TORCH_TPU_MAX_PROGRAMS"),
    ],
)
def test_advice_by_cause(label, values, expected) -> None:
    (advice,) = advise(compiles(label, *values), [line(ops={"aten::op": len(values)})])
    assert expected in advice.text
    assert advice.line.line == 3 and advice.weight == len(values)


def test_no_advice_without_cause() -> None:
    two = compiles("argument `k`", 1, 2)
    assert advise(two, [line(ops={"aten::op": 2})]) == []
    layers = compiles("shape of argument 1 (self)", (4, 8), (4, 16), (4, 32))
    assert advise(layers, [line(ops={"aten::op": 300}, hits=297)]) == []
    assert advise([], [line(waits=3)]) == []


def test_ops_of_a_line_share_one_advice() -> None:
    shapes = [(n, 4) for n in range(5, 12)]
    both = compiles("shape of argument 1 (self)", *shapes, name="aten::exp")
    both += compiles("shape of argument 1 (self)", *shapes, name="aten::log")
    (advice,) = advise(both, [line(ops={"aten::exp": 7, "aten::log": 7})])
    assert "14 programs of 2 ops" in advice.text and "is 5, 6, 7, …, 11" in advice.text


def test_the_part_with_the_most_values_is_the_cause() -> None:
    out = []
    for n, mask in ((2, True), (3, True), (4, False), (5, False)):
        parts = {"argument `mask`": mask, "shape of argument 1 (self)": (n, 4)}
        out.append(Compile("aten::op", n, SourceLine("train.py", 3, "step"), parts))
    (advice,) = advise(out, [line(ops={"aten::op": 4})])
    assert "because shapes change: dim 0" in advice.text


def test_advice_on_fallbacks() -> None:
    (advice,) = advise([], [line(fallbacks=2, ops={"aten::odd on the CPU": 2})])
    assert "aten::odd ran on the CPU 2 times" in advice.text


def test_reports_are_bounded() -> None:
    recompiles.clear()
    for n in range(recompiles._MAX_COMPARED + 5):
        recompiles.report_compile("aten::op", {"argument `n`": n})
    assert len(recompiles._by_name["aten::op"]) == recompiles._MAX_COMPARED
    assert recompiles.reports()[-1].number == recompiles._MAX_COMPARED + 5
    recompiles.clear()


def test_backward_of_a_linear_layer_belongs_to_its_line() -> None:
    layer = torch.nn.Linear(4, 4).to("tpu")
    x = torch.ones(3, 4, device="tpu", requires_grad=True)
    with activity.record() as recording:
        y = layer(x)
        y.sum().backward()
    ops = {
        name
        for a in recording.lines()
        if a.line is not None and a.line.backward and a.line.text == "y = layer(x)"
        for name in a.ops
    }
    assert "aten::linear_backward" in ops
