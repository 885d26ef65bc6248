from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torch_tpu import _C


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Tests share no compiled code, and Dynamo's limit of recompiles counts for each alone."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counted() -> Callable[[], dict[str, int]]:
    """What the counters have gained since the last call (or the start of the test)."""
    last = _C.stats()

    def since() -> dict[str, int]:
        nonlocal last
        now = _C.stats()
        gained = {k: now[k] - last[k] for k in now if isinstance(now[k], int)}
        last = now
        return gained

    return since
