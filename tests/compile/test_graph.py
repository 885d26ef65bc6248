"""FX graphs as program text: what needs no device."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tpu import _C
from torch_tpu.lowering.interpreter import GraphError
from torch_tpu.program import options
from torch_tpu.program.graph import lower_graph


def traced(fn, *shapes):
    """``fn`` traced on fake tensors of these shapes, and its inputs."""
    inputs = [torch.empty(s) for s in shapes]
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    return module, fakes


def test_fake_inputs_give_a_program_for_either_target():
    module, fakes = traced(lambda x, w: torch.relu(x @ w).sum(0), (4, 8), (8, 16))
    for target in ("cpu", "tpu"):
        with options.for_target(target):
            program = lower_graph(module, fakes)
        assert "stablehlo.dot_general" in program.text
        assert [(p.kind, p.shape) for p in program.arguments] == [
            ("input", (4, 8)),
            ("input", (8, 16)),
        ]
        assert program.results == [((16,), torch.float32)]


def test_lowering_touches_no_device():
    before = _C.stats()
    module, fakes = traced(lambda x: torch.softmax(x, -1), (3, 5))
    lower_graph(module, fakes)
    after = _C.stats()
    assert {k: after[k] - before[k] for k in ("compiles", "executions")} == {
        "compiles": 0,
        "executions": 0,
    }


def test_a_written_input_is_donated():
    def step(x, g):
        x.copy_(x - 0.1 * g)
        return g.sum()

    module, fakes = traced(step, (4, 4), (4, 4))
    program = lower_graph(module, fakes)
    assert program.aliases == {0: 1}
    assert "tf.aliasing_output = 1" in program.text
    assert program.outputs[1].target == 0


def test_other_writes_are_refused_with_the_reason():
    module, fakes = traced(lambda x: x.view(2, 8).add_(1), (4, 4))
    with pytest.raises(GraphError, match=r"aten.add_.*functional"):
        lower_graph(module, fakes)


def test_a_large_constant_becomes_a_parameter_and_a_small_one_text():
    large, small = torch.randn(1000), torch.tensor([1.0, 2.0])
    module = make_fx(lambda x: (x + large, x[:2] * small))(torch.randn(1000))
    program = lower_graph(module, [torch.empty(1000, device="meta")])
    assert [p.kind for p in program.arguments] == ["input", "constant"]
    assert torch.equal(program.constants[program.arguments[1].index], large)


def test_unused_inputs_are_kept_on_request():
    module, fakes = traced(lambda x, y: x + 1, (2,), (3,))
    assert len(lower_graph(module, fakes).arguments) == 1
    assert len(lower_graph(module, fakes, keep_unused=True).arguments) == 2


def test_each_random_op_has_an_offset_of_its_own():
    module, fakes = traced(lambda x: torch.rand_like(x) + torch.rand_like(x), (8,))
    program = lower_graph(module, fakes)
    assert program.draws == 2
    assert program.takes_rng


def test_results_that_are_views_of_inputs_cost_nothing():
    module, fakes = traced(lambda x: (x.t(), x, x + 1), (3, 5))
    program = lower_graph(module, fakes, alias_results=True)
    assert [v.kind for v in program.values] == ["view", "argument", "new"]
    assert program.values[0].strides == (1, 5)
    assert len(program.results) == 1


def test_attributes_and_locations_are_written():
    module, fakes = traced(lambda x: torch.tanh(x), (4,))
    program = lower_graph(
        module,
        fakes,
        locate=lambda node: f'"{node.name}"',
        parameter_attributes={0: 'mhlo.sharding = "{devices=[2]0,1}"'},
        result_attributes={0: 'mhlo.sharding = "{replicated}"'},
        module_attributes="mhlo.num_partitions = 2 : i32",
    )
    assert 'loc("tanh")' in program.text
    assert '{mhlo.sharding = "{devices=[2]0,1}"}' in program.text
    assert 'tensor<4xf32> {mhlo.sharding = "{replicated}"})' in program.text
    assert "module attributes {mhlo.num_partitions = 2 : i32}" in program.text


def test_an_op_that_cannot_be_compiled_is_named():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.nonzero.default, (x,)))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(GraphError, match=r"aten.nonzero"):
        lower_graph(module, [torch.empty(3, device="meta")])
