from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shares_programs() -> bool:
    """Sweeps: what others compiled is used."""
    return True
