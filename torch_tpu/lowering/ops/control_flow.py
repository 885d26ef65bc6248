"""Higher-order operators: branches, loops, scans, subgraphs, attention with score functions.

Regions of a loop read nothing from outside: what they need is part of the loop's state. A loop's
random numbers come from a state of their own, so no iteration repeats another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_tpu.lowering import registry
from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.interpreter import (
    SPECIAL,
    GraphError,
    Interpreter,
    higher_order,
    known_specs,
)
from torch_tpu.lowering.types import Value

Values = list[Value]


def _flat(out: Any) -> list[Any]:
    if isinstance(out, (list, tuple)):
        return [leaf for item in out for leaf in _flat(item)]
    return [out]


def _run(b: OpBuilder, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The values of a subgraph's output for these inputs, as values of their own."""
    return _flat(Interpreter(b, module).run(inputs))


def _collecting(b: OpBuilder, emit: Callable[[], Values]) -> tuple[Values, Value]:
    """What ``emit`` gives, and the first check inside it that failed (i64 scalar)."""
    outer, b.checks = b.checks, []
    try:
        values = emit()
        return values, b.first_failure(b.checks)
    finally:
        b.checks = outer


def _specs(node: torch.fx.Node, values: Sequence[Any] = ()) -> list[Any]:
    specs = known_specs(node)
    if specs is None:
        raise GraphError(node, "a result without a known shape (a number, or a size that varies)")
    return specs


@higher_order("cond")
def cond(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Both branches are part of the program; the one that is chosen runs."""
    b = interpreter.b
    predicate, then, otherwise, operands = args
    if not isinstance(predicate, Value):
        return _run(b, then if predicate else otherwise, operands)
    specs = _specs(node)
    predicate = b.reshape(b.convert(predicate, torch.bool), ())

    def branch(module: torch.fx.GraphModule) -> Callable[[], Values]:
        def emit() -> Values:
            values, check = _collecting(b, lambda: _run(b, module, operands))
            return [*(b.as_value(v, d) for v, (_, d) in zip(values, specs, strict=True)), check]

        return emit

    *values, check = b.if_(predicate, branch(then), branch(otherwise), [*specs, ((), torch.int64)])
    b.checks.append(check)
    return values


class _LoopState:
    """Packs what a loop carries: values, what they read, a check, the random state."""

    def __init__(self, b: OpBuilder, carried: Values, invariant: Values) -> None:
        self.b = b
        self.n = len(carried)
        self.inits = [*carried, *invariant, b.constant(0, torch.int64)]
        self.random = b.rng_state
        if self.random is not None:
            # A high word of its own per iteration; operations outside use the low one.
            seed, offset = self.random
            self.inits += [seed, b.add(offset, 1 << 32)]

    def unpack(self, state: Sequence[Value]) -> tuple[Values, Values]:
        end = -3 if self.random is not None else -1
        return list(state[: self.n]), list(state[self.n : len(state) + end])

    def step(self, state: Sequence[Value], emit: Callable[[Values, Values], Values]) -> list[Value]:
        """The state after one iteration."""
        b = self.b
        carried, invariant = self.unpack(state)
        outer = b.rng_state
        tail: list[Value] = []
        before = state[-1]
        if self.random is not None:
            seed, offset = state[-2:]
            b.rng_state = (seed, offset)
            tail = [seed, b.add(offset, 1 << 32)]
            before = state[-3]
        try:
            values, check = _collecting(b, lambda: emit(carried, invariant))
        finally:
            b.rng_state = outer
        return [*values, *invariant, b.first_failure([before, check]), *tail]

    def result(self, state: Sequence[Value]) -> Values:
        self.b.checks.append(state[-3 if self.random is not None else -1])
        return list(state[: self.n])


def _tensors(node: torch.fx.Node, values: Sequence[Any], what: str) -> None:
    for v in values:
        if not isinstance(v, Value):
            raise GraphError(node, f"{what} that is a Python number ({v!r}); pass a 0-d tensor")


@higher_order("while_loop")
def while_loop(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    b = interpreter.b
    condition, body, carried, additional = args
    _tensors(node, carried, "a loop variable")
    fixed = {i: v for i, v in enumerate(additional) if not isinstance(v, Value)}
    loop = _LoopState(b, list(carried), [v for v in additional if isinstance(v, Value)])

    def inputs(values: Values, invariant: Values) -> list[Any]:
        rest = iter(invariant)
        extra = [fixed[i] if i in fixed else next(rest) for i in range(len(additional))]
        return [*values, *extra]

    def go_on(*state: Value) -> Value:
        (flag,) = _run(b, condition, inputs(*loop.unpack(state)))
        if not isinstance(flag, Value):
            raise GraphError(node, "a condition that is not a tensor")
        return b.reshape(b.convert(flag, torch.bool), ())

    def step(*state: Value) -> list[Value]:
        def emit(values: Values, invariant: Values) -> Values:
            out = _run(b, body, inputs(values, invariant))
            return [b.convert(v, c.dtype) for v, c in zip(out, carried, strict=True)]

        return loop.step(state, emit)

    return loop.result(b.while_(loop.inits, go_on, step))


@higher_order("scan")
def scan(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """A loop over dim 0 of ``xs`` that carries ``init`` and stacks what each step gives."""
    b = interpreter.b
    combine, init, xs, additional = args
    _tensors(node, [*init, *xs, *additional], "an input")
    return _scan_over(b, node, combine, init, xs, additional)


@higher_order("map_impl")
def map_impl(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    combine, xs, additional = args
    _tensors(node, [*xs, *additional], "an input")
    return _scan_over(interpreter.b, node, combine, [], xs, additional)


def _scan_over(
    b: OpBuilder,
    node: torch.fx.Node,
    combine: torch.fx.GraphModule,
    init: Sequence[Value],
    xs: Sequence[Value],
    additional: Sequence[Value],
) -> Values:
    specs = _specs(node)
    count = xs[0].shape[0]
    stacked = [b.constant(0, d, s) for s, d in specs[len(init) :]]
    start = b.constant(0, torch.int64)
    loop = _LoopState(b, [start, *init, *stacked], [*xs, *additional])

    def step(*state: Value) -> list[Value]:
        def emit(values: Values, invariant: Values) -> Values:
            i, carry, buffers = values[0], values[1 : 1 + len(init)], values[1 + len(init) :]
            rows = []
            for x in invariant[: len(xs)]:
                starts: list[Any] = [i, *[0] * (x.rank - 1)]
                row = b.dynamic_slice(x, starts, [1, *x.shape[1:]])
                rows.append(b.reshape(row, x.shape[1:]))
            out = _run(b, combine, [*carry, *rows, *invariant[len(xs) :]])
            new = [b.convert(v, c.dtype) for v, c in zip(out, carry, strict=False)]
            for buffer, value in zip(buffers, out[len(init) :], strict=True):
                value = b.unsqueeze(b.convert(value, buffer.dtype), 0)
                new.append(b.dynamic_update_slice(buffer, value, [i, *[0] * (buffer.rank - 1)]))
            return [b.add(i, 1), *new]

        return loop.step(state, emit)

    out = loop.result(b.while_(loop.inits, lambda i, *_: b.lt(i, count), step))
    return out[1:]


@higher_order("associative_scan")
def associative_scan(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """In log2(n) levels of pairwise combinations (Blelloch, "Prefix sums", 1990)."""
    b = interpreter.b
    combine, xs, additional = args
    _tensors(node, [*xs, *additional], "an input")
    cache: dict[int, torch.fx.GraphModule] = {}

    def combined(left: Values, right: Values) -> Values:
        n = left[0].shape[0]
        if n not in cache:
            cache[n] = _over_rows(combine, len(xs), left, right, additional)
        return [
            b.convert(v, x.dtype)
            for v, x in zip(_run(b, cache[n], [*left, *right, *additional]), xs, strict=True)
        ]

    def scanned(values: Values) -> Values:
        n = values[0].shape[0]
        if n < 2:
            return values
        pairs = n - n % 2
        odd = scanned(
            combined(
                [b.slice_dim(v, 0, 0, pairs - 1, 2) for v in values],
                [b.slice_dim(v, 0, 1, pairs, 2) for v in values],
            )
        )
        first = [b.slice_dim(v, 0, 0, 1) for v in values]
        even = first
        if n > 2:
            k = (n - 1) // 2
            rest = combined(
                [b.slice_dim(v, 0, 0, k) for v in odd],
                [b.slice_dim(v, 0, 2, 2 * k + 1, 2) for v in values],
            )
            even = [b.concatenate([f, r], 0) for f, r in zip(first, rest, strict=True)]
        return [_interleaved(b, e, o) for e, o in zip(even, odd, strict=True)]

    return scanned(list(xs))


def _interleaved(b: OpBuilder, even: Value, odd: Value) -> Value:
    """Rows even[0], odd[0], even[1], …; ``even`` may have one row more."""
    n, m = even.shape[0], odd.shape[0]
    last = [b.slice_dim(even, 0, m, n)] if n > m else []
    pairs = b.stack([b.slice_dim(even, 0, 0, m), odd], 1)
    joined = b.reshape(pairs, (2 * m, *odd.shape[1:]))
    return b.concatenate([joined, *last], 0)


def _over_rows(
    combine: torch.fx.GraphModule, n: int, left: Values, right: Values, additional: Sequence[Value]
) -> torch.fx.GraphModule:
    """``combine`` for all rows of dim 0 at once, as a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*values: torch.Tensor) -> Any:
        dims = (*[0] * (2 * n), *[None] * len(additional))
        return torch.func.vmap(lambda *v: tuple(_flat(combine(*v))), in_dims=dims)(*values)

    metas = [
        torch.empty(v.shape, dtype=v.dtype, device="meta") for v in [*left, *right, *additional]
    ]
    return make_fx(run)(*metas)


@higher_order("invoke_subgraph")
def invoke_subgraph(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    module, _, *operands = args
    return Interpreter(interpreter.b, module).run(operands)


@higher_order("with_effects")
def with_effects(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """An op with an effect, between two tokens that order it among others.

    The order of a program's lines is that order. Effects on the host are not for the device.
    """
    token, op, *rest = args
    lowering = SPECIAL.get(registry.overload_name(op)) if hasattr(op, "_schema") else None
    if lowering is None:
        raise GraphError(node, f"{op} has an effect that a program on the device cannot have")
    inner = torch.fx.Node(node.graph, node.name, node.op, op, (), {})
    inner.meta = node.meta
    out = lowering(interpreter, inner, rest, kwargs)
    return [token, *([] if out is None else _flat(out))]


# -- random state of recomputed ops ------------------------------------------------------------


@higher_order("run_and_save_rng_state")
def run_and_save(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """Runs a random op; its state goes to the backward pass, which draws the same numbers."""
    b = interpreter.b
    overload, *rest = args
    assert b.rng_state is not None
    state = b.stack(list(b.rng_state), 0)
    return [state, interpreter.emit_inner(overload, rest, kwargs)]


@higher_order("run_with_rng_state")
def run_with(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    b = interpreter.b
    state, overload, *rest = args
    outer, used = b.rng_state, b.rng_used
    b.rng_state = (b.index_dim(state, 0, 0), b.index_dim(state, 0, 1))
    try:
        return interpreter.emit_inner(overload, rest, kwargs)
    finally:
        b.rng_state, b.rng_used = outer, used


# -- attention with score functions --------------------------------------------------------------


def _through_dense(
    interpreter: Interpreter, node: torch.fx.Node, args: Sequence[Any], dense: Callable[..., Any]
) -> Any:
    """Emit PyTorch's own dense form of an operator, traced on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(list(args), is_leaf=lambda x: isinstance(x, Value))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Value)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        return dense(*pytree.tree_unflatten(filled, spec))

    # On the device that the subgraphs were traced for: they name it.
    traced = node.all_input_nodes[0].meta.get("val")
    device = traced.device if isinstance(traced, torch.Tensor) else torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [torch.empty(leaves[i].shape, dtype=leaves[i].dtype, device=device) for i in where]
        functional = dispatch_functionalize(run, FunctionalTensorMode())
        module = make_fx(functional, _allow_non_fake_inputs=True)(*fakes)
    return Interpreter(interpreter.b, module).run([leaves[i] for i in where])


@higher_order("flex_attention")
def flex_attention(interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    from torch._higher_order_ops.flex_attention import sdpa_dense

    return _through_dense(interpreter, node, args, sdpa_dense)


@higher_order("flex_attention_backward")
def flex_attention_backward(
    interpreter: Interpreter, node: torch.fx.Node, args: Any, kwargs: Any
) -> Any:
    from torch._higher_order_ops.flex_attention import sdpa_dense_backward

    return _through_dense(interpreter, node, args, sdpa_dense_backward)
