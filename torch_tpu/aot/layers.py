"""Repeated layers as one loop: a stack of equal blocks is traced, lowered and compiled once.

While a model is captured, each call of a block in an ``nn.ModuleList`` or ``nn.Sequential`` of
equal blocks becomes one node ``torch_tpu_aot.layer(inputs, body)``; its backward becomes another,
that runs the block again and differentiates it (so a block's activations are rematerialised).
:mod:`torch_tpu.aot.folding` then finds chains of such nodes that feed each other and makes each
chain a loop over stacked inputs. What does not fit the pattern stays a sequence of calls, which are
written inline: the values are the same either way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from torch_tpu.aot.sharding import Mesh
from torch_tpu.aot.tracing import Spec, backward_places, graph_flops, outputs_of, trace
from torch_tpu.lowering.interpreter import Interpreter, special
from torch_tpu.lowering.types import Value, tensor_type

MIN_LAYERS = 3

_library = torch.library.Library("torch_tpu_aot", "DEF")
_library.define("layer(Tensor[] inputs, int body) -> Tensor[]")
_library.define(
    "loop(Tensor[] carries, Tensor[] shared, Tensor[] stacked, int body, int plan) -> Tensor[]"
)
LAYER = torch.ops.torch_tpu_aot.layer.default
LOOP = torch.ops.torch_tpu_aot.loop.default


@dataclass
class Body:
    """A traced block: a functional graph of ``inputs`` -> a list of tensors."""

    graph: torch.fx.GraphModule
    outputs: list[Spec]
    flops: float = 0.0
    backward: dict[Any, int] = field(default_factory=dict)  # (needs, given) -> body

    @property
    def foldable(self) -> bool:
        """False if a loop cannot carry it: it draws random numbers or writes to its inputs."""
        return not any(
            isinstance(node.target, torch._ops.OpOverload)
            and (node.target._schema.is_mutable or _draws(node))
            for node in self.graph.graph.nodes
        )


def _draws(node: torch.fx.Node) -> bool:
    """Whether a node takes random numbers; attention does only with dropout."""
    target: Any = node.target
    if target is torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return dropout != 0.0
    return torch.Tag.nondeterministic_seeded in target.tags


@dataclass(frozen=True)
class Plan:
    """How a loop feeds its body.

    slots    for each input of the body: ("carry" | "shared" | "stacked", index)
    reverse  for each stacked input: whether iteration t takes element length - 1 - t
    carried  output of the body that each carry becomes
    saved    what is stacked for later: ("out" | "in", output of the body or carry, reverse)
    """

    length: int
    slots: tuple[tuple[str, int], ...]
    reverse: tuple[bool, ...]
    carried: tuple[int, ...]
    saved: tuple[tuple[str, int, bool], ...]


@dataclass
class Bodies:
    """The blocks and loops of one captured program."""

    bodies: list[Body] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    by_key: dict[Any, tuple[int, Any] | None] = field(default_factory=dict)
    mesh: Mesh | None = None


_current: ContextVar[Bodies | None] = ContextVar("bodies", default=None)


def capturing() -> bool:
    """Whether a model is being captured."""
    return _current.get() is not None


@contextmanager
def bodies_in_use(bodies: Bodies) -> Iterator[Bodies]:
    """What the nodes' body numbers refer to, inside."""
    token = _current.set(bodies)
    try:
        yield bodies
    finally:
        _current.reset(token)


def current_bodies() -> Bodies:
    bodies = _current.get()
    if bodies is None:
        raise RuntimeError("torch_tpu_aot.layer: called outside of a capture")
    return bodies


@torch.library.register_fake("torch_tpu_aot::layer")
def _layer_meta(inputs: Sequence[torch.Tensor], body: int) -> list[torch.Tensor]:
    device = inputs[0].device
    return [
        torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device=device)
        for s in current_bodies().bodies[body].outputs
    ]


# -- capture: a block's call becomes one node ---------------------------------------------------


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.number = number
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outs = tuple(LAYER(list(inputs), number))
        ctx.mark_non_differentiable(*[o for o in outs if not o.dtype.is_floating_point])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[1:])
        given = tuple(g is not None for g in grads)
        number = _backward_body(ctx.number, inputs, needs, given, grads)
        found = iter(LAYER([*inputs, *[g for g in grads if g is not None]], number))
        return (None, *[next(found) if need else None for need in needs])


def _backward_body(
    number: int,
    inputs: Sequence[torch.Tensor],
    needs: tuple[bool, ...],
    given: tuple[bool, ...],
    grads: Sequence[torch.Tensor | None],
) -> int:
    """The body that runs block ``number`` again and gives the gradients that are needed."""
    bodies = current_bodies()
    body = bodies.bodies[number]
    key = (needs, given)
    if key not in body.backward:

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            primals = [
                t.detach().requires_grad_(need)
                for t, need in zip(tensors[: len(inputs)], needs, strict=True)
            ]
            with torch.enable_grad():
                outs = torch.fx.Interpreter(body.graph).run(*primals)
            wanted = [o for o, have in zip(outs, given, strict=True) if have]
            leaves = [p for p in primals if p.requires_grad]
            backward_places(wanted)
            with annotate({"phase": "gradient"}):
                found = torch.autograd.grad(
                    wanted, leaves, tensors[len(inputs) :], allow_unused=True
                )
            return [
                torch.zeros_like(leaf) if g is None else g
                for g, leaf in zip(found, leaves, strict=True)
            ]

        examples = [*inputs, *[g for g in grads if g is not None]]
        with disable_proxy_modes_tracing():
            graph = trace(run, examples)
        flops = graph_flops(graph, only="gradient")
        bodies.bodies.append(Body(graph, outputs_of(graph), flops))
        body.backward[key] = len(bodies.bodies) - 1
    return body.backward[key]


@contextmanager
def blocks_as_nodes(module: nn.Module, min_layers: int = MIN_LAYERS) -> Iterator[None]:
    """Inside, calls of blocks in stacks of at least ``min_layers`` equal blocks become nodes."""
    wrapped: list[nn.Module] = []
    try:
        for children in stacks(module, min_layers).values():
            group = _signature(children[0])
            for child in children:
                child.__dict__["forward"] = _intercepted(child, group)
                wrapped.append(child)
        yield
    finally:
        for child in wrapped:
            child.__dict__.pop("forward", None)


def stacks(module: nn.Module, min_layers: int = MIN_LAYERS) -> dict[str, list[nn.Module]]:
    """Name -> children of each container of equal blocks that have parameters; outermost only."""
    found: dict[str, list[nn.Module]] = {}
    for name, container in module.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        if any(name.startswith(outer + ".") for outer in found):
            continue
        children = list(container)
        if len({id(c) for c in children}) != len(children) or len(children) < min_layers:
            continue
        if any("forward" in c.__dict__ for c in children):
            continue
        shapes = [_shapes(c) for c in children]
        if shapes[0] and all(s == shapes[0] for s in shapes):
            found[name] = children
    return found


def _shapes(module: nn.Module) -> list[Any]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not any(True for _ in module.parameters()):
        return []
    return [type(module).__qualname__] + [
        (n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in tensors
    ]


# Attributes that number a block and do not change what it computes unless its trace says so.
def _signature(module: nn.Module) -> Any:
    return (id(type(module)), tuple(map(str, _shapes(module))))


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _plain(module: nn.Module) -> str:
    """The plain attributes of a block and everything below it."""
    return repr(
        [
            (name, {k: v for k, v in vars(m).items() if isinstance(v, (bool, int, float, str))})
            for name, m in module.named_modules()
        ]
    )


def _intercepted(child: nn.Module, group: Any) -> Callable[..., Any]:
    original = type(child).forward
    busy = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if busy or _current.get() is None:
            return original(child, *args, **kwargs)
        busy = True
        try:
            return _call_block(child, group, original, args, kwargs)
        finally:
            busy = False

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _call_block(
    child: nn.Module,
    group: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    bodies = current_bodies()
    state = {
        **dict(child.named_parameters(remove_duplicate=False)),
        **dict(child.named_buffers(remove_duplicate=False)),
    }
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    if not all(isinstance(x, (torch.Tensor, *_PLAIN)) for x in leaves):
        return original(child, *args, **kwargs)  # an object, such as a cache, that it may write to
    inputs = [leaves[i] for i in where] + list(state.values())
    rest = [None if i in where else x for i, x in enumerate(leaves)]
    key = (
        group,
        _plain(child),
        str(spec),
        repr(rest),
        tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in inputs),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("tpu"),
    )
    if key not in bodies.by_key:
        bodies.by_key[key] = _forward_body(child, state, leaves, where, spec, inputs)
    found = bodies.by_key[key]
    if found is None:
        return original(child, *args, **kwargs)
    number, out_spec = found
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        outs = _Layer.apply(number, *inputs)
    else:
        outs = LAYER(inputs, number)
    return pytree.tree_unflatten(list(outs), out_spec)


def _forward_body(
    child: nn.Module,
    state: dict[str, torch.Tensor],
    leaves: list[Any],
    where: list[int],
    spec: Any,
    inputs: Sequence[torch.Tensor],
) -> Any:
    """(body, structure of its result); None if the block cannot be a node."""
    bodies = current_bodies()
    out_spec: Any = None
    plain = True

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_spec, plain
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=False):
            filled[i] = t
        args, kwargs = pytree.tree_unflatten(filled, spec)
        values = dict(zip(state, tensors[len(where) :], strict=True))
        out = torch.func.functional_call(child, values, args, kwargs)
        flat, out_spec = pytree.tree_flatten(out)
        plain = all(isinstance(x, torch.Tensor) for x in flat)
        seen = {id(t) for t in tensors}
        return [t.clone() if id(t) in seen else t for t in flat]

    with disable_proxy_modes_tracing(), torch.no_grad():
        graph = trace(run, inputs)
    body = Body(graph, outputs_of(graph), graph_flops(graph))
    if not plain or not body.foldable:
        return None
    code = graph.code
    for number, other in enumerate(bodies.bodies):
        same_inputs = [n.meta["val"].shape for n in _placeholders(other.graph)] == [
            n.meta["val"].shape for n in _placeholders(graph)
        ]
        if other.graph.code == code and other.outputs == body.outputs and same_inputs:
            return number, out_spec
    bodies.bodies.append(body)
    return len(bodies.bodies) - 1, out_spec


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


# -- lowering -----------------------------------------------------------------------------------


class _BodyInterpreter(Interpreter):
    """Emits a block's graph into the program at hand, with its own locations."""

    def __init__(self, outer: Interpreter, module: torch.fx.GraphModule) -> None:
        super().__init__(outer.b, module)
        self.locate = getattr(outer, "locate", None)

    def before(self, node: torch.fx.Node) -> None:
        if self.locate is not None:
            self.b.location = self.locate(node)  # type: ignore[attr-defined]


def _over_batch(b: Any, x: Value) -> Value:
    """A carry divided by its batch, so that the loop's state has one layout from the start."""
    mesh = current_bodies().mesh
    spec = mesh.batch_spec(x.shape) if mesh is not None and x.rank > 1 else None
    if mesh is None or spec is None:
        return x
    line = (
        f"stablehlo.custom_call @Sharding({x.name}) "
        f'{{mhlo.sharding = "{mesh.annotation(spec, x.shape)}"}} : ({x.type}) -> {x.type}'
    )
    return b.emit(line, x.shape, x.dtype)


def _run_body(interpreter: Interpreter, number: int, inputs: Sequence[Value]) -> list[Value]:
    b = interpreter.b
    checks, location = b.checks, getattr(b, "location", None)
    b.checks = []  # a region's values cannot leave it
    try:
        body = current_bodies().bodies[number]
        return list(_BodyInterpreter(interpreter, body.graph).run(inputs))
    finally:
        b.checks = checks
        b.location = location  # type: ignore[attr-defined]


@special("torch_tpu_aot.layer.default")
def _emit_layer(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    return _run_body(interpreter, args[1], args[0])


@special("torch_tpu_aot.loop.default")
def _emit_loop(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    carries, shared, stacked, number, plan_number = args
    plan = current_bodies().plans[plan_number]
    b = interpreter.b
    results = [(tuple(v.shape), v.dtype) for v in node.meta["val"]]
    stores = [b.constant(0, dtype, shape) for shape, dtype in results[len(carries) :]]
    count = b.constant(0, torch.int32)
    n, m = len(carries), len(carries) + len(shared)
    k = m + len(stacked)

    def step(i: Value, *state: Value) -> list[Value]:
        back = b.sub(b.constant(plan.length - 1, torch.int32), i)
        now = {"carry": tuple(_over_batch(b, c) for c in state[:n]), "shared": state[n:m]}
        now["stacked"] = tuple(
            _element(b, s, back if r else i) for s, r in zip(state[m:k], plan.reverse, strict=True)
        )
        outs = _run_body(interpreter, number, [now[kind][x] for kind, x in plan.slots])
        kept = []
        for store, (kind, index, reverse) in zip(state[k:], plan.saved, strict=True):
            value = outs[index] if kind == "out" else state[index]
            kept.append(_store(b, store, value, back if reverse else i))
        carried = [outs[q] for q in plan.carried]
        return [b.add(i, 1), *carried, *state[n:k], *kept]

    final = b.while_(
        [count, *carries, *shared, *stacked, *stores],
        lambda i, *_: b.lt(i, plan.length),
        step,
    )[1:]
    return [*final[:n], *final[k:]]


def _element(b: Any, x: Value, index: Value) -> Value:
    """x[index]; the index stays 32 bits wide, which is what the scalar core computes with."""
    sizes = (1, *x.shape[1:])
    zero = b.constant(0, torch.int32)
    names = ", ".join([index.name, *[zero.name] * (x.rank - 1)])
    types = ", ".join([x.type, *["tensor<i32>"] * x.rank])
    text = (
        f"stablehlo.dynamic_slice {x.name}, {names}, sizes = {list(sizes)} "
        f": ({types}) -> {tensor_type(sizes, x.dtype)}"
    )
    return b.reshape(b.emit(text, sizes, x.dtype), x.shape[1:])


def _store(b: Any, x: Value, value: Value, index: Value) -> Value:
    """x with x[index] replaced by ``value``."""
    update = b.reshape(value, (1, *value.shape))
    zero = b.constant(0, torch.int32)
    names = ", ".join([x.name, update.name, index.name, *[zero.name] * (x.rank - 1)])
    types = ", ".join([x.type, update.type, *["tensor<i32>"] * x.rank])
    text = f"stablehlo.dynamic_update_slice {names} : ({types}) -> {x.type}"
    return b.emit(text, x.shape, x.dtype)
