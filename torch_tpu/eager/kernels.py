"""Register the native boxed kernel for every ATen overload that has a program of its own.

An overload gets a kernel by name if it, or the functional form of a mutating overload, has a
lowering. Everything else reaches PyTorch's composite kernels, or the catch-all.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.eager import host_ops, read_back
from torch_tpu.lowering import registry
from torch_tpu.lowering.variants import functional_variant, written_arguments

# Made, aliased, resized or copied by the native core itself (csrc/core/native_ops.cpp, copy.cpp).
NATIVE = frozenset(
    {
        "aten::clone",
        "aten::copy_",
        "aten::_copy_from",
        "aten::_copy_from_and_resize",
        "aten::_local_scalar_dense",
        "aten::resize_",
        "aten::set_",
        "aten::_to_copy",
        "aten::empty",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::contiguous",
        "aten::detach",
        "aten::detach_",
        "aten::lift",
        # Views whose schema hides it: PyTorch's own kernels alias their argument.
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::lift_fresh",
        "aten::resolve_conj",
        "aten::resolve_neg",
    }
)
_NUMBERS = ("number", "Optional[number]", "List[number]", "Optional[List[number]]")
# Composite ops that csrc/dispatch gives a derivative of their own.
_DIFFERENTIATED = frozenset({"aten::linear"})
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def returns_view(overload: Any) -> bool:
    """Whether a result aliases an argument without being one that was written."""
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns
    )


def operand_names(overload: Any, lowering: registry.Lowering) -> list[str]:
    """Arguments that travel as operands: Scalars, and what the lowering declares."""
    names = []
    for argument in overload._schema.arguments:
        if argument.name in lowering.static:
            continue
        if str(argument.type) in _NUMBERS or argument.name in lowering.operand:
            names.append(argument.name)
    return names


def plan_registrations() -> dict[str, list[str]]:
    """Overload name ("aten::add.Tensor") → operand argument names, for every kernel to register."""
    plan = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        if namespace != "aten":
            continue
        name, _, overload_name = rest.partition(".")
        if f"aten::{name}" in NATIVE or rest in host_ops.NAMES | read_back.NAMES:
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, overload_name or "default", None)
        if overload is None or returns_view(overload):
            continue
        lowering = registry.find(overload)
        if lowering is None:
            if not written_arguments(overload):
                continue
            variant = functional_variant(overload)
            if variant is None or returns_view(variant.functional):
                continue  # squeeze_, t_ and their like change metadata only
            lowering = registry.find(variant.functional)
            if lowering is None:
                continue
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _COMPOSITE)
        if composite and qualified not in _DIFFERENTIATED:
            continue  # a kernel here would hide the op from autograd
        plan[qualified] = operand_names(overload, lowering)
    return plan


def register_kernels() -> None:
    """Load all lowerings and register their kernels and the catch-all."""
    registry.load_all()
    for name, operands in plan_registrations().items():
        _C.register_kernel(name, operands)
    _C.register_fallback()
