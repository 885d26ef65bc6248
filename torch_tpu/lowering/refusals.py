"""Which calls PyTorch's CPU may refuse for their dtype, so that the device refuses them too.

The table only says where it is worth asking: the CPU itself decides and gives the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from torch_tpu.lowering import registry
from torch_tpu.lowering.refused_dtypes import REFUSED_DTYPES

# Python's operators, which the database of samples does not have.
_OPERATORS = {
    "__lshift__": "bitwise_left_shift",
    "__ilshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__irshift__": "bitwise_right_shift",
}


def base_name(overload: Any) -> str:
    """The op's name without namespace, overload, in-place underscore and foreach prefix."""
    name: str = overload._schema.name.split("::")[1]
    name = name.removeprefix("_foreach_")
    return _OPERATORS.get(name) or name.removesuffix("_")


@cache
def refused_dtypes(overload: Any) -> frozenset[torch.dtype]:
    """Dtypes for which the CPU has been seen to refuse this op, in any of its forms."""
    names = REFUSED_DTYPES.get(base_name(overload), "")
    return frozenset(getattr(torch, name) for name in names.split())


def dtypes_that_decide(overload: Any, dtypes: Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    """Of the dtypes of a call's tensors in order: all of an elementwise op, else the first one's.

    Those that follow are mostly indices and masks.
    """
    lowering = registry.find(overload)
    return dtypes if lowering is not None and lowering.broadcast else dtypes[:1]


def may_refuse(overload: Any, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the CPU is worth asking about a call with tensors of these dtypes."""
    refused = refused_dtypes(overload)
    return bool(refused) and not refused.isdisjoint(dtypes_that_decide(overload, dtypes))
