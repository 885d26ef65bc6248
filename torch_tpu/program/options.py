"""What a program is compiled with, besides its text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal

from torch_tpu import _C

# 1, 3 or 6 passes of bfloat16 for a float32 matmul; the attribute's names are StableHLO's.
_PRECISION = {1: "DEFAULT", 3: "HIGH", 6: "HIGHEST"}

_emulating = os.environ.get("TORCH_TPU_EMULATE_PRECISION") == "1"
_checks_left_out: ContextVar[bool] = ContextVar("checks_left_out", default=False)
_asked_target: ContextVar[Literal["cpu", "tpu"] | None] = ContextVar("target", default=None)


_dynamic_shapes = os.environ.get("TORCH_TPU_DYNAMIC_SHAPES", "1") != "0"


def dynamic_shapes() -> bool:
    """Whether calls may get programs for many sizes (TORCH_TPU_DYNAMIC_SHAPES=0 turns it off)."""
    return _dynamic_shapes


def exchange_dynamic_shapes(wanted: bool) -> bool:
    """Sets it for the process; returns what was set before."""
    global _dynamic_shapes
    before, _dynamic_shapes = _dynamic_shapes, wanted
    return before


def target() -> Literal["cpu", "tpu"]:
    """What programs are written for: the current plug-in's kind of device."""
    return _asked_target.get() or ("tpu" if _C.plugin_kind() == "tpu" else "cpu")


@contextmanager
def for_target(kind: Literal["cpu", "tpu"]) -> Iterator[None]:
    """Write programs for another kind of device: to compile ahead of time, not to run."""
    token = _asked_target.set(kind)
    try:
        yield
    finally:
        _asked_target.reset(token)


def matmul_precision() -> str:
    """StableHLO's precision name for the current setting (see ``torch.tpu.precision``)."""
    return _PRECISION[_C.matmul_precision()]


def emulate_precision() -> bool:
    """Whether float32 products on the CPU are made as a TPU makes them.

    Asked for by TORCH_TPU_EMULATE_PRECISION=1 or ``torch.tpu.emulate_precision``.
    """
    return _emulating and target() == "cpu"


def exchange_emulate_precision(wanted: bool) -> bool:
    """Sets it for the process; the caller has to forget programs written before."""
    global _emulating
    before, _emulating = _emulating, wanted
    return before


def checks() -> bool:
    """Whether programs report what they find wrong with values."""
    return not _checks_left_out.get()


def index_checks() -> bool:
    """Whether out-of-range indices are noted on the device (TORCH_TPU_CHECK_INDEX)."""
    return checks() and _C.index_checks()


@contextmanager
def without_checks() -> Iterator[None]:
    """Write programs that clamp out-of-range indices and report nothing, assertions neither."""
    token = _checks_left_out.set(True)
    try:
        yield
    finally:
        _checks_left_out.reset(token)


def fingerprint() -> tuple[object, ...]:
    """Everything here that decides what is written into a program and how it is compiled."""
    return (
        target(),
        matmul_precision(),
        emulate_precision(),
        checks(),
        index_checks(),
        _C.allow_excess_precision(),
        _C.compiler_options(),
    )


Option = bool | int | float | str

# Sets of the user's options by number; the number is part of every program's key.
_option_sets: list[dict[str, Option]] = []


def option_set(options: Mapping[str, Option]) -> int:
    """The number of a set of compiler options, for ``_C.exchange_compiler_options``."""
    chosen = dict(options)
    if chosen not in _option_sets:
        _option_sets.append(chosen)
    return _option_sets.index(chosen)


def current_options() -> dict[str, Option]:
    """The user's compiler options that hold for the calling thread."""
    number = _C.compiler_options()
    return {} if number < 0 else dict(_option_sets[number])


def compile_options() -> bytes:
    """The serialised CompileOptionsProto for single-device programs of the current plug-in."""
    return _options_of_set(_C.compiler_options())


@cache
def _options_of_set(number: int) -> bytes:
    overrides: dict[str, Option] = {}
    if _C.plugin_kind() == "cpu":
        # XLA:CPU's default drops a NaN on the right of max/min.
        overrides["xla_cpu_enable_fast_min_max"] = False
    if number >= 0:
        overrides |= _option_sets[number]
    return bytes(_C.compile_options(overrides))
