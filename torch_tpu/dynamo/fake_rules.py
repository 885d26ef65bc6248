"""Shapes of fake results for ops whose meta kernel PyTorch lacks or has for CUDA only.

Rows in PyTorch's own table of such rules. They answer for tensors of the device, and leave every
other call to what comes next in the table. Light on purpose: imported with fake tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["install"]

# Their meta kernels have the limits of CUDA's kernels (bfloat16, aligned strides).
_CUDA_ONLY = ("aten::_grouped_mm", "aten::_scaled_mm_v2")

# Kernels under these keys run on tensors without data.
_GIVE_SHAPES = (
    "Meta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def _lacks_rule(overload: torch._ops.OpOverload) -> bool:
    """Whether PyTorch has no shapes of this op for other devices. Cheap: asked for every op."""
    return overload.namespace == "aten" and _lacks_rule_in_aten(overload)


@cache
def _lacks_rule_in_aten(overload: torch._ops.OpOverload) -> bool:
    if overload._schema.is_mutable:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return overload._schema.name in _CUDA_ONLY or not any(
        has_kernel(overload.name(), key) for key in _GIVE_SHAPES
    )


def _from_lowering(
    mode: torch._subclasses.FakeTensorMode,
    overload: torch._ops.OpOverload,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Empty results as the op's lowering declares them; NotImplemented for other devices."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    device = next((t.device for t in tensors if t.device.type == "tpu"), None)
    if device is None:
        return NotImplemented
    from torch_tpu.lowering import registry
    from torch_tpu.lowering.emit import bind
    from torch_tpu.lowering.types import Value

    lowering = registry.find(overload)
    if lowering is None or lowering.specs is None:
        return NotImplemented
    values = pytree.tree_map_only(
        torch.Tensor, lambda t: Value("", tuple(t.shape), t.dtype), bind(overload, args, kwargs)
    )
    with mode:
        results = [
            None if spec is None else torch.empty(spec[0], dtype=spec[1], device=device)
            for spec in lowering.specs(*values)
        ]
    returns = overload._schema.returns
    if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
        return results[0]
    return results if len(returns) == 1 else tuple(results)


def install() -> None:
    """Add the rows."""
    from torch._subclasses import fake_impls

    fake_impls.register_op_impl(_lacks_rule)(_from_lowering)
