"""Ops that do not agree with the CPU, each with its reason. An entry that passes is an error."""

from __future__ import annotations

# (op, dtype name) → reason
EXPECTED_FAILURES: dict[tuple[str, str], str] = {}
