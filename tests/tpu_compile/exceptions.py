"""Ops whose programs the TPU compiler refuses, each with its reason. Strict: one that compiles is an
error."""

from __future__ import annotations

# ATen overload → reason
EXPECTED_FAILURES: dict[str, str] = {}
