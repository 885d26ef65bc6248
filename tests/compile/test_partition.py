"""Common subexpressions of the joint graph."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torch_tpu  # noqa: F401
from torch_tpu.dynamo.partition import eliminate_common_subexpressions


def calls(fn, *inputs):
    """Names of the ops that are left."""
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    eliminate_common_subexpressions(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*inputs), fn(*inputs))
    return [n.target.overloadpacket.__name__ for n in module.graph.nodes if n.op == "call_function"]


def test_equal_calls_are_made_once():
    x = torch.rand(3, 3)
    assert calls(lambda x: (x.sin() + x.sin()).exp(), x) == ["sin", "add", "exp"]
    assert calls(lambda x: torch.cat([x.t() @ x.t(), x.t()]).sum(), x).count("t") == 1


@pytest.mark.parametrize(
    "pair", [(1, 1.0), (1, True), (0.0, -0.0)], ids=["int_float", "int_bool", "zeros"]
)
def test_numbers_of_other_types_are_other_arguments(pair):
    x = torch.tensor([2, 3])
    a, b = pair
    got = calls(lambda x: (x * a).double().reciprocal() - (x * b).double().reciprocal() + 1, x)
    assert got.count("mul") == 2


def test_random_ops_and_what_is_returned_stay():
    x = torch.rand(3)
    module = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x), tracing_mode="fake")(x)
    eliminate_common_subexpressions(module.graph)
    assert (
        len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default))
        == 2
    )
    assert calls(lambda x: (x.sin(), x.sin()), x) == ["sin", "sin"]


def test_tensors_returned_apart_stay_apart():
    step = torch.compile(lambda x: (x * 2, x * 2), backend="tpu", fullgraph=True)
    a, b = step(torch.ones(3, device="tpu", requires_grad=True))
    with torch.no_grad():
        a.zero_()
    assert b.sum().item() == 6
