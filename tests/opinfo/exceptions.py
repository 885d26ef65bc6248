"""Ops that do not agree with the CPU, each with its reason; an entry that passes is an error."""

from __future__ import annotations

_FLOATS = ("float32", "float64", "bfloat16", "float16")
_ALL = (*_FLOATS, "int64", "int32", "uint8", "bool", "complex64")

_COMPLEX_HALF = "StableHLO has no complex number of two float16"


def _entries(op: str, dtypes: tuple[str, ...], reason: str) -> dict[tuple[str, str], str]:
    return {(op, dtype): reason for dtype in dtypes}


# (op, dtype name) → reason
EXPECTED_FAILURES: dict[tuple[str, str], str] = {
    **_entries("chalf", _ALL, _COMPLEX_HALF),
    **_entries("complex", ("float16",), _COMPLEX_HALF),
    **_entries("view_as_complex", ("float16",), _COMPLEX_HALF),
}

# (op, transform) → reason, in float32 over four samples
TRANSFORM_FAILURES: dict[tuple[str, str], str] = {
    ("logcumsumexp", "double_backward"): (
        "PyTorch's formula takes logarithms of differences: off by 1e-3 on the CPU too"
    ),
}

# op → reason, for dtypes that the CPU refuses
REFUSAL_EXCEPTIONS: dict[str, str] = {
    "nn.functional.scaled_dot_product_attention": "composed of matmuls that take integers",
    "nn.functional.multi_head_attention_forward": "its softmax refuses integers, not its attention",
    "pca_lowrank": "the CPU's QR makes a float32 basis of a bfloat16 matrix first",
    "svd_lowrank": "the CPU's QR makes a float32 basis of a bfloat16 matrix first",
}

# op → reason, for what PyTorch's database says must fail
ERROR_EXCEPTIONS: dict[str, str] = {
    "gather": "an index out of range is an IndexError here for every op",
    "scatter": "an index out of range is an IndexError here for every op",
    "scatter_add": "an index out of range is an IndexError here for every op",
    "ormqr": "int64 is refused before the shape is looked at",
}
