"""``python -m torch_tpu selftest``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_tpu.cli import main, selftest

# `estimate` compiles with libtpu, which tests/aot covers.
QUICK = [name for name, _ in selftest.CHECKS if name != "estimate"]


def test_everything_passes_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "selftest.json"
    code = main(["selftest", "--output", str(out), "--only", ",".join(QUICK)])
    report = json.loads(out.read_text())
    assert {r["name"]: r["detail"] for r in report["results"] if r["status"] == "FAILED"} == {}
    assert code == 0
    passed = {r["name"] for r in report["results"] if r["status"] == "ok"}
    assert {"transfers", "strict", "debug", "fused", "random", "precision"} <= passed
    assert report["facts"]["devices"] >= 1
    assert "strict" in capsys.readouterr().out


def test_a_failure_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise AssertionError("two draws are equal")

    monkeypatch.setattr(selftest, "CHECKS", [("broken", broken), ("fine", lambda: "good")])
    out = tmp_path / "selftest.json"
    assert main(["selftest", "--output", str(out)]) == 1
    first, second = json.loads(out.read_text())["results"]
    assert first["status"] == "FAILED" and "two draws are equal" in first["trace"]
    assert second["status"] == "ok"


def test_unknown_checks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--only", "nonsense"]) == 2
    assert "expected some of transfers" in capsys.readouterr().out
