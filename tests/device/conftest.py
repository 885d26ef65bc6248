"""Fixtures of the device-surface tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest
import torch

import torch_tpu  # noqa: F401  (without its entry point, torch does not load it)


@pytest.fixture(autouse=True)
def device_0_is_current() -> Iterator[None]:
    """Tests start and end with tpu:0 current and its default stream."""
    torch.tpu.set_device(0)
    yield
    torch.tpu.set_stream(torch.tpu.default_stream(0))
    torch.tpu.set_device(0)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs code in a fresh interpreter and returns what it printed; fails with its stderr."""

    def run(code: str, **env: str) -> str:
        result = subprocess.run(
            [sys.executable, "-c", dedent(code)],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def busy() -> Callable[[], torch.Tensor]:
    """Enqueues work that takes a while (tens of milliseconds) and returns its result at once."""

    def work() -> torch.Tensor:
        a = torch.full((1024, 1024), 1e-3, device="tpu")
        for _ in range(8):
            a = a @ a
        return a

    return work
