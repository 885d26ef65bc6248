"""Run one OpInfo sample on the CPU and on the device and compare what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from .properties import PROPERTIES

DEVICE = "tpu"

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.complex64: {"rtol": 1e-4, "atol": 1e-4},
    torch.float64: {"rtol": 1e-6, "atol": 1e-6},
    torch.complex128: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}
# (op, dtype) → tolerance and reason.
TOLERANCE_OVERRIDES: dict[tuple[str, torch.dtype], tuple[dict[str, float], str]] = {
    ("nn.functional.normalize", torch.bfloat16): (
        {"rtol": 3e-2, "atol": 1.25e-1},
        "the gradient is a difference of equal terms near 8, of which one bfloat16 step is 0.06",
    ),
    ("nn.functional.interpolate.bicubic", torch.uint8): (
        {"rtol": 0.0, "atol": 1.0},
        "the CPU's vector kernel has fixed-point weights; results near a half round either way",
    ),
}
EXACT = {"rtol": 0.0, "atol": 0.0}

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


# Arguments that have to be on the CPU, on CUDA too: split points are read to make views.
HOST_ARGUMENTS = frozenset({"tensor_split"})

SAVE_STATISTICS = frozenset(
    {
        "native_layer_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    }
)

# Where the CPU rounds more often than the device (half precision between two steps of one op), or
# loses more digits, its result in the next wider dtype decides.
WIDER: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def move(value: Any, device: str, widen: bool = False) -> Any:
    """Tensors as fresh leaves on ``device``; ``widen`` takes every dtype to the next wider one."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = WIDER.get(leaf.dtype, leaf.dtype) if widen else leaf.dtype
            moved = leaf.detach().clone().to(device, dtype)
            return moved.requires_grad_(leaf.requires_grad)
        return WIDER.get(leaf, leaf) if widen and isinstance(leaf, torch.dtype) else leaf

    return pytree.tree_map(one, value)


def on_cpu(sample: SampleInput, widen: bool = False) -> Arguments:
    """The sample's arguments as fresh leaves."""
    arguments: Arguments = move((sample.input, sample.args, sample.kwargs), "cpu", widen)
    return arguments


def on_device(name: str, sample: SampleInput) -> Arguments:
    """The sample's arguments on the device; arguments that name a device name that one."""

    def one(leaf: Any) -> Any:
        return DEVICE if leaf in ("cpu", torch.device("cpu")) else leaf

    first = move(sample.input, DEVICE)
    rest = move((sample.args, sample.kwargs), "cpu" if name in HOST_ARGUMENTS else DEVICE)
    args, kwargs = pytree.tree_map_only((str, torch.device), one, rest)
    if "device" in kwargs:
        kwargs["device"] = DEVICE
    return first, args, kwargs


def is_random(name: str, sample: SampleInput) -> bool:
    """Whether another random stream gives other numbers."""
    if name == "nn.functional.multi_head_attention_forward":
        return bool(sample.args[9] > 0)  # dropout_p
    if name == "nn.functional.scaled_dot_product_attention":
        return sample.kwargs.get("dropout_p", 0.0) > 0
    return RANDOM.match(name) is not None


def has_random_gradient(name: str, sample: SampleInput) -> bool:
    """Whether gradients depend on random numbers although the result has a defining property."""
    return name == "svd_lowrank" and sample.kwargs.get("M") is not None


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


def assert_same(expected: Any, actual: Any, exact: bool, name: str = "") -> None:
    """Same structure, shapes, dtypes, device; same values if ``exact``, as tolerant as ``name``."""
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
            assert_close_values(want, got, name)


def assert_close_values(want: torch.Tensor, got: torch.Tensor, name: str = "") -> None:
    """``got`` is on the device; ``name`` is the op whose tolerance counts."""
    tolerance = TOLERANCE.get(want.dtype, EXACT)
    if (name, want.dtype) in TOLERANCE_OVERRIDES:
        tolerance = TOLERANCE_OVERRIDES[name, want.dtype][0]
    host, want = got.detach().cpu(), want.detach()
    assert host.layout is want.layout
    assert_close(host, want, equal_nan=True, check_stride=False, **tolerance)


def no_further(got: torch.Tensor, want: torch.Tensor, better: torch.Tensor) -> bool:
    """Whether the largest error of ``got`` is at most that of ``want``; finite values only."""
    if want.dtype not in WIDER:
        return False
    if not (got.isfinite().all() and want.isfinite().all() and better.isfinite().all()):
        return False
    errors = [(x.to(better.dtype) - better).abs().max().item() for x in (got, want)]
    return errors[0] <= errors[1]


def assert_close_to_either(
    name: str, expected: Any, actual: Any, reference: Callable[[], Any]
) -> None:
    """Close to the CPU's result, or to its result in the next wider dtype, or no further from that
    than the CPU's is."""
    try:
        assert_same(expected, actual, True, name)
        return
    except AssertionError as error:
        if not any(t.dtype in WIDER for t in tensors(expected)):
            raise
        assert_same(expected, actual, False)
        try:
            wide = tensors(reference())
        except Exception:
            raise error from None
    for want, got, better in zip(tensors(expected), tensors(actual), wide, strict=True):
        try:
            assert_close_values(want, got, name)
        except AssertionError:
            if not no_further(got.detach().cpu(), want.detach(), better.detach()):
                assert_close_values(better.to(want.dtype), got, name)


def gradients(op: OpInfo, sample: SampleInput, arguments: Arguments, result: Any) -> Any:
    """Gradients of the sum of what the op returns; None for leaves it does not reach.

    An empty list when nothing is differentiable.
    """
    finish = sample.output_process_fn_grad or (lambda x: x)
    outputs = [t for t in tensors(finish(result)) if t.requires_grad]
    leaves = [t for t in tensors(arguments) if t.requires_grad]
    if not outputs or not leaves:
        return []
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def comparable(name: str, expected: Any, actual: Any) -> tuple[Any, Any]:
    """Saved statistics as every accelerator has them: those of half precision are float32."""
    if name not in SAVE_STATISTICS:
        return expected, actual
    first, *statistics = expected
    keeps = name == "native_layer_norm" or any(s.numel() for s in statistics)
    saved = [s.float() if keeps and s.dtype.itemsize == 2 else s for s in statistics]
    return [first, *saved], actual


def check_sample(
    op: OpInfo,
    sample: SampleInput,
    differentiable: bool,
    on_tpu: Callable[..., Any] | None = None,
) -> bool:
    """Compare forward and gradients; False if the CPU itself refuses the sample.

    ``on_tpu`` is what runs on the device instead of ``op``, such as its compiled form.
    """
    name = name_of(op)
    exact = not is_random(name, sample)
    host, device = on_cpu(sample), on_device(name, sample)
    try:
        expected = op(host[0], *host[1], **host[2])
    except Exception:  # whatever the CPU refuses is no sample for the device
        return False
    actual = (on_tpu or op)(device[0], *device[1], **device[2])
    expected, actual = comparable(name, expected, actual)
    wide: list[Any] = []

    def reference() -> Any:
        wide.append(on_cpu(sample, widen=True))
        result = op(wide[0][0], *wide[0][1], **wide[0][2])
        wide.append(comparable(name, result, result)[0])
        return wide[1]

    def reference_gradients() -> Any:
        if not wide:
            reference()
        found = gradients(op, sample, *wide)
        return [g for g, w in zip(found, want, strict=True) if w is not None]

    if not exact:
        assert_same(expected, actual, False)
    elif name in PROPERTIES:
        assert_same(expected, actual, False)
        PROPERTIES[name](on_cpu(sample), expected, move(actual, "cpu"))
    else:
        assert_close_to_either(name, expected, actual, reference)
    if not (differentiable and exact) or has_random_gradient(name, sample):
        return True
    try:
        want = gradients(op, sample, host, expected)
    except Exception:
        return True
    if not want:
        return True
    got = gradients(op, sample, device, actual)
    assert_close_to_either(
        name,
        [g for g in want if g is not None],
        [g for g in got if g is not None],
        reference_gradients,
    )
    return True
