"""What happens to an op that has neither a lowering nor a decomposition.

``TORCH_TPU_CPU_FALLBACK`` is ``warn`` (default: announced once per op, counted), ``error`` or
``silent`` (counted only).
"""

from __future__ import annotations

import os
import warnings

MODES = ("warn", "error", "silent")
_announced: set[str] = set()
_mode: str | None = None


def fallback_mode() -> str:
    """The current policy; ValueError if the environment variable names none."""
    global _mode
    if _mode is None:
        set_fallback_mode(os.environ.get("TORCH_TPU_CPU_FALLBACK", "warn"))
    assert _mode is not None
    return _mode


def set_fallback_mode(mode: str) -> None:
    """Set the policy to one of "warn", "error", "silent"; ValueError otherwise."""
    global _mode
    if mode not in MODES:
        raise ValueError(f"CPU fallback mode: got {mode!r}; expected one of {', '.join(MODES)}")
    _mode = mode


def announce_fallback(op: str, reason: Exception) -> None:
    """Apply the policy to ``op``: raise NotImplementedError, warn once, or say nothing."""
    mode = fallback_mode()
    if mode == "error":
        raise NotImplementedError(
            f"{op} is not implemented for the tpu device ({reason}). "
            "Set TORCH_TPU_CPU_FALLBACK=warn to run it on the CPU, or report the op."
        ) from reason
    if mode == "warn" and op not in _announced:
        _announced.add(op)
        warnings.warn(
            f"{op} runs on the CPU: the tpu device has no program for it ({reason}). "
            "TORCH_TPU_CPU_FALLBACK=error turns this into an error.",
            UserWarning,
            stacklevel=3,
        )
