"""A Python function with its in-place writes → one functional ATen graph, without Dynamo.

The function may differentiate (``torch.autograd.grad``) and write to its inputs; the graph ends
with an ``aten.copy_`` for each input that was written, as :func:`program.graph.lower_graph` takes
it. Nothing is computed: inputs are replaced by fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx


def capture(
    fn: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Trace ``fn(*inputs)``, which returns a flat sequence of tensors.

    Inputs arrive detached. Raises what ``fn`` raises on fake tensors, such as for control flow on
    values.
    """
    fake_mode = FakeTensorMode()
    fakes = [fake_mode.from_tensor(t.detach(), static_shapes=True) for t in inputs]

    def traced(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        out = list(fn(*tensors))
        return out, list(tensors)

    with fake_mode:
        functional = dispatch_functionalize(traced, FunctionalTensorMode())
        module = make_fx(functional, _allow_non_fake_inputs=True)(*fakes)
    _write_back(module)
    return module


def _write_back(module: torch.fx.GraphModule) -> None:
    """Replace the inputs' last values in the output by writes to the inputs."""
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    results, finals = output.args[0]
    with graph.inserting_before(output):
        for placeholder, final in zip(placeholders, finals, strict=True):
            if final is not placeholder:
                node = graph.call_function(torch.ops.aten.copy_.default, (placeholder, final))
                node.meta["val"] = placeholder.meta.get("val")
    output.args = (list(results),)
    # The dtype and device checks of tracing are answered; dead code goes, writes stay.
    graph.eliminate_dead_code()
    module.recompile()
