"""``aot.compile`` and ``python -m torch_tpu estimate`` on small models, for three chips."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.aot.conftest import TinyGpt, needs_libtpu
from torch_tpu import aot
from torch_tpu.aot import workload
from torch_tpu.aot.compiled import Compiled

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch import nn
from torch_tpu import aot


def layer(batch: int = 8, width: int = 256):
    with torch.device("meta"):
        return aot.Workload(nn.Linear(width, width), (torch.zeros(batch, width),), name="layer")


def pair():
    with torch.device("meta"):
        return nn.ReLU(), torch.zeros(8, 128)


def wrong():
    return 3
"""


def estimate(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch_tpu", "estimate", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(SCRIPT)
    return str(path)


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("target", ["v5e-1", "v6e-1", "tpu7x:1x1x1"])
@pytest.mark.parametrize("train", [False, True], ids=["call", "step"])
def test_compile(target: str, train: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model, tokens = TinyGpt(4, width=128), torch.zeros(4, 64, dtype=torch.long)
    args = (tokens, tokens) if train else (tokens,)
    mesh = {"fsdp": 2} if target.startswith("tpu7x") else None
    program = aot.compile(model, *args, target=target, train=train, mesh=mesh)
    memory, cost = program.memory, program.cost
    assert program.fits and memory.total < 100e6
    assert cost.cycles > 0 and 0 < program.mfu < 1
    assert cost.unknown_trip_counts == 0
    assert cost.core_seconds == cost.cycles / program.target.chip.clock
    devices = program.partitions
    assert cost.flops >= 0.9 * program.model_flops * (1 if devices == 1 else 0.5)
    if train:
        weights = 4 * sum(p.numel() for p in model.parameters())
        assert memory.by_role["parameter"] <= weights
        assert memory.aliased > 2.5 * memory.by_role["parameter"]
    modules = " ".join(cost.by_module())
    assert "blocks.*" in modules and "head" in modules
    lines = [line for line in cost.by_line() if line]
    assert any("tests/aot/conftest.py" in line for line in lines)
    saved = tmp_path / "program"
    program.save(saved)
    again = Compiled.load(saved)
    assert again.report() == program.report() and again.executable == program.executable
    assert "ENTRY" in program.hlo_text() and "stablehlo" in program.text
    json.dumps(program.report())


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.parametrize("contraction", [False, True])
def test_grouped_products_work_in_proportion_to_their_rows(contraction: bool) -> None:
    """Every loop is counted, and 32 groups cost a few times one product, not 32 times."""
    rows, inner, columns, groups = 8192, 256, 256, 32
    with torch.device("meta"):
        x = torch.zeros(rows, inner, dtype=torch.bfloat16)
        wide = torch.zeros(rows, columns, dtype=torch.bfloat16)
        y = torch.zeros(groups, inner, columns, dtype=torch.bfloat16)
        ends = torch.zeros(groups, dtype=torch.int32)

    def product(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.T if contraction else x, y, ends)

    program = aot.compile(product, x, wide if contraction else y, ends, target="v6e-1")
    once = 2 * rows * inner * columns
    assert program.cost.unknown_trip_counts == 0
    assert once <= program.cost.flops < 4 * once


@needs_libtpu
@pytest.mark.tpu_compile
def test_what_does_not_fit_says_by_how_much() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(65536, 65536), torch.zeros(8, 65536)
    with pytest.raises(aot.HbmExceededError) as caught:
        aot.compile(model, x, target="v5e-1")
    assert caught.value.needed > 17e9 > caught.value.available > 15e9
    job = workload.Job(workload.Workload(model, (x,)), aot.resolve("v5e-1"))
    (failure,) = workload.run([job])
    assert isinstance(failure, aot.Failure) and failure.too_large
    assert failure.report()["fits"] is False


@needs_libtpu
@pytest.mark.tpu_compile
def test_largest_batch() -> None:
    def make(batch: int) -> workload.Workload:
        with torch.device("meta"):
            x = torch.zeros(batch, 2**26)
            return workload.Workload(torch.sin, (x,), name="sin")

    best, program, failed = workload.largest_batch(make, aot.resolve("v5e-1"))
    # A row needs 256 MiB twice, of 15.75 GiB, but rows come in tiles of 8: 25 need what 32 do.
    assert best == 24
    assert program is not None and program.fits and failed is not None


@needs_libtpu
@pytest.mark.tpu_compile
def test_command_line(script: str, tmp_path: Path) -> None:
    done = estimate(f"{script}:layer", "--target", "v6e-1", "--batch", "16", "--json")
    report = json.loads(done.stdout)
    assert report["fits"] and report["name"] == "layer" and report["memory"]["arguments"] > 0
    assert report["model_flops"] == 2 * 16 * 256 * 256
    table = " ".join(estimate(f"{script}:layer", "--set", "width=512").stdout.split())
    assert "HBM" in table and "fits" in table and "MFU" in table and "Nothing was run" in table
    swept = estimate(f"{script}:layer", "--sweep", "target=v5e-1,v6e-1", "--sweep", "batch=8,16")
    assert all(word in swept.stdout for word in ("v5e-1", "v6e-1", "batch=16"))
    assert json.loads(estimate(f"{script}:pair", "--json").stdout)["fits"]
    large = ("--set", "width=131072", "--target", "v5e-1")
    assert json.loads(estimate(f"{script}:layer", *large, "--json", code=1).stdout)["fits"] is False
    assert "DOES NOT FIT" in estimate(f"{script}:layer", *large, code=1).stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{script}:nothing"], "it has .*layer"),
        (["{script}:layer", "--target", "v6e-3"], "expected one of v6e-1"),
        (["{script}:layer", "--set", "depth=3"], "no option 'depth'; expected one of batch, width"),
        (["{script}:layer", "--set", "depth"], "expected NAME=VALUE"),
        (["{script}:layer", "--mesh", "fsdp=x"], "expected a number"),
        (["{script}:wrong"], "expected an aot.Workload"),
        (["nowhere.py:layer"], "no file nowhere.py"),
        (["script"], "expected SCRIPT.py:FUNCTION"),
    ],
)
def test_wrong_use(
    arguments: list[str], words: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_tpu.cli import main

    code = main(["estimate", *[a.replace("{script}", script) for a in arguments]])
    assert code == 2
    assert re.search(words, capsys.readouterr().err)


@needs_libtpu
@pytest.mark.tpu_compile
def test_page_opens_in_a_browser(script: str, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium here (Debian's package chromium)")
    pytest.importorskip(
        "plotly", reason="plotly is not installed (pip install 'torch-tpu[report]')"
    )
    page = tmp_path / "page.html"
    estimate(f"{script}:layer", "--html", str(page), "--json")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=8000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    dom = done.stdout
    # Plotly has drawn: three figures, each with its drawing.
    assert dom.count('class="main-svg"') >= 3, done.stderr[-500:]
    for words in ("layer on v6e-1", "available 31.24 GiB", "FLOP per byte", "fits"):
        assert words in dom
    outside = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert "src=" not in outside and "href=" not in outside, "one file, nothing fetched"


def example_workloads() -> list[Any]:
    import importlib

    sys.path.insert(0, str(ROOT / "examples" / "models"))
    try:
        out = []
        for name in ("mingpt", "vision", "dlrm"):
            module = importlib.import_module(name)
            out += [
                pytest.param(value, id=f"{name}.{key}")
                for key, value in vars(module).items()
                if key.endswith(("train", "infer"))
            ]
        return out
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("builder", example_workloads())
def test_examples_are_captured(builder: Any) -> None:
    captured = builder().capture()
    assert captured.model_flops > 1e6 and captured.parameters > 1e6


@pytest.mark.parametrize(
    "size, parameters",
    [
        ("LLAMA3_8B", 8.03e9),
        ("LLAMA3_70B", 70.6e9),
        ("QWEN3_0_6B", 0.596e9),
        ("QWEN3_8B", 8.19e9),
        ("QWEN3_32B", 32.8e9),
    ],
)
def test_transformers_have_their_public_sizes(size: str, parameters: float) -> None:
    sys.path.insert(0, str(ROOT / "examples" / "models"))
    try:
        import transformer
    finally:
        sys.path.pop(0)
    config = getattr(transformer, size)
    for build in (transformer.prefill, transformer.decode):
        captured = build(config, 1, 32).capture()
        assert captured.parameters == pytest.approx(parameters, rel=0.01)
        assert captured.loops == 1
    assert len(captured.donated) == 2


@needs_libtpu
@pytest.mark.tpu_compile
@pytest.mark.full
@pytest.mark.parametrize("target", ["v5e-8", "v6e-8", "tpu7x-8"])
@pytest.mark.parametrize("builder", example_workloads())
def test_examples_compile(builder: Any, target: str) -> None:
    (result,) = workload.run([workload.Job(builder(), aot.resolve(target))])
    assert isinstance(result, aot.Compiled), result.report()
    assert result.cost.cycles > 0
