"""Sparse tensors on the device: PyTorch's own classes over our dense indices and values.

Most of PyTorch's sparse kernels touch no element themselves: they are written in terms of dense ops
and shared between the CPU and CUDA. Those are registered as they are. What the CPU has a kernel of
its own for is written here, again in terms of dense ops, so that it runs as programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_tpu import _C
from torch_tpu.eager.sparse import compressed, coo, softmax

COO: dict[str, Callable[..., Any]] = {**coo.KERNELS, **softmax.KERNELS}
COMPRESSED: dict[str, Callable[..., Any]] = compressed.KERNELS
# Ops on the dense parts of compressed tensors.
DENSE: dict[str, Callable[..., Any]] = compressed.DENSE_KERNELS

# Dense tensors go in, sparse ones come out.
CONVERSIONS = (
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_csr",
    "_to_sparse_csc",
    "_to_sparse_bsr",
    "_to_sparse_bsc",
)

_libraries: list[torch.library.Library] = []


def neutral_kernels(key: str) -> list[str]:
    """What PyTorch registers for this key ("SparseCPU") and serves any device, as aten names."""
    own = COO if key == "SparseCPU" else COMPRESSED
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    aten = [n.removeprefix("aten::") for n in names if n.startswith("aten::")]
    return sorted(n for n in aten if n not in own)


def register() -> None:
    """Register sparse COO and compressed tensors for the device."""
    for name in CONVERSIONS:
        _C.register_neutral_kernel(name, "CPU", "PrivateUse1")
    for source, target, own in (
        ("SparseCPU", "SparsePrivateUse1", COO),
        ("SparseCsrCPU", "SparseCsrPrivateUse1", COMPRESSED),
    ):
        for name in neutral_kernels(source):
            _C.register_neutral_kernel(name, source, target)
        library = torch.library.Library("aten", "IMPL")
        for name, kernel in own.items():
            library.impl(name, kernel, target)
        _libraries.append(library)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in DENSE.items():
        library.impl(name, kernel, "PrivateUse1")
    _libraries.append(library)
