"""What PyTorch's CPU raises for a call, asked of the CPU itself with tensors of no meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from torch_tpu.lowering import emit, refusals
from torch_tpu.program.plan import ScalarArg, TensorArg


def map_arguments(value: Any, fn: Any) -> Any:
    """Apply ``fn`` to the tensors and the descriptions of tensors and numbers in an argument."""
    if isinstance(value, (TensorArg, ScalarArg, torch.Tensor)):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return [map_arguments(v, fn) for v in value]
    return value


_ABOUT_DTYPES = re.compile(r"type|float|complex|bool|half|integ|double|\blong\b", re.IGNORECASE)

# Larger calls are not repeated on the CPU for the sake of an error message.
_MAX_NUMEL_FOR_ERRORS = 1 << 24


def error_of_cpu(
    overload: Any, args: Sequence[Any], *, unimplemented: bool = False, fill: int = 0
) -> Exception | None:
    """What the CPU raises for a call; None if it takes it, or where that is not tried.

    ``args`` are in the schema's order. ``unimplemented``: a NotImplementedError of the CPU's counts
    too. ``fill`` is what its tensors hold.

    PyTorch's meta kernels agree with the CPU on what is wrong, but those written in Python not
    always on the exception's class and words, and some have the rules of a CUDA kernel instead.
    """
    if _numel(args) > _MAX_NUMEL_FOR_ERRORS:
        return None

    def to_cpu(arg: TensorArg | ScalarArg | torch.Tensor) -> Any:
        if isinstance(arg, ScalarArg):
            return arg.value
        if isinstance(arg, torch.Tensor):
            return torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype).fill_(fill)
        if arg.wrapped:
            return emit.wrapped_number(arg.dtype)
        return torch.empty_strided(arg.sizes, arg.strides, dtype=arg.dtype).fill_(fill)

    values = [map_arguments(a, to_cpu) for a in args]
    for i, argument in enumerate(overload._schema.arguments):
        if argument.name == "device" and values[i] is not None:
            values[i] = torch.device("cpu")
    positional, keywords = emit.unbind_arguments(overload, values)
    random = torch.Tag.nondeterministic_seeded in overload.tags
    state = torch.get_rng_state() if random else None
    try:
        overload(*positional, **keywords)
    except NotImplementedError as refusal:
        return refusal.with_traceback(None) if unimplemented else None
    except Exception as on_cpu:
        return on_cpu.with_traceback(None)
    finally:
        if state is not None:
            torch.set_rng_state(state)
    return None


def check_dtypes(overload: Any, args: Sequence[Any]) -> None:
    """Raise what the CPU raises for tensors of dtypes that its kernel does not have.

    Calls too large to ask about are taken.
    """
    dtypes = [t.dtype for t in _tensors(args) if isinstance(t, torch.Tensor) or not t.wrapped]
    dtypes = dtypes or [a for a in args if isinstance(a, torch.dtype)]  # a factory
    if not refusals.may_refuse(overload, dtypes):
        return
    errors: list[Exception] = []
    for fill in (0, 1):  # values may be wrong as well
        error = error_of_cpu(overload, args, unimplemented=True, fill=fill)
        if error is None:
            return
        if isinstance(error, NotImplementedError):
            raise error
        errors.append(error)
    if _ABOUT_DTYPES.search(str(errors[0])):
        raise errors[0]
    raise NotImplementedError(f'"{overload.name()}" not implemented for {dtypes[0]}')


def check_result_dtypes(overload: Any, args: Sequence[Any]) -> None:
    """Raise what the CPU raises where it does not cast a result to its ``out=`` argument."""
    error = error_of_cpu(overload, args)
    if error is not None and _ABOUT_DTYPES.search(str(error)):
        raise error


def _tensors(args: Sequence[Any]) -> list[TensorArg | torch.Tensor]:
    leaves: list[TensorArg | torch.Tensor] = []
    for arg in args:
        map_arguments(arg, lambda a: None if isinstance(a, ScalarArg) else leaves.append(a))
    return leaves


def _numel(args: Sequence[Any]) -> int:
    return sum(
        t.numel() if isinstance(t, torch.Tensor) else math.prod(t.sizes) for t in _tensors(args)
    )
