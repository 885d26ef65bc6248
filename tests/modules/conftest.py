"""Sweeps count no compilations and share what they compile."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shares_programs() -> bool:
    return True
