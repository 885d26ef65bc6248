"""CSR and its kin in terms of dense ops, where PyTorch's CPU kernel loops over elements itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_tpu.eager.sparse import coo, patterns


def coo_to_csr(self: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """Sorted row numbers (nnz,) as pointers (size + 1,)."""
    return patterns.pointers_of(self, size).to(torch.int32 if out_int32 else torch.int64)


def csr_to_coo(
    crow_indices: Tensor, col_indices: Tensor, *, out_int32: bool = False, transpose: bool = False
) -> Tensor:
    """Pointers (…, rows + 1) and columns (…, nnz) as index tuples (2 + batch, nnz)."""
    dtype = torch.int32 if out_int32 else torch.int64
    nnz = col_indices.shape[-1]
    if crow_indices.dim() == 1:
        pair = [patterns.row_of(crow_indices.to(torch.int64), nnz), col_indices]
        batch: list[Tensor] = []
    else:
        shape = crow_indices.shape[:-1]
        flat = crow_indices.reshape(-1, crow_indices.shape[-1]).to(torch.int64)
        rows = [patterns.row_of(p, nnz) for p in flat]
        count = flat.shape[0]
        number = torch.arange(count, device=flat.device).repeat_interleave(
            nnz, output_size=count * nnz
        )
        batch = list(patterns.tuples(number, shape))
        pair = [torch.cat(rows), col_indices.reshape(-1)]
    if transpose:
        pair.reverse()
    return torch.stack([t.to(dtype) for t in (*batch, *pair)])


def validate(
    is_crow: bool, compressed_idx: Tensor, plain_idx: Tensor, cdim: int, dim: int, nnz: int
) -> None:
    """The invariants of compressed indices, checked where they can be read: on the host."""
    torch.ops.aten._validate_compressed_sparse_indices(
        is_crow, compressed_idx.cpu(), plain_idx.cpu(), cdim, dim, nnz
    )


def _coo(x: Tensor) -> Tensor:
    return x if x.layout in (torch.strided, torch.sparse_coo) else x.to_sparse()


def _back(result: Tensor, layout: torch.layout, like: Tensor) -> Tensor:
    """A COO result in a compressed layout; blocks are those of ``like``."""
    if result.layout is torch.strided or layout is torch.strided:
        return result if result.layout is torch.strided else result.to_dense()
    block = None
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        block = tuple(like.values().shape[-2:])
    return result.to_sparse(layout=layout, blocksize=block)


def _store(out: Tensor, result: Tensor) -> Tensor:
    """Put a result into an out= argument of the same layout."""
    if result.layout is torch.strided:
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
    torch.ops.aten.resize_as_sparse_(out, result)
    return out.copy_(result)


def add_out(self: Tensor, other: Tensor, *, alpha: Any = 1, out: Tensor) -> Tensor:
    """self + alpha * other: compressed + compressed, or dense + compressed."""
    if self.layout is not torch.strided and other.layout is torch.strided:
        self, other, alpha = other * alpha if alpha != 1 else other, self, 1
    if self.layout is torch.strided:
        result = torch.add(self, _coo(other), alpha=alpha)
        return _store(out, result)
    if self.layout is not other.layout:
        raise RuntimeError(
            f"add(sparse, sparse): expected one layout; got {self.layout} and {other.layout}"
        )
    result = torch.add(_coo(self).coalesce(), _coo(other).coalesce(), alpha=alpha)
    return _store(out, _back(result, self.layout, self))


def _matmul(mat1: Tensor, mat2: Tensor) -> Tensor:
    """A product with at least one compressed operand; sparse only if both are."""
    one, two = _coo(mat1), _coo(mat2)
    return torch.ops.aten._sparse_mm(one, two)


def addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    """beta * self + alpha * (mat1 @ mat2) with any of them compressed."""
    if mat1.shape[-1] != mat2.shape[-2]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({mat1.shape[0]}x{mat1.shape[1]} and "
            f"{mat2.shape[0]}x{mat2.shape[1]})"
        )
    product = _matmul(mat1, mat2)
    if alpha != 1:
        product = product * alpha
    if out.layout is torch.strided:
        dense = product if product.layout is torch.strided else product.to_dense()
        if beta != 0:
            dense = torch.add(dense, self.to_dense(), alpha=beta)
        return _store(out, dense)
    sparse = product.coalesce() if product.is_sparse else product.to_sparse()
    if beta != 0:
        sparse = torch.add(sparse, _coo(self).coalesce() * beta)
    return _store(out, _back(sparse, out.layout, out))


def addmv_out(
    self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    product = torch.mv(_coo(mat), vec) * alpha
    return _store(out, product if beta == 0 else torch.add(product, self, alpha=beta))


_SAMPLED_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def sampled_addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """alpha * (mat1 @ mat2) at the pattern of ``self``, plus beta * self."""
    if self.layout is not torch.sparse_csr:
        raise RuntimeError(
            f"sampled_addmm: Expected self to have layout sparse_csr; got {self.layout}"
        )
    if self.dtype not in _SAMPLED_DTYPES:
        raise RuntimeError(
            "sparse_sampled_addmm: Expected self to be a floating-point or complex tensor, but got "
            f"{self.dtype}"
        )
    if mat1.shape[-1] != mat2.shape[-2] or self.shape[-2:] != (mat1.shape[-2], mat2.shape[-1]):
        raise RuntimeError(
            f"sampled_addmm: mat1 and mat2 shapes cannot be multiplied or do not fit self: "
            f"{list(mat1.shape)}, {list(mat2.shape)}, {list(self.shape)}"
        )
    crow, columns, values = self.crow_indices(), self.col_indices(), self.values()
    *batch, rows, columns_row = csr_to_coo(crow, columns)
    lead = tuple(batch)
    left = mat1[(*lead, rows)]
    right = mat2.mT[(*lead, columns_row)]
    products = (left * right).sum(-1).reshape(values.shape) * alpha
    result = products if beta == 0 else products + values * beta
    return torch.sparse_csr_tensor(crow, columns, result, self.shape, check_invariants=False)


def sampled_addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor
) -> Tensor:
    return _store(out, sampled_addmm(self, mat1, mat2, beta=beta, alpha=alpha))


def _reduce_dims(self: Tensor, dim: Any, keepdim: bool, dtype: Any, product: bool) -> Tensor:
    if not keepdim:
        raise RuntimeError("reduction operations on CSR tensors with keepdim=False is unsupported")
    name = "prod" if product else "sum"
    values = self.values()
    values = values.to(dtype) if dtype is not None else values
    if not values.is_floating_point() and not values.is_complex() and dtype is None:
        values = values.to(torch.int64)
    rows, columns = csr_to_coo(self.crow_indices(), self.col_indices())
    dims = {d % 2 for d in ([dim] if isinstance(dim, int) else dim)} or {0, 1}
    if dims == {0, 1}:
        total = getattr(values, name)().reshape(1)
        flat, shape = columns.new_zeros(1), (1, 1)
    else:
        (d,) = dims
        at, shape = (columns, (1, self.shape[1])) if d == 0 else (rows, (self.shape[0], 1))
        flat, inverse = torch.unique(at, return_inverse=True)
        start = values.new_full((flat.shape[0],), 1 if product else 0)
        total = (
            start.index_reduce_(0, inverse, values, "prod")
            if product
            else start.index_add_(0, inverse, values)
        )
    if shape[0] == 1:
        pointers = torch.stack([flat.new_zeros(()), flat.new_full((), flat.shape[0])])
        columns = flat
    else:
        pointers = patterns.pointers_of(flat, shape[0])
        columns = torch.zeros_like(flat)
    kind = self.crow_indices().dtype
    return torch.sparse_csr_tensor(
        pointers.to(kind), columns.to(kind), total, shape, check_invariants=False
    )


def sum_dim(self: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduce_dims(self, dim, keepdim, dtype, product=False)


def prod_dim(self: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduce_dims(self, dim, keepdim, dtype, product=True)


def mm_reduce(self: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Rows of ``other`` scaled by ``self``'s entries and reduced over each row of ``self``.

    The second result names the entry that won amax or amin, -1 where a row has none.
    """
    if not self.is_floating_point():
        raise NotImplementedError(f"sparse_mm_reduce: not implemented for {self.dtype}")
    rows, columns = csr_to_coo(self.crow_indices(), self.col_indices())
    terms = patterns.scale_rows(self.values(), other[columns])
    count, width, nnz = self.shape[0], other.shape[1], rows.shape[0]
    if reduce in ("sum", "mean"):
        out = patterns.add_rows(count, rows, terms)
        if reduce == "mean":
            out = out / self.crow_indices().diff().clamp(min=1).unsqueeze(1).to(out.dtype)
        return out, rows.new_empty(0)
    if reduce not in ("amax", "amin"):
        raise RuntimeError(f"sparse_mm_reduce: unknown reduction {reduce!r}")
    zeros = terms.new_zeros((count, width))
    out = zeros.index_reduce(0, rows, terms, reduce, include_self=False)
    number = torch.arange(nnz, device=rows.device).unsqueeze(1).expand(nnz, width)
    won = torch.where(terms == out[rows], number, nnz)
    arg = rows.new_full((count, width), nnz).index_reduce_(0, rows, won, "amin")
    return out, torch.where(arg == nnz, -1, arg)


def mm_reduce_backward(
    self: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    reduce: str,
    arg_out: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`mm_reduce` for the entries of ``self`` and for ``weight``."""
    rows, columns = csr_to_coo(self.crow_indices(), self.col_indices())
    values = self.values()
    grad = grad_out
    if reduce == "mean":
        grad = grad / self.crow_indices().diff().clamp(min=1).unsqueeze(1).to(grad.dtype)
    spread = grad[rows]
    if reduce in ("amax", "amin"):
        number = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
        spread = torch.where(arg_out[rows] == number, spread, 0)
    grad_self = grad_weight = None
    if output_mask[0]:
        entries = (spread * weight[columns]).sum(1)
        grad_self = torch.sparse_csr_tensor(
            self.crow_indices(), self.col_indices(), entries, self.shape, check_invariants=False
        )
    if output_mask[1]:
        scaled = patterns.scale_rows(values, spread)
        grad_weight = patterns.add_rows(weight.shape[0], columns, scaled)
    return grad_self, grad_weight


def triangular_solve_out(
    self: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
    *,
    X: Tensor,
    M: Tensor,
) -> tuple[Tensor, Tensor]:
    """Solves with a compressed triangular matrix through its dense form."""
    dense = A.to_dense()
    solved, _ = torch.triangular_solve(self, dense, upper, transpose, unitriangular)
    return _store(X, solved), M


def _through_coo(layout: torch.layout) -> Any:
    """Conversion between row and column compression."""

    def convert(self: Tensor, blocksize: Any = None, dense_dim: Any = None) -> Tensor:
        if self.layout is layout and layout in (torch.sparse_csr, torch.sparse_csc):
            return self
        blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
        if blocked and blocksize is None and self.layout in (torch.sparse_bsr, torch.sparse_bsc):
            blocksize = tuple(self.values().shape[-2:])
        through = self.to_dense() if blocked else self.to_sparse()
        return through.to_sparse(
            layout=layout, blocksize=blocksize if blocked else None, dense_dim=dense_dim
        )

    return convert


def _to_row_or_column(layout: torch.layout) -> Any:
    convert = _through_coo(layout)
    return lambda self, dense_dim=None: convert(self, None, dense_dim)


KERNELS = {
    "_to_sparse_csr": _to_row_or_column(torch.sparse_csr),
    "_to_sparse_csc": _to_row_or_column(torch.sparse_csc),
    "_to_sparse_bsr": _through_coo(torch.sparse_bsr),
    "_to_sparse_bsc": _through_coo(torch.sparse_bsc),
    "add.out": add_out,
    "addmm.out": addmm_out,
    "addmv.out": addmv_out,
    "sparse_sampled_addmm": sampled_addmm,
    "sparse_sampled_addmm.out": sampled_addmm_out,
    "_sparse_csr_sum.dim_dtype": sum_dim,
    "_sparse_csr_prod.dim_dtype": prod_dim,
    "_sparse_mm_reduce_impl": mm_reduce,
    "_sparse_mm_reduce_impl_backward": mm_reduce_backward,
    "triangular_solve.X": triangular_solve_out,
    "is_pinned": coo.is_pinned,
    "_pin_memory": coo.pin_memory,
}

# Ops on the dense parts of compressed tensors.
DENSE_KERNELS = {
    "_convert_indices_from_coo_to_csr": coo_to_csr,
    "_convert_indices_from_csr_to_coo": csr_to_coo,
    "_validate_compressed_sparse_indices": validate,
}
