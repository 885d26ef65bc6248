"""Ops whose result size is data: a padded program, one read-back of the count, a view.

The padded programs are ops of the namespace ``torch_tpu``, so that they are lowered, cached and run
like any other op; no program depends on the count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.lowering.emit import bind
from torch_tpu.lowering.ops import data_dependent, embedding, matrix_functions, segments
from torch_tpu.lowering.registry import lower, resolve
from torch_tpu.program.cpu_errors import check_dtypes

_library = torch.library.Library("torch_tpu", "FRAGMENT")
_aten = torch.library.Library("aten", "IMPL")


_defined: list[str] = []


def _define(schema: str, meta: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _defined.append(name)
    _library.define(schema)
    _library.impl(name, meta, "Meta")


def _count_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.int64)


def _unique_meta(x: torch.Tensor, inverse: bool, counts: bool, consecutive: bool) -> Any:
    n = x.numel()
    return (
        x.new_empty((n,)),
        x.new_empty((n if inverse else 0,), dtype=torch.int64),
        x.new_empty((n if counts else 0,), dtype=torch.int64),
        _count_like(x),
    )


def _unique_dim_meta(
    x: torch.Tensor, dim: int, inverse: bool, counts: bool, consecutive: bool
) -> Any:
    n = x.shape[dim]
    return (
        x.new_empty(x.shape),
        x.new_empty((n if inverse else 0,), dtype=torch.int64),
        x.new_empty((n if counts else 0,), dtype=torch.int64),
        _count_like(x),
    )


_define(
    "nonzero_padded(Tensor self) -> (Tensor, Tensor)",
    lambda x: (x.new_empty((x.numel(), x.dim()), dtype=torch.int64), _count_like(x)),
)
_define(
    "masked_select_padded(Tensor self, Tensor mask) -> (Tensor, Tensor)",
    lambda x, m: (
        x.new_empty((torch.broadcast_shapes(x.shape, m.shape).numel(),)),
        _count_like(x),
    ),
)
_define(
    "unique_padded(Tensor self, bool inverse, bool counts, bool consecutive) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _unique_meta,
)
_define(
    "unique_dim_padded(Tensor self, int dim, bool inverse, bool counts, bool consecutive) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _unique_dim_meta,
)
_define(
    "repeat_interleave_padded(Tensor repeats, int size) -> (Tensor, Tensor)",
    lambda r, size: (r.new_empty((size,)), _count_like(r)),
)
_define("bincount_size(Tensor self) -> Tensor", _count_like)
_define(
    "bincount_padded(Tensor self, Tensor? weights, int size) -> Tensor",
    lambda x, w, size: x.new_empty(
        (size,),
        dtype=torch.int64
        if w is None
        else (torch.float32 if w.dtype is torch.float32 else torch.float64),
    ),
)

_define(
    "padded_dense_to_jagged(Tensor dense, Tensor[] offsets, int total) -> Tensor",
    lambda dense, offsets, total: dense.new_empty((total, *dense.shape[2:])),
)
_define(
    "embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, "
    "Tensor bag_size, Tensor maximum_indices, int num_weights, bool scale_grad_by_freq, int mode, "
    "Tensor? per_sample_weights, int padding_idx) -> Tensor",
    lambda grad, *rest: grad.new_empty((rest[5], grad.shape[1])),
)


def _lstsq_meta(a: torch.Tensor, y: torch.Tensor) -> Any:
    batch = torch.broadcast_shapes(a.shape[:-2], y.shape[:-2])
    residuals = a.new_empty((*batch, y.shape[-1]), dtype=a.dtype.to_real())
    return a.new_empty((*batch, a.shape[-1], y.shape[-1])), residuals


_define("lstsq_full_rank(Tensor self, Tensor b) -> (Tensor, Tensor)", _lstsq_meta)

lower("torch_tpu.padded_dense_to_jagged")(segments.padded_dense_to_jagged)
lower("torch_tpu.embedding_bag_backward")(embedding.embedding_bag_backward)
lower("torch_tpu.lstsq_full_rank")(matrix_functions.lstsq_full_rank)
lower("torch_tpu.nonzero_padded")(data_dependent.nonzero_padded)
lower("torch_tpu.masked_select_padded")(data_dependent.masked_select_padded)
lower("torch_tpu.repeat_interleave_padded")(data_dependent.repeat_interleave_padded)
lower("torch_tpu.bincount_size")(data_dependent.bincount_size)
lower("torch_tpu.bincount_padded")(data_dependent.bincount)


@lower("torch_tpu.unique_padded")
def _unique_padded(b: Any, x: Any, inverse: bool, counts: bool, consecutive: bool) -> Any:
    fn = data_dependent.unique_consecutive_padded if consecutive else data_dependent.unique_padded
    return fn(b, b.reshape(x, (x.numel,)), inverse, counts)


@lower("torch_tpu.unique_dim_padded")
def _unique_dim_padded(
    b: Any, x: Any, dim: int, inverse: bool, counts: bool, consecutive: bool
) -> Any:
    return data_dependent.unique_dim_padded(b, x, dim, inverse, counts, consecutive)


_ops = torch.ops.torch_tpu


def _grow(n: int) -> int:
    """The next power of two: sizes of padded results grow in few steps."""
    return 1 << max(n - 1, 0).bit_length()


def nonzero(self: torch.Tensor) -> torch.Tensor:
    """Indices of non-zero elements, (count, rank); strides are the CPU's."""
    rows, count = _ops.nonzero_padded(self)
    return rows.narrow(0, 0, int(count))


def masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(
            f"masked_select: expected BoolTensor or ByteTensor for mask, but got {mask.dtype}"
        )
    values, count = _ops.masked_select_padded(self, mask)
    return values.narrow(0, 0, int(count))


def _cut_unique(results: Sequence[torch.Tensor], dim: int, counted: bool) -> Any:
    values, inverse, counts, count = results
    n = int(count)
    return values.narrow(dim, 0, n), inverse, counts.narrow(0, 0, n) if counted else counts


def unique2(
    self: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    """Distinct elements, always sorted (PyTorch leaves the order open when not asked to sort)."""
    values, inverse, counts = _cut_unique(
        _ops.unique_padded(self, return_inverse, return_counts, False), 0, return_counts
    )
    return values, inverse.view(self.shape) if return_inverse else inverse, counts


def unique_consecutive(
    self: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is not None and not (dim in (0, -1) and self.dim() == 1):
        return unique_dim_consecutive(self, dim, return_inverse, return_counts)
    values, inverse, counts = _cut_unique(
        _ops.unique_padded(self, return_inverse, return_counts, True), 0, return_counts
    )
    return values, inverse.view(self.shape) if return_inverse else inverse, counts


def _unique_along(
    self: torch.Tensor, dim: int, return_inverse: bool, return_counts: bool, consecutive: bool
) -> Any:
    rank = self.dim()
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(rank, 1)}, "
            f"{max(rank, 1) - 1}], but got {dim})"
        )
    dim %= max(rank, 1)
    zero_sized = [d for d in range(rank) if self.shape[d] == 0]
    if self.shape[dim] != 0 and zero_sized:
        raise RuntimeError(
            "There are 0 sized dimensions, and they aren't selected, so unique cannot be applied"
        )
    padded = _ops.unique_dim_padded(self, dim, return_inverse, return_counts, consecutive)
    return _cut_unique(padded, dim, return_counts)


def unique_dim(
    self: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    return _unique_along(self, dim, return_inverse, return_counts, False)


def unique_dim_consecutive(
    self: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _unique_along(self, dim, return_inverse, return_counts, True)


def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """Index i repeated ``repeats[i]`` times, 1-d."""
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if output_size is not None:
        return _ops.repeat_interleave_padded(repeats, output_size)[0]
    total = int(repeats.sum())
    if bool((repeats < 0).any()):
        raise RuntimeError("repeats can not be negative")
    rows, _ = _ops.repeat_interleave_padded(repeats, _grow(total))
    return rows.narrow(0, 0, total)


def bincount(
    self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if self.dim() != 1 or self.dtype.is_floating_point or self.dtype is torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and (weights.dim() != 1 or weights.shape != self.shape):
        raise RuntimeError("weights should be 1-d and have the same length as input")
    if self.numel() == 0:
        return torch.zeros(minlength, dtype=torch.int64, device=self.device)
    if self.dtype is not torch.uint8 and bool((self < 0).any()):
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(int(_ops.bincount_size(self)), minlength)
    return _ops.bincount_padded(self, weights, _grow(size)).narrow(0, 0, size)


def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Same shape and same elements; RuntimeError for different devices or dtypes, as on the CPU."""
    if self.device != other.device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device} and {other.device}!"
        )
    if self.dtype != other.dtype:
        raise RuntimeError(
            f"Expected object of data type {self.dtype} but got data type {other.dtype} for "
            "argument 'other'"
        )
    if self.shape != other.shape:
        return False
    return bool(torch.eq(self, other).all()) if self.numel() else True


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "nonzero": nonzero,
    "masked_select": masked_select,
    "_unique2": unique2,
    "unique_consecutive": unique_consecutive,
    "unique_dim": unique_dim,
    "unique_dim_consecutive": unique_dim_consecutive,
    "repeat_interleave.Tensor": repeat_interleave,
    "bincount": bincount,
    "equal": equal,
}
_OUT: dict[str, str] = {"nonzero.out": "nonzero", "masked_select.out": "masked_select"}

# Every overload that is composed here rather than lowered.
NAMES = frozenset([*_IMPLEMENTATIONS, *_OUT])


def _out_form(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*args: Any, out: torch.Tensor) -> torch.Tensor:
        result = fn(*args)
        if out.dtype != result.dtype:
            raise RuntimeError(
                f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead"
            )
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def refusing(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, an implementation of ``aten::name``, after the CPU's checks of dtypes."""
    (overload,) = resolve(f"aten.{name}" if "." in name else f"aten.{name}.default")

    def run(*args: Any, **kwargs: Any) -> Any:
        check_dtypes(overload, bind(overload, args, kwargs))
        return fn(*args, **kwargs)

    return run


def register() -> None:
    """Register the padded programs' kernels and the ATen ops composed from them."""
    for name in _defined:
        _C.register_kernel(f"torch_tpu::{name}", [])
    for name, fn in _IMPLEMENTATIONS.items():
        _aten.impl(name, refusing(name, fn), "PrivateUse1")
    for name, base in _OUT.items():
        _aten.impl(name, _out_form(_IMPLEMENTATIONS[base]), "PrivateUse1")
