"""COO kernels in terms of dense ops, where PyTorch's CPU kernel loops over elements itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_tpu.eager.sparse import patterns


def make(
    indices: Tensor, values: Tensor, sizes: Sequence[int], is_coalesced: bool = False
) -> Tensor:
    """A COO tensor over ``indices`` (sparse dims, nnz) and ``values`` (nnz, dense dims…)."""
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0],
        values.dim() - 1,
        list(sizes),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        pin_memory=None,
        is_coalesced=is_coalesced,
    )


def _sparse_sizes(x: Tensor) -> Sequence[int]:
    return x.shape[: x.sparse_dim()]


def _from_positions(flat: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """A coalesced tensor of ``like``'s sizes from distinct sorted positions."""
    indices = patterns.tuples(flat, _sparse_sizes(like))
    return make(indices, values, like.shape, True)


def _check_out(op: str, out: Tensor, dtype: torch.dtype) -> None:
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(
            f"{op}: result type {dtype} can't be cast to the desired output type {out.dtype}"
        )


def _store(out: Tensor, result: Tensor) -> Tensor:
    """Put a result into an out= argument of the same layout."""
    if result.layout is torch.strided:
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
    out.sparse_resize_and_clear_(result.shape, result.sparse_dim(), result.dense_dim())
    return out.copy_(result.to(out.dtype))


def coalesce(self: Tensor) -> Tensor:
    """Distinct, sorted indices; equal ones are summed."""
    flat, values = patterns.coalesced(self)
    return _from_positions(flat, values, self)


def _scaled(values: Tensor, alpha: Any, dtype: torch.dtype) -> Tensor:
    values = values.to(dtype)
    return values if alpha == 1 else values * alpha


def _add_to_dense(dense: Tensor, sparse: Tensor, alpha: Any) -> Tensor:
    """``dense += alpha * sparse`` in place, through any strides."""
    values = _scaled(sparse._values(), alpha, dense.dtype)
    if sparse.sparse_dim() == 0:
        return dense.add_(values.sum(0))
    if values.shape[0] == 0:
        return dense
    if dense.dtype is torch.bool:
        return dense.logical_or_(sparse.to(torch.uint8).to_dense().to(torch.bool))
    return dense.index_put_(tuple(sparse._indices()), values, accumulate=True)


def _add_sparse(self: Tensor, other: Tensor, alpha: Any, dtype: torch.dtype) -> Tensor:
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(
            "add: expected 'self' and 'other' to have same number of sparse dimensions, but got "
            f"{self.sparse_dim()} and {other.sparse_dim()}"
        )
    parts = [self._values().to(dtype), _scaled(other._values(), alpha, dtype)]
    joined = make(torch.cat([self._indices(), other._indices()], 1), torch.cat(parts), self.shape)
    return joined.coalesce() if self.is_coalesced() and other.is_coalesced() else joined


def add_out(self: Tensor, other: Tensor, *, alpha: Any = 1, out: Tensor) -> Tensor:
    """self + alpha * other for sparse + sparse and dense + sparse."""
    if not self.is_sparse and not other.is_sparse:
        raise RuntimeError("add: expected a sparse operand")
    if self.is_sparse and not other.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    if not self.is_sparse and self.shape != other.shape:
        # The CPU broadcasts neither operand here.
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same size, but self has size "
            f"{list(self.shape)} while other has size {list(other.shape)} (FYI: dense-sparse "
            "addition does not currently support broadcasting)"
        )
    dtype = torch.result_type(self, other)
    _check_out("add", out, dtype)
    if not self.is_sparse:
        if out is self and dtype is out.dtype:
            return _add_to_dense(out, other, alpha)
        dense = self.to(dtype, copy=True)
        return _store(out, _add_to_dense(dense, other, alpha))
    if self.shape != other.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(self.shape)} != "
            f"{list(other.shape)}"
        )
    if other._nnz() == 0 and out is self:
        return out
    return _store(out, _add_sparse(self, other, alpha, dtype))


def _gather_dense(dense: Tensor, sparse: Tensor) -> Tensor:
    """The dense tensor's values at the sparse one's indices, shaped like its values."""
    if sparse.sparse_dim() == 0:
        return dense.unsqueeze(0)
    return dense[tuple(sparse._indices())]


def _is_number(x: Any) -> bool:
    """A 0-d dense tensor, or a number (as which Python kernels receive PyTorch's wrapped ones)."""
    return not isinstance(x, Tensor) or (not x.is_sparse and x.dim() == 0)


def _multiply(self: Any, other: Any) -> Tensor:
    dtype = torch.result_type(self, other)
    for one, two in ((self, other), (other, self)):
        if _is_number(two):
            values = one._values().to(dtype) * two
            return make(one._indices(), values, one.shape, one.is_coalesced())
    shape = torch.broadcast_shapes(self.shape, other.shape)
    for one, two in ((self, other), (other, self)):
        if not two.is_sparse:
            one = one if one.shape == shape else torch.ops.aten._sparse_broadcast_to(one, shape)
            values = one._values().to(dtype) * _gather_dense(two.expand(shape), one)
            return make(one._indices(), values, shape, one.is_coalesced())
    if self.shape != other.shape:
        raise RuntimeError(
            f"mul: expected self and other to be of same size, but got {list(self.shape)} and "
            f"{list(other.shape)}"
        )
    if self.sparse_dim() != other.sparse_dim():
        raise RuntimeError(
            "mul: expected 'self' and 'other' to have same number of sparse dimensions, but got "
            f"{self.sparse_dim()} and {other.sparse_dim()}"
        )
    flat, mine = patterns.coalesced(self)
    theirs_flat, theirs = patterns.coalesced(other)
    at, found = patterns.find(theirs_flat, flat)
    kept = found.nonzero().squeeze(1)
    values = mine[kept].to(dtype) * theirs[at[kept]].to(dtype)
    product = _from_positions(flat[kept], values, self)
    return product._coalesced_(self.is_coalesced() and other.is_coalesced())


def mul_out(self: Any, other: Any, *, out: Tensor) -> Tensor:
    """Product of two sparse tensors, or of a sparse and a dense one."""
    _check_out("mul", out, torch.result_type(self, other))
    return _store(out, _multiply(self, other))


def _check_product(op: str, a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(
            f"{op}: Expected mat1 and mat2 shapes to multiply, got {list(a.shape)} and "
            f"{list(b.shape)}"
        )


def _product(sparse: Tensor, dense: Tensor) -> Tensor:
    """Sparse (…, n, m) times dense (…, m, p): rows of ``dense`` gathered, scaled and summed."""
    indices, values = sparse._indices(), sparse._values()
    *batch, n, _ = sparse.shape
    p = dense.shape[-1]
    lead = [indices[d] for d in range(len(batch))]
    rows = patterns.scale_rows(values, dense[(*lead, indices[-1])])
    at = patterns.positions(indices[:-1], [*batch, n])
    total = n
    for size in batch:
        total *= size
    return patterns.add_rows(total, at, rows).reshape(*batch, n, p)


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta * self + alpha * (mat1 @ mat2), ``mat1`` sparse, the others dense."""
    if not mat1.is_sparse or mat2.is_sparse or self.is_sparse:
        layouts = ", ".join(str(t.layout) for t in (self, mat1, mat2))
        raise RuntimeError(f"addmm: expected layouts strided, sparse_coo, strided; got {layouts}")
    if mat1.sparse_dim() != 2 or mat1.dense_dim() != 0 or mat2.dim() != 2:
        raise RuntimeError(
            f"addmm: expected a sparse and a dense matrix, got {mat1.sparse_dim()}D sparse with "
            f"{mat1.dense_dim()} dense dims and {mat2.dim()}D tensor"
        )
    _check_product("addmm", mat1, mat2)
    if mat1.dtype != mat2.dtype:
        raise RuntimeError(
            f"addmm: expected mat1 and mat2 to have the same dtype, but got {mat1.dtype} and "
            f"{mat2.dtype}"
        )
    product = _product(mat1, mat2)
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product.expand(torch.broadcast_shapes(self.shape, product.shape)).clone()
    return torch.add(product, self, alpha=beta)


def addmm_(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return self.copy_(addmm(self, mat1, mat2, beta=beta, alpha=alpha))


def addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    return _store(out, addmm(self, mat1, mat2, beta=beta, alpha=alpha))


def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    """Batched sparse (b, n, m) times dense (b, m, p)."""
    if mat2.is_sparse or not self.is_sparse:
        raise RuntimeError("bmm_sparse: Tensor 'mat2' must be dense and 'self' sparse")
    if self.dim() != 3 or mat2.dim() != 3 or self.dense_dim() != 0:
        raise RuntimeError(f"bmm_sparse: expected 3D tensors, got {self.dim()}D and {mat2.dim()}D")
    if self.shape[0] != mat2.shape[0]:
        raise RuntimeError(
            "bmm_sparse: 'self.size(0)' and 'mat2.size(0)' must match, got "
            f"{self.shape[0]} and {mat2.shape[0]}"
        )
    _check_product("bmm_sparse", self, mat2)
    return _product(self, mat2)


def bmm_out(self: Tensor, mat2: Tensor, *, out: Tensor) -> Tensor:
    return _store(out, bmm(self, mat2))


def sparse_sparse_matmul(self: Tensor, other: Tensor) -> Tensor:
    """Sparse (n, m) times sparse (m, p), coalesced: entries are joined on the inner index."""
    _check_product("sparse_sparse_matmul", self, other)
    (rows, inner), (other_inner, columns) = self._indices(), other._indices()
    i, j = patterns.join(inner, other_inner, self.shape[1])
    values = self._values()[i] * other._values()[j]
    indices = torch.stack([rows[i], columns[j]])
    return make(indices, values, (self.shape[0], other.shape[1])).coalesce()


def sspaddmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    """beta * self + alpha * (mat1 @ mat2) as a sparse tensor; ``self`` and ``mat1`` sparse."""
    _check_product("sspaddmm", mat1, mat2)
    product = (_product(mat1, mat2) * alpha).to_sparse()
    return _store(out, _add_sparse(self * beta, product, 1, self.dtype))


def hspmm(mat1: Tensor, mat2: Tensor) -> Tensor:
    """Sparse (n, m) times dense (m, p) with one sparse dim: only rows that have entries."""
    _check_product("hspmm", mat1, mat2)
    rows, columns = mat1._indices()
    distinct, inverse = torch.unique(rows, return_inverse=True)
    scaled = patterns.scale_rows(mat1._values(), mat2[columns])
    values = patterns.add_rows(distinct.shape[0], inverse, scaled)
    return make(distinct.unsqueeze(0), values, (mat1.shape[0], mat2.shape[1]))


def hspmm_out(mat1: Tensor, mat2: Tensor, *, out: Tensor) -> Tensor:
    return _store(out, hspmm(mat1, mat2))


def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Slices of ``dim`` in the order of ``index`` (1-d)."""
    rank = self.dim()
    if rank == 0:
        raise IndexError("index_select() cannot be applied to a 0-dim tensor.")
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise IndexError(f"index_select() argument index must be 1-D; got {index.dim()}-D")
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got "
            f"{dim})"
        )
    dim %= rank
    size = self.shape[dim]
    shape = [*self.shape[:dim], index.shape[0], *self.shape[dim + 1 :]]
    if bool(((index < -size) | (index >= size)).any()):
        raise IndexError(f"index_select(): index out of range for dimension {dim} of size {size}")
    index = torch.where(index < 0, index + size, index).to(torch.int64)
    if dim >= self.sparse_dim():
        values = self._values().index_select(dim - self.sparse_dim() + 1, index)
        return make(self._indices(), values, shape, self.is_coalesced())
    at, entry = patterns.join(index, self._indices()[dim], size)
    indices = self._indices()[:, entry]
    indices = torch.cat([indices[:dim], at.unsqueeze(0), indices[dim + 1 :]])
    return make(indices, self._values()[entry], shape, self.is_coalesced() and dim == 0)


def sparse_mask(self: Tensor, mask: Tensor) -> Tensor:
    """``self`` (sparse or dense) at the indices of ``mask``; zero where it has none."""
    if self.shape != mask.shape:
        raise RuntimeError(
            f"sparse_mask(): operands have incompatible sizes; self has size {list(self.shape)} "
            f"but mask has size {list(mask.shape)}"
        )
    indices = mask._indices()
    if not self.is_sparse:
        return make(indices, _gather_dense(self, mask), mask.shape, mask.is_coalesced())
    flat, values = patterns.coalesced(self)
    at, found = patterns.find(flat, patterns.positions(indices, _sparse_sizes(mask)))
    if flat.shape[0] == 0:
        picked = values.new_zeros((indices.shape[1], *values.shape[1:]))
    else:
        picked = torch.where(_as_rows(found, values), values[at], 0)
    return make(indices, picked.to(self.dtype), mask.shape, mask.is_coalesced())


def _as_rows(flags: Tensor, values: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (values.dim() - 1))


def sparse_mask_projection(self: Tensor, mask: Tensor, accumulate_matches: bool = False) -> Tensor:
    """``self`` where ``mask`` has entries, else zero; times their number if accumulating."""
    sizes = _sparse_sizes(self)
    theirs = patterns.positions(mask._indices(), sizes)
    distinct, counts = torch.unique(theirs, return_counts=True)
    at, found = patterns.find(distinct, patterns.positions(self._indices(), sizes))
    values = self._values()
    if distinct.shape[0] == 0:
        return make(self._indices(), torch.zeros_like(values), self.shape, self.is_coalesced())
    factor = torch.where(found, counts[at] if accumulate_matches else 1, 0)
    scaled = values * _as_rows(factor, values).to(values.dtype)
    return make(self._indices(), scaled, self.shape, self.is_coalesced())


def sparse_sum_backward(grad: Tensor, self: Tensor, dim: Sequence[int]) -> Tensor:
    """The gradient of a sum over ``dim``, with the pattern of ``self``."""
    rank, sparse_dims = self.dim(), self.sparse_dim()
    reduced = {d % rank for d in dim}
    values = self._values()
    dense_reduced = sorted(d - sparse_dims + 1 for d in reduced if d >= sparse_dims)
    kept = [d for d in range(sparse_dims) if d not in reduced]

    def spread(rows: Tensor) -> Tensor:
        for d in dense_reduced:
            rows = rows.unsqueeze(d)
        return rows.expand_as(values)

    if not kept:
        result = spread(grad.unsqueeze(0))
        return make(self._indices(), result.clone(), self.shape, self.is_coalesced())
    flat, rows = patterns.coalesced(grad)
    indices = self._indices()
    wanted = patterns.positions(indices[kept], [self.shape[d] for d in kept])
    at, found = patterns.find(flat, wanted)
    if flat.shape[0] == 0:
        return make(indices, torch.zeros_like(values), self.shape, self.is_coalesced())
    picked = torch.where(_as_rows(found, rows), rows[at], 0)
    return make(indices, spread(picked).clone(), self.shape, self.is_coalesced())


def is_pinned(self: Tensor, device: Any = None) -> bool:
    return False


def pin_memory(self: Tensor, device: Any = None) -> Tensor:
    raise RuntimeError(f"cannot pin '{self.type()}': only CPU tensors can be pinned")


KERNELS = {
    "_coalesce": coalesce,
    "add.out": add_out,
    "mul.out": mul_out,
    "addmm": addmm,
    "addmm_": addmm_,
    "addmm.out": addmm_out,
    "bmm": bmm,
    "bmm.out": bmm_out,
    "_sparse_sparse_matmul": sparse_sparse_matmul,
    "sspaddmm.out": sspaddmm_out,
    "hspmm": hspmm,
    "hspmm.out": hspmm_out,
    "index_select": index_select,
    "sparse_mask": sparse_mask,
    "_sparse_mask_projection": sparse_mask_projection,
    "_sparse_sum_backward": sparse_sum_backward,
    "is_pinned": is_pinned,
    "_pin_memory": pin_memory,
}
