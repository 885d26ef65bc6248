"""Ops without a meta kernel, or with CUDA's, compile in one graph and give the CPU's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tpu.dynamo import fake_rules
from torch_tpu.lowering import ops, registry  # noqa: F401


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
CLASSES = torch.tensor([1, 0, 4, 2])
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "grouped_mm": (lambda x, w, o: F.grouped_mm(x, w, offs=o), (_rows(8, 4), _rows(3, 4, 8), ENDS)),
    "histogram": (lambda x: torch.histogram(x.detach(), 5)[0], (_rows(9),)),
    "masked_softmax": (lambda x: torch._masked_softmax(x, x.detach() > 0.5, 1), (_rows(4, 5),)),
    "multi_margin_loss": (lambda x, y: F.multi_margin_loss(x, y), (_rows(4, 5), CLASSES)),
    "fake_quantize": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
        (_rows(4, 5),),
    ),
    "gru_cell": (
        lambda x, h, wi, wh, bi, bh: torch.gru_cell(x, h, wi, wh, bi, bh),
        (_rows(2, 4), _rows(2, 3), _rows(9, 4), _rows(9, 3), _rows(9), _rows(9)),
    ),
}


def _results(fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...], device: str) -> Any:
    given = [t.detach().clone().to(device).requires_grad_(t.is_floating_point()) for t in inputs]
    out = fn(*given)
    if out.requires_grad:
        out.sin().sum().backward()
    return [out.detach().cpu(), *(t.grad.cpu() for t in given if t.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_compiles_in_one_graph(name: str) -> None:
    fn, inputs = CASES[name]
    want = _results(fn, inputs, "cpu")
    before = torch.tpu.stats()["fallbacks"]
    got = _results(torch.compile(fn, backend="tpu", fullgraph=True), inputs, "tpu")
    torch.testing.assert_close(got, want)
    assert torch.tpu.stats()["fallbacks"] == before


def test_errors_are_those_of_eager() -> None:
    x, w = torch.zeros(8, 4, device="tpu"), torch.zeros(3, 4, 5, device="tpu")
    with pytest.raises(Exception, match="offs is needed"):
        torch.compile(F.grouped_mm, backend="tpu", fullgraph=True)(x, w)


def test_other_devices_keep_pytorchs_rules() -> None:
    with FakeTensorMode():
        x, w, ends = torch.zeros(8, 4), torch.zeros(3, 4, 5), torch.zeros(3, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="BF16"):
            torch._grouped_mm(x, w, ends)
        assert torch.histogram(x, 5)[0].device.type == "cpu"


def test_rules_are_for_ops_that_have_none() -> None:
    aten = torch.ops.aten
    assert fake_rules._lacks_rule(aten._grouped_mm.default)
    assert fake_rules._lacks_rule(aten.histogram.bin_ct)
    for op in (aten.add.Tensor, aten.mm.default, aten.layer_norm.default, aten.add_.Tensor):
        assert not fake_rules._lacks_rule(op)


def test_each_lowering_has_shapes_under_compile() -> None:
    """Where PyTorch has none, the lowering declares them."""
    missing = []
    for name, lowering in registry._LOWERINGS.items():
        for overload in registry.resolve(name):
            called = torch._C._dispatch_has_kernel(overload.name())  # else TorchScript's alone
            if called and registry.find(overload) is lowering and lowering.specs is None:
                missing += [str(overload)] if fake_rules._lacks_rule(overload) else []
    assert missing == []
