"""How exact float32 arithmetic on the device is.

A TPU's matrix unit multiplies bfloat16. A float32 matmul splits its operands into bfloat16 parts
and takes 1, 3 or 6 passes over them. The default here is what PyTorch's own switch says,
``torch.set_float32_matmul_precision``: "medium" 1 pass, "high" 3, "highest" 6. PyTorch starts at
"highest", so float32 means float32 unless somebody says otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from torch_tpu import _C

__all__ = ["Precision", "emulate_precision", "precision"]


class Precision(enum.Enum):
    """bfloat16 passes of a float32 matmul or convolution; the value is their number."""

    DEFAULT = 1  # about 8 bits of mantissa
    HIGH = 3  # about 16 bits
    HIGHEST = 6  # float32


@contextmanager
def precision(mode: Precision) -> Iterator[None]:
    """Context manager: float32 matmuls issued inside by this thread run at ``mode``.

    It holds for a backward pass started inside as well. Overrides
    ``torch.set_float32_matmul_precision``. Raises TypeError for anything but a Precision.
    """
    if not isinstance(mode, Precision):
        raise TypeError(f"precision: expected a torch.tpu.Precision; got {mode!r}")
    before = _C.exchange_matmul_precision_override(mode.value)
    try:
        yield
    finally:
        _C.exchange_matmul_precision_override(before)


@contextmanager
def emulate_precision(wanted: bool = True) -> Iterator[None]:
    """Context manager: float32 matmuls and convolutions are made as a TPU's matrix unit makes them.

    On XLA:CPU float32 products are float32, whatever the precision. Inside, they are 1, 3 or 6
    passes of bfloat16 products with float32 sums, as :func:`precision` says, so that what a chip
    would compute can be studied without one. On a TPU it changes nothing.

    Holds for the whole process, and forgets its compiled programs on entry and exit: meant for a
    study, not for a loop. TORCH_TPU_EMULATE_PRECISION=1 asks for it from the start, graphs of
    ``torch.compile`` included.
    """
    from torch_tpu.program import options

    before = options.exchange_emulate_precision(wanted)
    _C.clear_programs()
    try:
        yield
    finally:
        options.exchange_emulate_precision(before)
        _C.clear_programs()


def current_precision() -> Precision:
    """The precision float32 matmuls of the calling thread run at now."""
    return Precision(_C.matmul_precision())


def get_allow_excess_precision() -> bool:
    """Whether XLA may keep intermediates wider than the program says; False unless set."""
    return _C.allow_excess_precision()


def set_allow_excess_precision(allow: bool) -> None:
    """Sets it for the whole process. Programs compiled under the other setting are not reused."""
    if not isinstance(allow, bool):
        raise TypeError(f"allow_excess_precision: expected a bool; got {allow!r}")
    _C.set_allow_excess_precision(allow)
