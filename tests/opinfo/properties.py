"""Defining properties of results that are not unique: what is asserted instead of equal elements.

Equal elements may come in any order unless a sort is stable, and singular vectors have a free
phase; the CPU and the device choose differently, and either choice is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing import assert_close

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]
Property = Callable[[Arguments, Any, Any], None]


def _argument(arguments: Arguments, position: int, name: str, default: Any) -> Any:
    """An argument after the input, given by position or by name."""
    _, args, kwargs = arguments
    return args[position] if len(args) > position else kwargs.get(name, default)


def _picked(x: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` at ``indices`` along ``dim``, which the indices may lack."""
    if x.dim() == 0:
        return x.expand_as(indices)
    keep = indices.dim() == x.dim()
    at = indices if keep else indices.unsqueeze(dim)
    out = x.gather(dim, at)
    return out if keep else out.squeeze(dim)


def _distinct(indices: torch.Tensor, dim: int) -> None:
    if indices.dim() == 0 or indices.numel() == 0:
        return
    ordered = indices.sort(dim).values
    assert not (ordered.diff(dim=dim) == 0).any(), "an element was picked twice"


def _exact(want: Any, got: Any) -> None:
    assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=False)


def selection(position: int, ordered: bool = True) -> Property:
    """Values as the CPU's; the elements at the returned indices are those values.

    ``position`` is that of ``dim`` after the input; ``ordered=False`` allows any order (topk).
    """

    def check(arguments: Arguments, want: Any, got: Any) -> None:
        x, dim = arguments[0], _argument(arguments, position, "dim", -1)
        _exact(_picked(x, got[1], dim), got[0])
        if got[1].dim() == x.dim() and got[1].shape != (1,) * x.dim():
            _distinct(got[1], dim)
        in_order = ordered or _argument(arguments, 3, "sorted", True)
        if in_order or x.dim() == 0:
            _exact(want[0], got[0])
        else:
            _exact(want[0].sort(dim).values, got[0].sort(dim).values)

    return check


def sort(arguments: Arguments, want: Any, got: Any) -> None:
    x = arguments[0]
    if arguments[2].get("stable"):
        _exact(want[1], got[1])
    dim = _argument(arguments, 0, "dim", -1)
    _exact(want[0], got[0])
    _exact(_picked(x, got[1], dim), got[0])
    _distinct(got[1], dim)


def argsort(arguments: Arguments, want: Any, got: Any) -> None:
    x = arguments[0]
    if arguments[2].get("stable"):
        _exact(want, got)
    dim = _argument(arguments, 0, "dim", -1)
    _exact(_picked(x, want, dim), _picked(x, got, dim))
    _distinct(got, dim)


def _close(want: Any, got: Any) -> None:
    digits = 1e-4 if want.dtype in (torch.float32, torch.complex64) else 1e-6
    assert_close(got, want, rtol=digits, atol=digits, equal_nan=True, check_stride=False)


def _orthonormal(columns: torch.Tensor) -> None:
    product = columns.mH @ columns
    eye = torch.eye(product.shape[-1], dtype=product.dtype).expand_as(product)
    _close(eye, product)


def singular_values(adjoint: bool) -> Property:
    """Left and right vectors share a free phase; surplus ones are any orthonormal completion.

    ``adjoint``: the op returns V's adjoint.
    """

    def check(arguments: Arguments, want: Any, got: Any) -> None:
        k = want[1].shape[-1]

        def product(u: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            vh = v if adjoint else v.mH
            return (u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :]

        _close(want[1], got[1])
        _close(product(*want), product(*got))
        _orthonormal(got[0])
        _orthonormal(got[2].mH if adjoint else got[2])

    return check


def low_rank(arguments: Arguments, want: Any, got: Any) -> None:
    """A random subspace is found first: what has more than q dimensions is projected on it.

    Then any subspace is right whose product is that projection.
    """
    a, (c,), kwargs = arguments
    shift = kwargs.get("M")
    if shift is None:
        return singular_values(adjoint=False)(arguments, want, got)
    u, s, v = got
    _orthonormal(u)
    _orthonormal(v)
    matrix = a @ c.mT - shift
    tall = matrix.shape[-2] >= matrix.shape[-1]
    projection = u @ u.mH @ matrix if tall else matrix @ v @ v.mH
    _close(projection, (u * s.unsqueeze(-2)) @ v.mH)
    assert (s.diff() <= 0).all() and (s >= 0).all(), "singular values in decreasing order"


def hermitian_eigenvectors(arguments: Arguments, want: Any, got: Any) -> None:
    """Each vector has a free phase."""
    _close(want[0], got[0])
    _orthonormal(got[1])
    (want_values, want_vectors), (values, vectors) = want, got
    _close(
        (want_vectors * want_values.unsqueeze(-2)) @ want_vectors.mH,
        (vectors * values.unsqueeze(-2)) @ vectors.mH,
    )


PROPERTIES: dict[str, Property] = {
    "sort": sort,
    "argsort": argsort,
    "topk": selection(1, ordered=False),
    "kthvalue": selection(1),
    "mode": selection(0),
    "svd": singular_values(adjoint=False),
    "svd_lowrank": low_rank,
    "pca_lowrank": singular_values(adjoint=False),
    "linalg.svd": singular_values(adjoint=True),
    "linalg.eigh": hermitian_eigenvectors,
}
