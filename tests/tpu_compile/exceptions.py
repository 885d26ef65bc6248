"""Ops whose programs the TPU compiler refuses, each with its reason; one that compiles fails."""

from __future__ import annotations

# ATen overload → reason
EXPECTED_FAILURES: dict[str, str] = {}
