"""Run one OpInfo sample on the CPU and on the device and compare what comes out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

DEVICE = "tpu"

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.complex64: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}

# Another random stream gives other numbers: shape and dtype are compared here, distributions in
# tests/core/test_random.py.
RANDOM = re.compile(
    r"^(bernoulli|cauchy|empty|exponential|geometric|log_normal|multinomial|new_empty|normal|rand"
    r"|randint|randn|uniform|nn\.functional\.(alpha_dropout|dropout\d?|feature_alpha_dropout"
    r"|fractional_max_pool\dd|gumbel_softmax|rrelu))"
)


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def all_ops() -> dict[str, OpInfo]:
    return {name_of(op): op for op in op_db}


def move(value: Any, device: str) -> Any:
    """Tensors as fresh leaves on ``device``; a "device" argument becomes that device."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(one, value)


def samples(op: OpInfo, dtype: torch.dtype, count: int) -> Iterator[tuple[SampleInput, bool]]:
    """The first ``count`` samples and whether their gradients are defined."""
    differentiable = (
        dtype.is_floating_point
        and op.supports_autograd
        and dtype in op.supported_backward_dtypes("cpu")
    )
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if i >= count:
            return
        yield sample, differentiable


def tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def assert_same(expected: Any, actual: Any, exact: bool) -> None:
    """Same structure, shapes, dtypes, device; same values if ``exact``."""
    for want, got in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        if not isinstance(want, torch.Tensor):
            if exact and isinstance(want, (bool, int, float, complex)):
                assert want == got or want != want or abs(want - got) < 1e-4 * max(1, abs(want))
            continue
        assert got.device.type == DEVICE, f"a result is on {got.device}"
        assert got.shape == want.shape and got.dtype == want.dtype, (
            f"got {got.dtype} {tuple(got.shape)}; expected {want.dtype} {tuple(want.shape)}"
        )
        if exact:
            tolerance = TOLERANCE.get(want.dtype, {"rtol": 0.0, "atol": 0.0})
            host = got.detach().cpu()
            assert_close(host, want.detach(), equal_nan=True, check_stride=False, **tolerance)


def check_sample(op: OpInfo, sample: SampleInput, differentiable: bool) -> bool:
    """Compare forward and gradients; False if the CPU itself refuses the sample."""
    exact = RANDOM.match(name_of(op)) is None
    on_cpu = move((sample.input, sample.args, sample.kwargs), "cpu")
    on_device = move((sample.input, sample.args, sample.kwargs), DEVICE)
    if "device" in on_device[2]:
        on_device[2]["device"] = DEVICE
    try:
        expected = op(on_cpu[0], *on_cpu[1], **on_cpu[2])
    except Exception:  # whatever the CPU refuses is no sample for the device
        return False
    actual = op(on_device[0], *on_device[1], **on_device[2])
    assert_same(expected, actual, exact)
    if not (differentiable and exact):
        return True
    finish = sample.output_process_fn_grad or (lambda x: x)
    outputs = [t for t in tensors(finish(expected)) if t.requires_grad]
    leaves = [t for t in tensors(on_cpu) if t.requires_grad]
    if not outputs or not leaves:
        return True
    try:
        want = torch.autograd.grad(
            outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True
        )
    except Exception:
        return True
    device_outputs = [t for t in tensors(finish(actual)) if t.requires_grad]
    device_leaves = [t for t in tensors(on_device) if t.requires_grad]
    got = torch.autograd.grad(
        device_outputs,
        device_leaves,
        [torch.ones_like(t) for t in device_outputs],
        allow_unused=True,
    )
    assert_same([g for g in want if g is not None], [g for g in got if g is not None], True)
    return True
