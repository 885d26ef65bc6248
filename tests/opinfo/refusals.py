"""What the CPU refuses for its dtype: OpInfo samples cast to a dtype that is not supported."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .compare import name_of, on_cpu, on_device, tensors

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def refused_dtypes(op: OpInfo) -> list[torch.dtype]:
    """Dtypes of ours that PyTorch's database does not list for the CPU.

    Half precision and integers that CUDA computes are left out: models written for CUDA rely on
    them (mixtures of experts count tokens with an integer histc).
    """

    def only_on_cuda(dtype: torch.dtype) -> bool:
        half = dtype.is_floating_point and dtype.itemsize == 2
        integral = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        return (half or integral) and dtype in op.dtypesIfCUDA

    return [d for d in DTYPES if d not in op.supported_dtypes("cpu") and not only_on_cuda(d)]


def _native(op: OpInfo) -> torch.dtype | None:
    return next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)


def cast_sample(op: OpInfo, dtype: torch.dtype) -> SampleInput | None:
    """The first sample whose tensors of the op's own dtype can be cast to ``dtype``."""
    native = _native(op)
    if native is None:
        return None

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype is native:
            return leaf.detach().to(dtype)
        return leaf

    for sample in op.sample_inputs("cpu", native, requires_grad=False):
        if any(t.dtype is native and t.numel() for t in tensors((sample.input, sample.args))):
            try:
                first, args, kwargs = pytree.tree_map(
                    cast, (sample.input, sample.args, sample.kwargs)
                )
            except (RuntimeError, NotImplementedError):  # a layout without this dtype
                return None
            return SampleInput(first, args=args, kwargs=kwargs)
    return None


def error_of(op: OpInfo, arguments: Any) -> Exception | None:
    first, args, kwargs = arguments
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = op(first, *args, **kwargs)
            for t in tensors(found):
                t.cpu()
    except Exception as error:
        return error
    return None


def check(op: OpInfo, dtype: torch.dtype) -> bool:
    """Whether the CPU refuses the op's first sample in ``dtype``; then the device has to, too.

    Asserts that the device raises the same class, and takes what the CPU takes.
    """
    sample = cast_sample(op, dtype)
    if sample is None:
        return False
    refused = error_of(op, on_cpu(sample))
    if refused is None:
        return False
    actual = error_of(op, on_device(name_of(op), sample))
    want = f"the CPU raises {type(refused).__name__}: {str(refused)[:120]}"
    assert actual is not None, f"{dtype} computes; {want}"
    assert type(actual) is type(refused), f"{type(actual).__name__}: {str(actual)[:200]}; {want}"
    return True
