"""Ops whose result's shape, or whose error, depends on values that the host has to read.

What they compute runs as programs; only a flag, a rank or a size is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_tpu.eager.host_ops import refusing
from torch_tpu.lowering.decompose import COMPOSITIONS

_aten = torch.library.Library("aten", "IMPL")
_own = torch.ops.torch_tpu

_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def cholesky(self: Tensor, upper: bool = False) -> Tensor:
    """The factor of a positive definite matrix; raises for any other, as the CPU does."""
    return torch.linalg.cholesky(self, upper=upper)


def _check_lstsq(a: Tensor, b: Tensor, driver: str | None) -> None:
    name = "torch.linalg.lstsq"
    if a.dim() < 2:
        raise RuntimeError(f"{name}: input must have at least 2 dimensions.")
    if b.dim() < 1:
        raise RuntimeError(f"{name}: other must have at least 1 dimension.")
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"{name}: Expected input and other to have the same dtype, but got input's dtype "
            f"{a.dtype} and other's dtype {b.dtype}"
        )
    if driver is not None and driver not in _DRIVERS:
        raise RuntimeError(
            f"{name}: parameter `driver` should be one of (gels, gelsy, gelsd, gelss)"
        )
    rows = b.shape[-1] if _is_vector(a, b) else b.shape[-2] if b.dim() > 1 else None
    if rows != a.shape[-2]:
        raise RuntimeError(f"{name}: input.size(-2) should match other.size(-2)")


def _is_vector(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` is a batch of vectors, by the rule of ``torch.linalg.solve``."""
    return b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])


def lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Least squares: solution (…, n, k), residuals, rank, singular values as the CPU's drivers.

    "gels" takes full rank for granted and goes through QR. What the other drivers define is the
    solution of least norm among those of least residual; it comes from the singular values.
    """
    _check_lstsq(self, b, driver)
    vector = _is_vector(self, b)
    target = b.unsqueeze(-1) if vector else b
    m, n = self.shape[-2:]
    real = self.dtype.to_real()
    residuals = self.new_empty((0,), dtype=real)
    values = self.new_empty((0,), dtype=real)
    rank = self.new_empty((0,), dtype=torch.int64)
    if driver == "gels":
        solution, squares = _own.lstsq_full_rank(self, target)
        residuals = squares if m > n else residuals
    else:
        batch = torch.broadcast_shapes(self.shape[:-2], target.shape[:-2])
        matrix = self.expand(*batch, m, n)
        target = target.expand(*batch, *target.shape[-2:])
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        limit = torch.finfo(real).eps * max(m, n) if rcond is None else rcond
        kept = s > limit * s[..., :1]
        inverse = torch.where(kept, 1 / torch.where(kept, s, 1), 0).to(self.dtype)
        solution = vh.mH @ (inverse.unsqueeze(-1) * (u.mH @ target))
        rank = kept.sum(-1)
        if driver in ("gelsd", "gelss"):
            values = s
            if m > n and bool((rank == n).all()):
                residuals = (matrix @ solution - target).abs().square().sum(-2)
    return solution.squeeze(-1) if vector else solution, residuals, rank, values


def tensor_split(self: Tensor, tensor_indices_or_sections: Tensor, dim: int = 0) -> Any:
    """Split points are read: they decide the shapes of the views."""
    given = tensor_indices_or_sections
    if given.dtype != torch.int64:
        raise RuntimeError(
            f"tensor_split expected tensor_indices_or_sections to have dtype of long, but got "
            f"{given.dtype}"
        )
    if given.dim() > 1:
        raise RuntimeError(
            "tensor_split expected tensor_indices_or_sections to be a zero-dimensional or "
            f"one-dimensional tensor, but got a tensor with {given.dim()} dims"
        )
    return torch.tensor_split(self, given.tolist(), dim)


def padded_dense_to_jagged(
    dense: Tensor, offsets: Sequence[Tensor], total_L: int | None = None
) -> Tensor:
    """Without ``total_L`` the last offset is read for it."""
    if total_L is None:
        total_L = int(offsets[-1][-1])
    return _own.padded_dense_to_jagged(dense, list(offsets), total_L)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """A dense gradient is one program, a sparse one PyTorch's composition over it."""
    if not sparse:
        return _own.embedding_bag_backward(
            grad,
            indices,
            offsets,
            offset2bag,
            bag_size,
            maximum_indices,
            num_weights,
            scale_grad_by_freq,
            mode,
            per_sample_weights,
            padding_idx,
        )
    if mode == 2:
        raise RuntimeError("embedding_bag: sparse gradients are not supported for mode 'max'")
    if offset2bag.numel() != indices.numel():
        entries = torch.arange(indices.numel(), device=indices.device, dtype=offsets.dtype)
        offset2bag = torch.searchsorted(offsets, entries, right=True) - 1
    return torch.ops.aten._embedding_bag_sparse_backward(
        grad,
        indices,
        offsets,
        offset2bag,
        bag_size,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> Any:
    return torch.ops.aten._unique2(self, sorted, return_inverse, False)[:2]


def assert_async(self: Tensor, message: str = "") -> None:
    """Raises when the one element of ``self`` is zero."""
    if self.numel() != 1:
        kind = "no values" if self.numel() == 0 else "more than one value"
        raise RuntimeError(f"Boolean value of Tensor with {kind} is ambiguous")
    if not bool(self):
        raise RuntimeError(message or "Expected Tensor with single nonzero value, but got zero")


def functional_assert_async(self: Tensor, assert_msg: str, dep_token: Tensor) -> Tensor:
    assert_async(self, assert_msg)
    return dep_token.clone()


def _with_scalar_list(op: str) -> Callable[..., Any]:
    """A foreach op whose numbers come as a CPU tensor: they travel as operands."""
    packet = getattr(torch.ops.aten, op)

    def run(self: list[Tensor], one: list[Tensor], two: list[Tensor], scalars: Tensor) -> Any:
        if scalars.device.type != "cpu":
            raise RuntimeError(f"Expected scalars to be on CPU, got {scalars.device} instead.")
        if scalars.dim() != 1:
            raise RuntimeError(
                f"Expected packed scalar Tensor to be of dimension 1. Got {scalars.dim()} instead."
            )
        if scalars.shape[0] != len(self):
            raise RuntimeError(
                f"Expected length of scalars to match input of length {len(self)} but got "
                f"{scalars.shape[0]} instead."
            )
        return packet.ScalarList(self, one, two, scalars.tolist())

    return run


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cholesky": cholesky,
    "linalg_lstsq": lstsq,
    "_padded_dense_to_jagged_forward": padded_dense_to_jagged,
    "_embedding_bag_backward": embedding_bag_backward,
    "_unique": unique,
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "_functional_assert_async.msg": functional_assert_async,
    **{
        f"{op}.Tensor": _with_scalar_list(op)
        for op in ("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv", "_foreach_addcdiv_")
    },
}

# Composite above autograd: a kernel here would hide them from it, so the views are made there.
_COMPOSITE: dict[str, Callable[..., Any]] = {
    "tensor_split.tensor_indices_or_sections": tensor_split,
}

# Every overload that is composed here rather than lowered.
NAMES = frozenset(_IMPLEMENTATIONS)


def register() -> None:
    for name, fn in _IMPLEMENTATIONS.items():
        _aten.impl(name, refusing(name, fn), "PrivateUse1")
        # Whole graphs take those that read nothing.
        COMPOSITIONS[f"aten.{name}" if "." in name else f"aten.{name}.default"] = fn
    for name, fn in _COMPOSITE.items():
        _aten.impl(name, fn, "AutogradPrivateUse1")
        _aten.impl(name, fn, "PrivateUse1")
