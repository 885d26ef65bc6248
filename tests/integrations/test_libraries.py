"""The table of libraries, and hooks that wait for an import."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torch_tpu.cli import doctor
from torch_tpu.import_hooks import after_import
from torch_tpu.integrations.libraries import LIBRARIES, Library, report

ROOT = Path(__file__).resolve().parents[2]


def test_verdict() -> None:
    library = Library("x", "1.15", "2")
    versions = {"1.14.9": "older", "1.15.0": "tested", "1.99": "tested", "2.0.0": "newer"}
    for version, verdict in versions.items():
        assert library.verdict(version).startswith(verdict), version


def test_the_extra_and_the_table_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"]["huggingface"]:
        name = requirement.partition(">")[0]
        library = next(x for x in LIBRARIES if x.distribution == name)
        assert requirement == f"{name}{library.range}"


def test_doctor_lists_what_is_installed() -> None:
    rows = [
        {"library": "a", "version": "1", "tested": ">=1,<2", "verdict": "tested", "limits": "slow"},
        {"library": "b", "version": None, "tested": "", "verdict": "not installed", "limits": ""},
    ]
    assert doctor.library_lines(rows) == ["a 1: tested (>=1,<2); slow"]
    assert {row["library"] for row in report()} == {x.distribution for x in LIBRARIES}


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = 1\nseen = __spec__.loader is __loader__\n")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    after_import("waited_for", lambda module: calls.append(module.value))
    assert calls == []
    import waited_for

    assert calls == [1] and waited_for.seen
    after_import("waited_for", lambda module: calls.append("at once"))
    assert calls == [1, "at once"]
    after_import("never_there", calls.append)
    with pytest.raises(ModuleNotFoundError):
        import never_there  # noqa: F401


def test_importing_the_device_imports_no_library() -> None:
    names = [library.distribution for library in LIBRARIES]
    code = f"import sys, torch_tpu; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_support_matrix_is_generated() -> None:
    folder = ROOT / "docs" / "integrations"
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "support_matrix.py")
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    kept = json.loads((folder / "models.json").read_text())
    assert (folder / "support-matrix.md").read_text() == matrix.page(kept)
