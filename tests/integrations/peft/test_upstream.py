"""PEFT's test_custom_models (19,485 tests, offline), each 400th of them, on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from tests.integrations import upstream


@pytest.mark.full
def test_its_own_tests(tmp_path: Path) -> None:
    pytest.importorskip("parameterized", reason="parameterized, which PEFT's tests use")
    source = upstream.source_of("peft", tmp_path)
    assert upstream.run(source, ["test_custom_models.py"], [], share=400) >= 40
