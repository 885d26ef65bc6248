"""Comparing results of this device with those of another."""

from __future__ import annotations

from torch_tpu.testing.comparison import Tolerance, assert_close, tolerance

__all__ = ["Tolerance", "assert_close", "tolerance"]
