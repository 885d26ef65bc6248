"""Run a function on the CPU and on the device and compare results of any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import torch_tpu  # noqa: F401


def to_device(value: Any) -> Any:
    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to("tpu").requires_grad_(x.requires_grad)

    return pytree.tree_map(move, value)


def dense(x: torch.Tensor) -> torch.Tensor:
    if x.is_nested:
        return x.to_padded_tensor(-7.0)
    return x.to_dense() if x.layout is not torch.strided else x


def check(fn: Callable[..., Any], *arguments: Any, fallbacks: int = 0) -> None:
    """Same layouts, dtypes, flags and values; as many CPU fallbacks as said."""
    want = fn(*arguments)
    moved = to_device(arguments)
    before = torch.tpu.stats()["fallbacks"]
    got = fn(*moved)
    assert torch.tpu.stats()["fallbacks"] - before == fallbacks
    wants, gots = pytree.tree_leaves(want), pytree.tree_leaves(got)
    for w, g in zip(wants, gots, strict=True):
        if not isinstance(w, torch.Tensor):
            assert w == g
            continue
        assert g.device.type == "tpu"
        assert (g.layout, g.dtype, g.dim()) == (w.layout, w.dtype, w.dim())
        if w.layout is torch.sparse_coo:
            assert g.is_coalesced() == w.is_coalesced()
        assert_close(dense(g).detach().cpu(), dense(w).detach(), rtol=1e-4, atol=1e-4)


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` followed by the gradients of a function of its result."""

    def run(*arguments: Any) -> list[Any]:
        out = dense(fn(*arguments))
        leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
        return list(torch.autograd.grad((out * out).sum() + 2 * out.sum(), leaves))

    return run
