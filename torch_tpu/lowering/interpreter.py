"""Walks an FX graph of ATen calls and emits each node: the one way from a graph to StableHLO."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_tpu.lowering import registry
from torch_tpu.lowering.emit import OpBuilder, Spec, bind, emit_op
from torch_tpu.lowering.types import LoweringError, Value
from torch_tpu.lowering.variants import written_arguments

# Higher-order operators by name: fn(interpreter, node, args, kwargs) gives the node's value.
HIGHER_ORDER: dict[str, Callable[..., Any]] = {}


def higher_order(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the lowering of ``torch.ops.higher_order.<name>``."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in HIGHER_ORDER:
                raise ValueError(f"{name}: a lowering is already registered")
            HIGHER_ORDER[name] = fn
        return fn

    return register


class GraphError(NotImplementedError):
    """A node that cannot become part of a program; names the op, the reason and the line."""

    def __init__(self, node: torch.fx.Node, reason: str) -> None:
        self.reason = reason
        self.where = where = source_line(node)
        super().__init__(f"{node_name(node)}: {reason}" + (f" (at {where})" if where else ""))


def node_name(node: torch.fx.Node) -> str:
    """The op a node calls, as PyTorch writes it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", None) or str(target)


# Frames of PyTorch's own code, as they start in a stack trace.
_TORCH = f'File "{os.path.dirname(torch.__file__)}{os.sep}'


def source_line(node: torch.fx.Node) -> str:
    """ "file:line: code" of the user's line that a node comes from, "" if it is not known."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File ") and not lines[i].startswith(_TORCH):
            file, line = lines[i].split(", ")[:2]
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return f"{file[5:].strip()[1:-1]}:{line.removeprefix('line ')}" + (
                f": {code}" if code else ""
            )
    return ""


def known_specs(node: torch.fx.Node) -> list[Spec] | None:
    """Shapes and dtypes of a node's results as they were traced; None where a size is symbolic."""
    if "val" not in node.meta:
        return None
    specs = []
    for t in pytree.tree_leaves(node.meta["val"]):
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            return None
        shape = tuple(t.shape)
        if any(not isinstance(n, int) for n in shape):
            return None
        specs.append((shape, t.dtype))
    return specs


def in_places(node: torch.fx.Node, out: Any) -> Any:
    """An op's values where its schema has them: between numbers and undefined tensors, if any.

    An attention op returns tensors, None and lengths in one tuple; its lowering gives the tensors.
    """
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)) or not isinstance(out, list):
        return out
    if all(isinstance(v, torch.Tensor) for v in val):
        return out
    values = iter(out)
    return [next(values, None) if isinstance(v, torch.Tensor) else v for v in val]


class Interpreter:
    """Emits one graph through a builder; all nodes draw from one random state."""

    def __init__(self, b: OpBuilder, module: torch.fx.GraphModule) -> None:
        self.b = b
        self.module = module
        self.env: dict[torch.fx.Node, Any] = {}

    # -- what a subclass may change --------------------------------------------------------

    def constant(self, node: torch.fx.Node, tensor: torch.Tensor) -> Any:
        """The value of a tensor attribute of the module."""
        return self.b.constant_array(tensor.detach().cpu(), tensor.dtype)

    def known_specs(self, node: torch.fx.Node) -> list[Spec] | None:
        return known_specs(node)

    def before(self, node: torch.fx.Node) -> None:
        """Called ahead of every call_function node."""

    def mutate(self, node: torch.fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A node that writes to its arguments."""
        raise GraphError(node, "the graph writes to a value; make it functional first")

    # -- the walk --------------------------------------------------------------------------

    def run(self, inputs: Sequence[Any]) -> Any:
        """Emit every node; ``inputs`` are the placeholders' values. Returns the output's values."""
        feed = iter(inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(feed)
            elif node.op == "get_attr":
                self.env[node] = self.attribute(node)
            elif node.op == "call_function":
                self.before(node)
                self.env[node] = self.call(node)
            elif node.op == "output":
                return self.look_up(node.args[0])
            else:
                raise GraphError(node, f"a node of kind {node.op}; expected ATen calls")
        raise LoweringError("graph without output")

    def look_up(self, argument: Any) -> Any:
        return torch.fx.map_arg(argument, lambda n: self.env[n])

    def attribute(self, node: torch.fx.Node) -> Any:
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return self.constant(node, value) if isinstance(value, torch.Tensor) else value

    def call(self, node: torch.fx.Node) -> Any:
        args, kwargs = self.look_up(node.args), self.look_up(node.kwargs)
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return self.op(node, target, args, kwargs)
        if isinstance(target, torch._ops.HigherOrderOperator):
            lowering = HIGHER_ORDER.get(target.name())
            if lowering is None:
                raise GraphError(node, "no lowering for this higher-order operator")
            return lowering(self, node, args, kwargs)
        if callable(target):
            return target(*args, **kwargs)  # operator.getitem, arithmetic on sizes
        raise GraphError(node, "not an ATen call")

    def op(
        self, node: torch.fx.Node, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        special = SPECIAL.get(registry.overload_name(overload))
        if special is not None:
            return special(self, node, args, kwargs)
        if overload._schema.is_mutable and written_arguments(overload):
            return self.mutate(node, args, kwargs)
        self.note_strides(node)
        return self.emit(node, overload, args, kwargs)

    def emit(
        self, node: torch.fx.Node, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Emit one functional op."""
        out = emit_op(self.b, overload, args, kwargs, results=self.known_specs(node))
        return in_places(node, out)

    def emit_inner(self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Emit an op that a higher-order operator carries."""
        return emit_op(self.b, overload, args, kwargs)

    def note_strides(self, node: torch.fx.Node) -> None:
        """Tell the builder which arguments PyTorch sees with strides that are not contiguous."""
        for argument in node.all_input_nodes:
            value = self.env.get(argument)
            if isinstance(value, Value):
                val = argument.meta.get("val")
                if isinstance(val, torch.Tensor) and not val.is_contiguous():
                    self.b.strided.add(value.name)


SPECIAL: dict[str, Callable[[Interpreter, torch.fx.Node, Sequence[Any], dict[str, Any]], Any]] = {}
"""ATen ops that are not computed: assertions, sizes, moves between devices."""


def special(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            registry.resolve(name)
            SPECIAL[name] = fn
        return fn

    return register


@special("aten._assert_tensor_metadata.default")
def _nothing(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Checks that tracing has made."""
    return None


@special(
    "aten._assert_async.default",
    "aten._assert_async.msg",
    "aten._functional_assert_async.msg",
    "aten._assert_scalar.default",
    "aten._functional_assert_scalar.default",
)
def _assertion(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Noted on the device; the functional forms return their token."""
    value, text, *token = [*bind(node.target, args, kwargs), ""][:3]
    b = interpreter.b
    if isinstance(value, Value):
        if value.numel != 1:
            kind = "no values" if value.numel == 0 else "more than one value"
            raise RuntimeError(f"Boolean value of Tensor with {kind} is ambiguous")
        failed: Value | bool = b.eq(b.reshape(value, ()), 0)
    else:
        failed = not value
    if failed is not False:
        b.note_assertion(failed, text or "Expected Tensor with single nonzero value, but got zero")
    return token[0] if token else None


@special("aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default")
def _range(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    size, low, high = bind(node.target, args, kwargs)
    if not isinstance(size, int):
        raise GraphError(node, "a bound of a number that the device computes")
    if (low is not None and size < low) or (high is not None and size > high):
        text = f"Invalid value range for {size} between [{low}, {high}]."
        interpreter.b.note_assertion(True, text)


@special("aten._linalg_check_errors.default")
def _factorisation(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """The info of a factorisation; noted on the device."""
    info, name, is_matrix = bind(node.target, args, kwargs)
    interpreter.b.note_info(info, name, is_matrix)


@special("aten.sym_size.int")
def _size(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> int:
    return int(args[0].shape[args[1]])


@special("aten.sym_numel.default")
def _numel(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> int:
    return int(args[0].numel)


@special("prims.device_put.default")
def _device_put(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    return args[0]
