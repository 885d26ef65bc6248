"""``torch.tpu.compiler``: what the device's compiler is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from torch_tpu import _C
from torch_tpu.program import options as program_options

__all__ = ["custom_compiler_options"]

# XLA's effort, 0 to 3; the names in XLA's own options.
_LEVELS = {
    "xla_optimization_level": "xla_backend_optimization_level",
    "xla_memory_fitting_level": "xla_memory_fitting_level",
}


def _parsed(name: str, text: str) -> tuple[str, program_options.Option]:
    """An option as XLA takes it: its name, and the value in the type that its text has."""
    if name in _LEVELS:
        if text not in ("O0", "O1", "O2", "O3"):
            raise ValueError(f"compiler option {name}: got {text!r}; expected O0, O1, O2 or O3")
        level = int(text[1])
        # Only the optimisation level is a number of XLA's debug options.
        return _LEVELS[name], level if name == "xla_optimization_level" else text
    if text.lower() in ("true", "false"):
        return name, text.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    return name, text


@contextmanager
def custom_compiler_options(options: Mapping[str, str]) -> Iterator[None]:
    """Context manager: programs of this thread are compiled with these XLA options.

    options  XLA option names to texts ("true", "2", "0.5"); ``xla_optimization_level`` and
             ``xla_memory_fitting_level`` take "O0" to "O3"

    It holds for what runs inside, eager or compiled, and for a backward pass started inside. Nested
    contexts merge, the inner one wins. Programs made under other options are not reused. Raises
    TypeError for anything but texts and RuntimeError inside a function that is being compiled; a
    name the compiler does not know is an error of the first program inside.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "custom_compiler_options: not inside torch.compile; put the call of the compiled "
            "function into the context"
        )
    chosen = program_options.current_options()
    for name, text in options.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"custom_compiler_options: expected texts; got {name!r}: {text!r}")
        name, value = _parsed(name, text)
        chosen[name] = value
    before = _C.exchange_compiler_options(program_options.option_set(chosen))
    try:
        yield
    finally:
        _C.exchange_compiler_options(before)
