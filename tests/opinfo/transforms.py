"""Forward-mode AD, vmap, Jacobians and second derivatives of an OpInfo sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .compare import (
    SAVE_STATISTICS,
    Arguments,
    assert_close_to_either,
    has_random_gradient,
    is_random,
    name_of,
    on_cpu,
    on_device,
    tensors,
)
from .properties import PROPERTIES

Transform = Callable[[OpInfo, SampleInput, Arguments], Any]


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors(value) if t.is_floating_point() or t.is_complex()]


def _direction(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A fixed tensor of this shape, dtype and device, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(like.shape, generator=generator).to(like.device, like.dtype) + 0.5


def jvp(op: OpInfo, sample: SampleInput, arguments: Arguments) -> Any:
    """Tangents of the results for fixed tangents of all inputs that require gradients."""
    with forward_ad.dual_level():

        def dual(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.requires_grad:
                return x
            plain = x.detach()
            return forward_ad.make_dual(plain, _direction(plain, plain.dim()))

        first, args, kwargs = pytree.tree_map(dual, arguments)
        result = op(first, *args, **kwargs)
        finish = sample.output_process_fn_grad or (lambda x: x)
        unpacked = [forward_ad.unpack_dual(t) for t in _differentiable(finish(result))]
        return [t.tangent for t in unpacked if t.tangent is not None]


def double_backward(op: OpInfo, sample: SampleInput, arguments: Arguments) -> Any:
    """Second derivatives: of a weighted sum of first ones; None where it does not depend."""
    result = op(arguments[0], *arguments[1], **arguments[2])
    finish = sample.output_process_fn_grad or (lambda x: x)
    outputs = [t for t in _differentiable(finish(result)) if t.requires_grad]
    leaves = [t for t in tensors(arguments) if t.requires_grad]
    if not outputs or not leaves:
        return []
    seeds = [_direction(t, 1).requires_grad_() for t in outputs]
    first = torch.autograd.grad(outputs, leaves, seeds, create_graph=True, allow_unused=True)
    roots = [t for t in first if t is not None and t.requires_grad]
    if not roots:
        return []
    second = torch.autograd.grad(
        roots, [*leaves, *seeds], [_direction(t, 2) for t in roots], allow_unused=True
    )
    return [t for t in second if t is not None]


def vmap(op: OpInfo, sample: SampleInput, arguments: Arguments) -> Any:
    """The op over a new leading dim of size 2 of its first tensor."""
    first, args, kwargs = arguments
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return []
    stacked = torch.stack([first.detach(), first.detach()])

    def call(x: torch.Tensor) -> Any:
        result = op(x, *args, **kwargs)
        return tuple(tensors(result)) if not isinstance(result, torch.Tensor) else result

    results = tensors(torch.func.vmap(call)(stacked))
    # Saved statistics differ from the CPU's alone, see ``compare.comparable``.
    return results[:1] if name_of(op) in SAVE_STATISTICS else results


# Elements of a Jacobian: larger samples take long and show nothing else.
_MAX_JACOBIAN = 2000


def jacrev(op: OpInfo, sample: SampleInput, arguments: Arguments) -> Any:
    """The Jacobian of the first differentiable result by the first tensor: vmap over backward."""
    first, args, kwargs = arguments
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return []
    finish = sample.output_process_fn_grad or (lambda x: x)

    def call(x: torch.Tensor) -> torch.Tensor:
        result = _differentiable(finish(op(x, *args, **kwargs)))[0]
        if result.numel() * x.numel() > _MAX_JACOBIAN:
            raise ValueError("a large Jacobian")
        return result

    return [torch.func.jacrev(call)(first.detach())]


TRANSFORMS: dict[str, Transform] = {
    "jvp": jvp,
    "double_backward": double_backward,
    "vmap": vmap,
    "jacrev": jacrev,
}


def supports(op: OpInfo, transform: str) -> bool:
    """Whether PyTorch's own database says that this derivative exists."""
    if transform == "jvp":
        return bool(op.supports_forward_ad)
    if transform == "double_backward":
        return bool(op.supports_gradgrad and op.supports_autograd)
    if transform == "jacrev" and not op.supports_autograd:
        return False
    return not op.name.startswith(("sparse", "to_sparse"))


def check(op: OpInfo, sample: SampleInput, transform: str) -> bool:
    """Compare one transform of one sample; False if the CPU itself refuses it."""
    name = name_of(op)
    if is_random(name, sample) or has_random_gradient(name, sample):
        return False
    if transform == "vmap" and name in PROPERTIES:
        return False
    run = TRANSFORMS[transform]
    try:
        want = run(op, sample, on_cpu(sample))
    except Exception:  # what the CPU refuses is no sample for the device
        return False
    got = run(op, sample, on_device(name, sample))
    assert_close_to_either(name, want, got, lambda: run(op, sample, on_cpu(sample, widen=True)))
    return True
