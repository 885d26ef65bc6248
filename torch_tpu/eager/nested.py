"""Nested tensors of the strided layout: PyTorch's own class over one dense buffer of ours.

Its kernels are loops over the components in terms of dense ops, or act on the whole buffer, and are
registered as they are. (The jagged layout is written in Python on top of dense ops and needs none.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_tpu import _C

# Kernels that PyTorch's CPU has for itself; without them the call is refused.
CPU_ONLY = frozenset({"_fused_sdp_choice", "_pin_memory", "is_pinned"})

# Kernels for dense tensors that make nested ones or take both, and serve any device.
FROM_DENSE = ("_nested_view_from_buffer",)


def neutral_kernels() -> list[str]:
    """What PyTorch registers for nested tensors on the CPU and serves any device."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("NestedTensorCPU")
    aten = [n.removeprefix("aten::") for n in names if n.startswith("aten::")]
    return sorted(n for n in aten if n not in CPU_ONLY and n not in KERNELS)


def _from_components(components: list[Tensor], like: Tensor) -> Tensor:
    return torch.ops.aten._nested_tensor_from_tensor_list(components, device=like.device)


def matmul(self: Tensor, other: Tensor) -> Tensor:
    """Component by component; a dense operand goes with each, or its own slice with each."""
    if not self.is_nested and not other.is_nested:
        raise RuntimeError("matmul: expected a nested operand")
    count = (self if self.is_nested else other).size(0)

    def components(x: Tensor, partner: Tensor) -> list[Tensor]:
        if x.is_nested or x.dim() == partner.dim():
            parts = list(x.unbind())
            if len(parts) != count:
                raise RuntimeError(
                    "matmul: Expected size for the 1st dimension of 2nd input tensor to be: "
                    f"{count} but got: {len(parts)}."
                )
            return parts
        return [x] * count

    pairs = zip(components(self, other), components(other, self), strict=True)
    return _from_components([torch.matmul(a, c) for a, c in pairs], self)


def sum_dim(
    self: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A sum over the last dim, which stays with size 1, as the CPU has it."""
    rank = self.dim()
    if dim is None or len(dim) != 1 or dim[0] % rank != rank - 1 or not keepdim:
        raise RuntimeError(
            "NestedTensor only allows reduction of the last dimension, with keepdim=True"
        )
    return _from_components([x.sum(-1, keepdim=True, dtype=dtype) for x in self.unbind()], self)


def sum_backward(
    grad: Tensor, self: Tensor, dim: list[int] | None, keepdim: bool = False
) -> Tensor:
    pairs = zip(grad.unbind(), self.unbind(), strict=True)
    return _from_components([g.expand_as(x).contiguous() for g, x in pairs], self)


def transform_bias_rescale_qkv(qkv: Tensor, bias: Tensor, num_heads: int) -> Any:
    """Queries, keys and values of padded components."""
    padded = qkv.to_padded_tensor(0.0)
    return torch.ops.aten._transform_bias_rescale_qkv(padded, bias, num_heads)


def _rows(x: Tensor, shape: list[int]) -> Tensor:
    """The buffer of a nested tensor whose components end in ``shape``, as rows of that shape."""
    return x.contiguous().values().reshape(-1, *shape)


def _like(rows: Tensor, example: Tensor) -> Tensor:
    """Rows as a nested tensor with the components of ``example``."""
    plain = example.contiguous()
    return torch.ops.aten._nested_view_from_buffer(
        rows.reshape(-1),
        plain._nested_tensor_size(),
        plain._nested_tensor_strides(),
        plain._nested_tensor_storage_offsets(),
    )


def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(input, normalized_shape)
    out, mean, rstd = torch.native_layer_norm(rows, normalized_shape, weight, bias, eps)
    return _like(out, input), mean, rstd


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    output_mask: list[bool],
) -> tuple[Any, Any, Any]:
    grad, *parameters = torch.ops.aten.native_layer_norm_backward(
        _rows(grad_out, normalized_shape),
        _rows(input, normalized_shape),
        normalized_shape,
        mean,
        rstd,
        weight,
        bias,
        output_mask,
    )
    return None if grad is None else _like(grad, input), *parameters


def from_padded(
    padded: Tensor, cpu_nested_shape_example: Tensor, fuse_transform_0213: bool = False
) -> Tensor:
    """The leading part of each padded component; sizes are rows of a CPU tensor."""
    if fuse_transform_0213:
        padded = padded.permute(0, 2, 1, 3).flatten(2)
    sizes = cpu_nested_shape_example.tolist()
    components = [x[tuple(slice(n) for n in size)] for x, size in zip(padded, sizes, strict=True)]
    return _from_components(components, padded)


def _lengths(mask: Tensor) -> tuple[list[int], bool]:
    """Set entries per row of a (batch, length) mask, and whether they all come first."""
    host = mask.cpu()
    counts = host.sum(-1)
    first = torch.arange(host.shape[-1]) < counts.unsqueeze(-1)
    return counts.tolist(), bool((first == host).all())


def from_mask(t: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
    """Rows of (batch, length, features) that ``mask`` marks, which have to come first."""
    lengths, aligned = _lengths(mask)
    if mask_check and not aligned:
        raise RuntimeError("Expected mask to be left-aligned")
    return _from_components([x[:n] for x, n in zip(t, lengths, strict=True)], t)


def from_mask_left_aligned(t: Tensor, mask: Tensor) -> bool:
    return _lengths(mask)[1]


DENSE_KERNELS = {
    "_nested_from_padded": from_padded,
    "_nested_tensor_from_mask": from_mask,
    "_nested_tensor_from_mask_left_aligned": from_mask_left_aligned,
}

KERNELS = {
    "matmul": matmul,
    "sum.dim_IntList": sum_dim,
    "_nested_sum_backward": sum_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "_transform_bias_rescale_qkv": transform_bias_rescale_qkv,
}

_aten = torch.library.Library("aten", "IMPL")


def register() -> None:
    for name, kernel in KERNELS.items():
        _aten.impl(name, kernel, "NestedTensorPrivateUse1")
    for name, kernel in DENSE_KERNELS.items():
        _aten.impl(name, kernel, "PrivateUse1")
    for name in neutral_kernels():
        _C.register_neutral_kernel(name, "NestedTensorCPU", "NestedTensorPrivateUse1")
    for name in FROM_DENSE:
        _C.register_neutral_kernel(name, "CPU", "PrivateUse1")
