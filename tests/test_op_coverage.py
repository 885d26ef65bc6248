"""docs/op-coverage.md tells what the registry says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "op_coverage.py"
    spec = importlib.util.spec_from_file_location("op_coverage", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["op_coverage"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_document_is_up_to_date() -> None:
    script = load_script()
    written = script.registry_part(script.DOCUMENT.read_text())
    expected = [row.cells for row in script.registry_rows()]
    stale = sorted(set(written) ^ set(expected))
    assert written == expected, f"run `python scripts/op_coverage.py`; differing rows: {stale[:10]}"


def test_kinds() -> None:
    kinds = {row.name: row.kinds for row in load_script().registry_rows()}
    assert kinds["add"][0] == "own lowering"
    assert kinds["transpose"] == ("view",)
    assert kinds["empty_strided"][0] == "native core"
    assert kinds["nonzero"][0] == "padded program"
    assert kinds["linear"][0] == "own lowering"
    assert kinds["matmul"][0] == "composite"
    assert "cudnn_convolution" not in kinds
