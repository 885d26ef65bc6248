"""Repeated layers as one loop: a stack of equal blocks is traced, lowered and compiled once.

While a model is captured, each call of a block in an ``nn.ModuleList`` or ``nn.Sequential`` of
equal blocks becomes one node ``torch_tpu_aot.layer(inputs, body)``; its backward becomes another,
that runs the block again and differentiates it (so a block's activations are rematerialised).
:func:`fold` then finds chains of such nodes that feed each other and makes each chain a loop over
stacked inputs. What does not fit the pattern stays a sequence of calls, which are written inline:
the values are the same either way.
"""

from __future__ import annotations

import inspect
import operator
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


# -- folding: a chain of nodes becomes one loop -------------------------------------------------


def fold(module: torch.fx.GraphModule, bodies: Bodies) -> int:
    """Replace chains of layer nodes by loops, in place; returns how many loops there are."""
    graph = module.graph
    chains = _chains(graph)
    plans = [c for c in (_ChainPlan.make(chain) for chain in chains) if c is not None]
    for plan in plans:
        plan.find_saved(plans)
    for plan in plans:
        plan.insert(graph, bodies, plans)
    if plans:
        _sort(graph)
        graph.eliminate_dead_code()
        module.recompile()
    return len(plans)


def _item(node: Any) -> tuple[torch.fx.Node, int] | None:
    """(node, i) for a node that is item i of a node's result."""
    if isinstance(node, torch.fx.Node) and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None


def _chains(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Runs of nodes of one body, each fed by the one before."""
    chains: list[list[torch.fx.Node]] = []
    last: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not LAYER:
            continue
        body = node.args[1]
        chain = last.get(body)
        fed = chain is not None and any(
            (item := _item(v)) is not None and item[0] is chain[-1] for v in node.args[0]
        )
        if chain is None or not fed:
            chain = []
            chains.append(chain)
            last[body] = chain
        chain.append(node)
    return [c for c in chains if len(c) >= MIN_LAYERS]


@dataclass(eq=False)
class _ChainPlan:
    chain: list[torch.fx.Node]
    slots: list[tuple[str, int]]
    carries: list[torch.fx.Node]
    carried: list[int]
    shared: list[torch.fx.Node]
    series: list[list[torch.fx.Node]]
    carry_ins: list[list[torch.fx.Node]]
    saved: list[tuple[str, int, bool]] = field(default_factory=list)
    loop: torch.fx.Node | None = None

    @staticmethod
    def make(chain: list[torch.fx.Node]) -> _ChainPlan | None:
        """None if the chain is no loop: an input depends on it in some other way."""
        plan = _ChainPlan(chain, [], [], [], [], [], [])
        after = _dependents(chain[0])
        for values in zip(*(n.args[0] for n in chain), strict=True):  # type: ignore[arg-type]
            items = [_item(v) for v in values[1:]]
            if all(v is values[0] for v in values):
                if values[0] in after:
                    return None
                plan.slots.append(("shared", len(plan.shared)))
                plan.shared.append(values[0])
            elif all(
                item is not None and item[0] is before and item[1] == items[0][1]  # type: ignore[index]
                for item, before in zip(items, chain, strict=False)
            ):
                plan.slots.append(("carry", len(plan.carries)))
                plan.carries.append(values[0])
                plan.carry_ins.append(list(values))
                plan.carried.append(items[0][1])  # type: ignore[index]
            else:
                if any(v in after for v in values):
                    return None
                plan.slots.append(("stacked", len(plan.series)))
                plan.series.append(list(values))
        return plan

    def find_saved(self, plans: Sequence[_ChainPlan]) -> None:
        """Which values of each iteration others read."""
        mine = set(self.chain)
        for other in plans:
            for series in other.series:
                for i, ins in enumerate(self.carry_ins):
                    if series in (ins, ins[::-1]):
                        self._save("in", i, False)
        outputs: dict[int, list[torch.fx.Node | None]] = {}
        for t, node in enumerate(self.chain):
            for user in node.users:
                item = _item(user)
                if item is not None:
                    outputs.setdefault(item[1], [None] * len(self.chain))[t] = user
        for out, items in outputs.items():
            stacked = _stack_of(items)
            if stacked is not None:
                self._save("out", out, stacked.args[0] == items[::-1])
                continue
            for t, item in enumerate(items):
                final = t == len(items) - 1 and out in self.carried
                if item is None or final:
                    continue
                outside = [u for u in item.users if u not in mine]
                if any(not self._covered(item, u, plans) for u in outside):
                    self._save("out", out, False)
                    break

    def _covered(
        self, item: torch.fx.Node, user: torch.fx.Node, plans: Sequence[_ChainPlan]
    ) -> bool:
        """Whether a use is another loop's, which reads the stacked carries instead."""
        for other in plans:
            if user in other.chain:
                return any(
                    item in series and any(series in (c, c[::-1]) for c in self.carry_ins)
                    for series in other.series
                )
        return False

    def _save(self, kind: str, index: int, reverse: bool) -> None:
        if all(s[:2] != (kind, index) for s in self.saved):
            self.saved.append((kind, index, reverse))

    def place(self, kind: str, index: int) -> tuple[int, bool] | None:
        """Result of the loop that holds a saved series, and whether it is reversed."""
        for i, (k, n, reverse) in enumerate(self.saved):
            if (k, n) == (kind, index):
                return len(self.carries) + i, reverse
        return None

    # -- rewriting -------------------------------------------------------------------------

    def insert(self, graph: torch.fx.Graph, bodies: Bodies, plans: Sequence[_ChainPlan]) -> None:
        length = len(self.chain)
        reverse: list[bool] = []
        stacked: list[torch.fx.Node] = []
        with graph.inserting_before(self.chain[-1]):
            for series in self.series:
                source, backwards = self._stacked(graph, series, plans)
                stacked.append(source)
                reverse.append(backwards)
            plan = Plan(
                length, tuple(self.slots), tuple(reverse), tuple(self.carried), tuple(self.saved)
            )
            bodies.plans.append(plan)
            number = self.chain[0].args[1]
            arguments = (self.carries, self.shared, stacked, number, len(bodies.plans) - 1)
            loop = graph.call_function(LOOP, arguments)
            body = bodies.bodies[number]  # type: ignore[index]
            first = [v.meta["val"] for v in self.chain[0].args[0]]  # type: ignore[union-attr]
            specs = [body.outputs[q] for q in self.carried]
            for kind, index, _ in self.saved:
                if kind == "out":
                    one = body.outputs[index]
                else:
                    value = first[self.slots.index(("carry", index))]
                    one = Spec(tuple(value.shape), tuple(value.stride()), value.dtype)
                specs.append(Spec((length, *one.shape), (), one.dtype))
            loop.meta.update(self.chain[0].meta)
            with _fake_mode_of(first):
                loop.meta["val"] = [
                    torch.empty(s.shape, dtype=s.dtype, device=first[0].device) for s in specs
                ]
            self.loop = loop
            self._replace_outputs(graph, loop)

    def _stacked(
        self, graph: torch.fx.Graph, series: list[torch.fx.Node], plans: Sequence[_ChainPlan]
    ) -> tuple[torch.fx.Node, bool]:
        """One tensor with the values of all iterations, and whether it is in reverse order."""
        for other in plans:
            for i, ins in enumerate(other.carry_ins):
                place = other.place("in", i)
                if series in (ins, ins[::-1]) and place is not None and other.loop is not None:
                    item = _get(graph, other.loop, place[0])
                    return item, (series == ins[::-1]) != place[1]
        items = [_item(v) for v in series]
        if all(i is not None and i[0] is items[0][0] for i in items):  # type: ignore[index]
            source = items[0][0]  # type: ignore[index]
            order = [i[1] for i in items]  # type: ignore[index]
            ascending = list(range(len(order)))
            whole = source.target is torch.ops.aten.unbind.int and not (
                source.args[1:] and source.args[1]
            )
            if whole and source.args[0].meta["val"].shape[0] == len(order):  # type: ignore[union-attr]
                if order == ascending:
                    return source.args[0], False  # type: ignore[return-value]
                if order == ascending[::-1]:
                    return source.args[0], True  # type: ignore[return-value]
        joined = graph.call_function(torch.ops.aten.stack.default, (list(series), 0))
        values = [v.meta["val"] for v in series]
        with _fake_mode_of(values):
            joined.meta["val"] = torch.empty(
                (len(values), *values[0].shape), dtype=values[0].dtype, device=values[0].device
            )
        return joined, False

    def _replace_outputs(self, graph: torch.fx.Graph, loop: torch.fx.Node) -> None:
        length = len(self.chain)
        for t, node in enumerate(self.chain):
            for user in list(node.users):
                item = _item(user)
                if item is None:
                    continue
                out = item[1]
                if t == length - 1 and out in self.carried:
                    user.replace_all_uses_with(_get(graph, loop, self.carried.index(out)))
                    continue
                place = self.place("out", out)
                if place is None:
                    continue  # only the next iteration reads it, or a loop that reads the carries
                whole = _get(graph, loop, place[0])
                for stack in [u for u in user.users if _is_stack(u)]:
                    parts = list(stack.args[0])  # type: ignore[arg-type]
                    mine = [_item(p) for p in parts]
                    nodes = [m[0] for m in mine if m is not None and m[1] == out]
                    if nodes in (self.chain, self.chain[::-1]) and len(nodes) == len(parts):
                        stored = self.chain[::-1] if place[1] else self.chain
                        if nodes == stored:
                            stack.replace_all_uses_with(whole)
                index = length - 1 - t if place[1] else t
                select = graph.call_function(torch.ops.aten.select.int, (whole, 0, index))
                select.meta.update(user.meta)
                user.replace_all_uses_with(select)


def _is_stack(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.stack.default and (len(node.args) < 2 or node.args[1] == 0)


def _stack_of(items: list[torch.fx.Node | None]) -> torch.fx.Node | None:
    """The ``stack`` of all iterations' items, in either order, if there is one."""
    if any(i is None for i in items):
        return None
    for user in items[0].users:  # type: ignore[union-attr]
        if _is_stack(user) and user.args[0] in (items, items[::-1]):
            return user
    return None


def _get(graph: torch.fx.Graph, node: torch.fx.Node, index: int) -> torch.fx.Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _fake_mode_of(values: Sequence[Any]) -> Any:
    return values[0].fake_mode


def _dependents(root: torch.fx.Node) -> set[torch.fx.Node]:
    seen: set[torch.fx.Node] = set()
    work = [root]
    while work:
        for user in work.pop().users:
            if user not in seen:
                seen.add(user)
                work.append(user)
    return seen


def _sort(graph: torch.fx.Graph) -> None:
    """Put nodes after what they read, otherwise in the order they are in."""
    done: set[torch.fx.Node] = set()
    order: list[torch.fx.Node] = []
    for root in list(graph.nodes):
        work = [(root, False)]
        while work:
            node, ready = work.pop()
            if node in done:
                continue
            if ready:
                done.add(node)
                order.append(node)
                continue
            work.append((node, True))
            work += [(i, False) for i in reversed(node.all_input_nodes) if i not in done]
    at = next(iter(order))
    for node in order[1:]:
        at.append(node)
        at = node


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
    checks, location = b.index_checks, getattr(b, "location", None)
    b.index_checks = []  # a region's values cannot leave it
    try:
        body = current_bodies().bodies[number]
        return list(_BodyInterpreter(interpreter, body.graph).run(inputs))
    finally:
        b.index_checks = checks
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
