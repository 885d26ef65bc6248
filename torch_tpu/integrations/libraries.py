"""Libraries that work with the device: the range that is tested, and what is known not to work.

Read by ``python -m torch_tpu doctor`` and by the support matrix in docs/integrations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

__all__ = ["LIBRARIES", "Library", "report"]


@dataclass(frozen=True)
class Library:
    """distribution: on PyPI. lowest, below: versions tested, ``lowest <= v < below``."""

    distribution: str
    lowest: str
    below: str
    limits: str = ""

    def verdict(self, version: str) -> str:
        """ "tested", "older than tested" or "newer than tested"."""
        if _numbers(version) < _numbers(self.lowest):
            return "older than tested"
        return "tested" if _numbers(version) < _numbers(self.below) else "newer than tested"

    @property
    def range(self) -> str:
        return f">={self.lowest},<{self.below}"


LIBRARIES = (
    Library(
        "transformers",
        "5.24",
        "5.25",
        "a dynamic cache means programs for each new length: prefer cache_implementation='static'",
    ),
    Library(
        "accelerate",
        "1.15",
        "1.16",
        "one process only; mixed_precision='fp16' is refused (use bf16)",
    ),
    Library("safetensors", "0.8", "0.9"),
    Library("peft", "0.21", "0.22", "bitsandbytes' 4- and 8-bit base models are not tested"),
    Library("trl", "1.16", "1.17", "samples (GRPO) are the device's own, not the CPU's"),
    Library("datasets", "5.2", "5.3"),
    Library("kernels", "0.17", "0.18", "the Hub's kernels for TPUs were never loaded here"),
    Library("diffusers", "0.42", "0.43"),
    Library(
        "lightning",
        "2.6",
        "2.7",
        "accelerator='tpu' means torch_xla: pass strategy=TpuStrategy()",
    ),
)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def report() -> list[dict[str, Any]]:
    """One row a library: name, installed version or None, tested range, verdict, limits."""
    rows = []
    for library in LIBRARIES:
        try:
            version: str | None = metadata.version(library.distribution)
        except metadata.PackageNotFoundError:
            version = None
        rows.append(
            {
                "library": library.distribution,
                "version": version,
                "tested": library.range,
                "verdict": library.verdict(version) if version else "not installed",
                "limits": library.limits,
            }
        )
    return rows
