"""Eager modes: when the ops a program calls are run.

The process has a default (``torch.tpu.eager_mode``), a thread can override it for a while
(``with torch.tpu.set_eager_mode(mode)``).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_tpu import _C

__all__ = ["EagerMode", "debug", "set_eager_mode"]


class EagerMode(enum.Enum):
    """When an op runs. The names are those that libraries know."""

    # Strict: every op is a program of its own, enqueued at once, waited for when needed.
    DEFER_NEVER = 0
    # Debug: as Strict, and each op is waited for, so that an error appears at its line.
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 1
    # Fused: ops are recorded and run in groups.
    DEFER_AND_FUSE = 2


def _value(mode: EagerMode) -> int:
    if not isinstance(mode, EagerMode):
        raise TypeError(f"eager_mode: expected a torch.tpu.EagerMode; got {mode!r}")
    if mode is EagerMode.DEFER_AND_FUSE:
        _cut_after_optimizer_steps()
    return mode.value


@cache
def _cut_after_optimizer_steps() -> None:
    """From the first use of Fused mode on, recorded ops are run at the end of an optimizer's step.

    With the end of backward, which the native core sees, that divides a training loop at the same
    places in every iteration, whatever is logged or evaluated in between.
    """
    register_optimizer_step_post_hook(lambda *_: _C.cut_traces())


def get_eager_mode() -> EagerMode:
    """The mode that holds for the calling thread."""
    return EagerMode(_C.eager_mode())


def set_default_eager_mode(mode: EagerMode) -> None:
    """Sets the process's default mode. Raises TypeError."""
    _C.set_eager_mode(_value(mode))


@contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Context manager: ops issued inside by this thread, and their backward, run under ``mode``."""
    before = _C.exchange_eager_mode_override(_value(mode))
    try:
        yield
    finally:
        _C.exchange_eager_mode_override(before)


@contextmanager
def debug(*, check_nan: bool = False, check_inf: bool = False) -> Iterator[None]:
    """Context manager: Debug mode, in which each op is finished before the next line runs.

    An error names the Python line, the op and its arguments; in a backward pass the line is that
    of the forward op. Holds for the calling thread and the backward passes it starts.

    Args:
        check_nan: raise RuntimeError at the first op that makes a NaN from arguments without one.
        check_inf: the same for infinities. A mask of ``-inf`` is no error: its number was given.

    Each check costs two programs and a wait per op.
    """
    mode = _C.exchange_eager_mode_override(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING.value)
    checks = _C.exchange_number_checks(int(check_nan) | int(check_inf) << 1)
    try:
        yield
    finally:
        _C.exchange_number_checks(checks)
        _C.exchange_eager_mode_override(mode)


def read_environment() -> None:
    """Takes the default mode from the environment, once, when the package is imported.

    ``TORCH_TPU_LAUNCH_BLOCKING=1`` is Debug, ``TORCH_TPU_DEFER_AND_FUSE=1`` Fused.
    """
    if os.environ.get("TORCH_TPU_LAUNCH_BLOCKING") == "1":
        set_default_eager_mode(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING)
    elif os.environ.get("TORCH_TPU_DEFER_AND_FUSE") == "1":
        set_default_eager_mode(EagerMode.DEFER_AND_FUSE)
