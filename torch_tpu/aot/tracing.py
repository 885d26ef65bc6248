"""Functions of fake tensors as functional ATen graphs whose nodes know where they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd.logging_utils import (
    setup_stacktrace_preservation_hooks_from_tensors,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

DEVICE = "tpu"
_PACKAGE = re.compile(r"/(torch|torch_tpu)/|<")


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Place:
    """Where a node comes from: module path, Python file and line; ``backward`` of it or not."""

    module: str = ""
    file: str = ""
    line: int = 0
    backward: bool = False


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout on the device; no memory is taken, no value is read."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device.type == DEVICE:
        return tensor
    with mode:
        out = torch.empty_strided(
            tuple(map(int, tensor.shape)), tensor.stride(), dtype=tensor.dtype, device=DEVICE
        )
    return out.requires_grad_(tensor.requires_grad)


# -- module paths -------------------------------------------------------------------------------


@contextmanager
def module_paths(module: nn.Module | None, stacks: Sequence[str] = ()) -> Iterator[None]:
    """Inside, traced nodes carry the path of the module that made them.

    Children of ``stacks`` are named alike: "layers.*" for "layers.0", "layers.1" …
    """
    if module is None:
        yield
        return
    names: dict[int, str] = {}
    for name, child in module.named_modules():
        for stack in stacks:
            if name.startswith(stack + "."):
                parts = name[len(stack) + 1 :].split(".")
                name = ".".join([stack, "*", *parts[1:]])
        names[id(child)] = name
    open_: list[ExitStack] = []

    def enter(child: nn.Module, _: Any) -> None:
        stack = ExitStack()
        path = names.get(id(child))
        if path is not None:
            stack.enter_context(fx_traceback.annotate({"module": path}))
        open_.append(stack)

    def leave(child: nn.Module, _: Any, __: Any) -> None:
        if open_:
            open_.pop().close()

    with ExitStack() as hooks:
        for child in module.modules():
            hooks.callback(child.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(child.register_forward_hook(leave, always_call=True).remove)
        yield


# -- tracing ------------------------------------------------------------------------------------


def trace(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """A functional graph of ``fn`` at fake inputs.

    ``fn`` may differentiate; nodes of a backward pass get the place of the node they belong to. In
    place operations on inputs become ``copy_`` at the end.
    """
    first: torch.fx.GraphModule = _make_fx(fn)(*[_detached(t) for t in inputs])
    _place_backward(first)
    _drop_profiling(first)
    graph = first
    for functionalize in (torch.func.functionalize, _functionalize_all):
        if not any(_mutates(n) for n in graph.graph.nodes):
            break
        functional = functionalize(torch.fx.Interpreter(first).run)
        graph = _make_fx(functional)(*[_detached(t) for t in inputs])
        if all(_writes_input(n) for n in graph.graph.nodes if _mutates(n)):
            break
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _functionalize_all(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Sees through composite kernels written in C++, which functorch's functionalize does not.

    Inputs that ``fn`` writes to get their new values by ``copy_`` at the end.
    """

    def run(*inputs: torch.Tensor) -> Any:
        return dispatch_functionalize(fn)(*inputs)

    return run


def _writes_input(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def _drop_profiling(module: torch.fx.GraphModule) -> None:
    """Remove the marks that optimizers leave for the profiler."""
    for node in reversed(list(module.graph.nodes)):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "profiler":
            module.graph.erase_node(node)


def _detached(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _make_fx(fn: Callable[..., Any]) -> Callable[..., torch.fx.GraphModule]:
    traced = make_fx(fn, _allow_non_fake_inputs=True, record_stack_traces=True)

    def run(*inputs: torch.Tensor) -> torch.fx.GraphModule:
        with fx_traceback.preserve_node_meta():
            return traced(*inputs)

    return run


def backward_places(loss: Any) -> None:
    """Note in the autograd graph which forward node each backward node belongs to."""
    setup_stacktrace_preservation_hooks_from_tensors(loss)


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _place_backward(module: torch.fx.GraphModule) -> None:
    """Give backward nodes the module and the Python line of their forward nodes."""
    forward: dict[int, torch.fx.Node] = {}
    for node in module.graph.nodes:
        number = node.meta.get("seq_nr")
        if number is None or node.op != "call_function":
            continue
        if node.meta.get("autograd_backward") or (
            number in forward and not (node.meta.get("custom") or {}).get("module")
        ):
            source = forward.get(number)
            if source is not None:
                custom = {**(node.meta.get("custom") or {}), "backward": True}
                if module := (source.meta.get("custom") or {}).get("module"):
                    custom["module"] = module
                node.meta["custom"] = custom
                if source.stack_trace:
                    node.stack_trace = source.stack_trace
        else:
            forward.setdefault(number, node)


def place_of(node: torch.fx.Node) -> Place:
    custom = node.meta.get("custom") or {}
    file, line = user_line(node.meta.get("stack_trace") or "")
    return Place(custom.get("module", ""), file, line, bool(custom.get("backward")))


def user_line(trace_text: str) -> tuple[str, int]:
    """The innermost frame of a stack trace that is not PyTorch's or ours; ("", 0) if none is."""
    found = ("", 0)
    for match in re.finditer(r'File "([^"]+)", line (\d+)', trace_text):
        if not _PACKAGE.search(match[1]):
            found = (match[1], int(match[2]))
    return found


def location(node: torch.fx.Node) -> str:
    """The node's place as MLIR text: "module|op" and, where it is known, file and line."""
    place = place_of(node)
    op = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "op")
    module = f"{place.module} (backward)" if place.backward and place.module else place.module
    name = f"{module}|{op}".replace('"', "'").replace("\\", "/")
    if not place.file:
        return f'"{name}"'
    file = place.file.replace("\\", "/").replace('"', "'")
    return f'"{name}"("{file}":{place.line}:0)'


def outputs_of(module: torch.fx.GraphModule) -> list[Spec]:
    """Layout of each tensor that a graph returns."""
    node = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    values = [n.meta["val"] for n in pytree.tree_leaves(node.args[0])]
    return [Spec(tuple(v.shape), tuple(v.stride()), v.dtype) for v in values]


# -- FLOPs --------------------------------------------------------------------------------------


def graph_flops(
    module: torch.fx.GraphModule,
    layer_flops: Callable[[int], float] | None = None,
    only: str = "",
) -> float:
    """FLOPs of the matmuls, convolutions and attention of a graph, as PyTorch's counter counts.

    Causal attention is counted as the half of the scores that is not masked. ``layer_flops`` gives
    those of a layer node's body; ``only`` counts the nodes annotated with this phase.
    """
    total = 0.0
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if only and (node.meta.get("custom") or {}).get("phase") != only:
            continue
        if target.namespace == "torch_tpu_aot":
            if layer_flops is not None and target._opname == "layer":
                total += layer_flops(node.args[1])
            continue
        total += node_flops(node)
    return total


def node_flops(node: torch.fx.Node) -> float:
    target: Any = node.target
    if target.overloadpacket in _ATTENTION:
        return _attention_flops(node)
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0.0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, AssertionError, IndexError):
        return 0.0


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable: (0, 2, "is_causal", 5),
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward: (
        1,
        4,
        "is_causal",
        13,
    ),
}


def _attention_flops(node: torch.fx.Node) -> float:
    """Two matmuls forward, four backward (the recomputed scores are not the model's)."""
    target: Any = node.target
    first, matmuls, name, position = _ATTENTION[target.overloadpacket]
    query, key, value = (node.args[first + i].meta["val"] for i in range(3))  # type: ignore[union-attr]
    causal = node.kwargs.get(name, node.args[position] if len(node.args) > position else False)
    batch, heads, rows, width = query.shape
    scores = batch * heads * rows * key.shape[2] * (0.5 if causal else 1.0)
    return float(2 * scores * (width + value.shape[-1]) * matmuls / 2)
