"""Dynamo's graph → AOTAutograd → one program each for forward and backward."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._sympy.symbol import SymT, symbol_is_type

from torch_tpu import _C
from torch_tpu.dynamo.backend import uses_device
from torch_tpu.dynamo.host_effects import run_after, take_out
from torch_tpu.dynamo.options import CompileOptions
from torch_tpu.dynamo.partition import partition
from torch_tpu.lowering import views
from torch_tpu.lowering.interpreter import GraphError
from torch_tpu.program import options as program_options
from torch_tpu.program.bounded import policy
from torch_tpu.program.bounded.description import Call
from torch_tpu.program.bounded.expressions import Expression
from torch_tpu.program.describe import describe
from torch_tpu.program.graph import (
    GraphInput,
    GraphProgram,
    describe_tensor,
    lower_graph,
)
from torch_tpu.program.plan import ScalarArg, StorageSpec, TensorArg
from torch_tpu.program.recompiles import report_compile

_numbers = itertools.count()


def compile_module(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions
) -> Callable[..., Any]:
    """Compile one graph of Dynamo. A graph without the device runs as it is."""
    if not uses_device(module, example_inputs):
        return module
    name = f"{options.name}.{next(_numbers)}"
    strict = _fullgraph()
    if options.debug_callback is not None:
        options.debug_callback("graph", module)

    def compiler(stage: str) -> Callable[..., Any]:
        def compile_stage(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if options.debug_callback is not None:
                options.debug_callback(stage, graph)
            effects = take_out(graph)
            run = compile_graph(graph, f"{name}.{stage}", options, stage=stage, strict=strict)
            return run_after(run, effects) if effects else run

        return compile_stage

    def translate(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(x, (list, tuple, dict)) for x in inputs):
            return flatten_graph_inputs(module, inputs, translate)
        # Not through torch._dynamo.backends.common.aot_autograd, which imports Inductor.
        run = aot_module_simplified(
            module,
            inputs,
            fw_compiler=compiler("forward"),
            # It is called, and calls, under Dynamo's eyes: from the first backward pass.
            bw_compiler=_untraced(compiler("backward")),
            inference_compiler=compiler("forward"),
            partition_fn=partition,
            # Ops without a lowering are decomposed where they are emitted.
            decompositions={},
            keep_inference_input_mutations=True,
        )
        return torch.compiler.disable(run)

    return translate(module, example_inputs)


def _untraced(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that Dynamo does not look into, nor into what it makes."""
    hidden = torch.compiler.disable(compiler)
    return lambda *args: torch.compiler.disable(hidden(*args))


def _fullgraph() -> bool:
    """Whether the user asked for ``fullgraph=True``, as Dynamo knows while it translates."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(InstructionTranslator.current_tx().one_graph)
    except AttributeError:  # not called by Dynamo
        return False


def placeholder_values(graph: torch.fx.GraphModule) -> list[Any]:
    """What the placeholders were traced with: fake tensors, SymInts, numbers."""
    return [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]


def written_placeholders(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of the inputs that the graph writes to."""
    position = {n: i for i, n in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    return [
        position[n.args[0]]
        for n in graph.graph.nodes
        if n.target is torch.ops.aten.copy_.default and n.args[0] in position
    ]


def _device_of(graph: torch.fx.GraphModule) -> int:
    """The device a graph runs on if none of its inputs tells; -1 for the current one."""
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.device.type == "tpu":
            return -1 if val.device.index is None else val.device.index
    return -1


def compile_graph(
    graph: torch.fx.GraphModule,
    name: str,
    options: CompileOptions,
    *,
    stage: str = "forward",
    strict: bool = False,
) -> Callable[..., Any]:
    """A functional ATen graph as a native callable (boxed: it takes one list of inputs).

    A forward graph is lowered at once if its shapes are known, so that what cannot be compiled
    shows here: such a graph runs op by op after one warning, or raises GraphError if ``strict``. It
    is lowered anew for inputs that lie differently in their storages and for new sizes of a dynamic
    graph. A backward graph gets here when it is about to run, and what it gets are often views.
    """
    written = written_placeholders(graph)
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]

    def lowered(
        arguments: Sequence[GraphInput], storages: Sequence[StorageSpec], *counts: int
    ) -> GraphProgram:
        n_ints, n_floats = counts
        program = lower_graph(
            graph,
            arguments,
            storages=storages,
            n_ints=n_ints,
            n_floats=n_floats,
            alias_results=True,
        )
        if options.debug_callback is not None:
            options.debug_callback(f"{stage}_text", program.text)
        return program

    def fall_back(error: Exception | str) -> Callable[..., Any]:
        if strict:
            raise error if isinstance(error, Exception) else RuntimeError(f"{name}: {error}")
        warnings.warn(
            f"torch.compile: {name} runs op by op, because it cannot become one program: {error}",
            stacklevel=2,
        )
        return graph

    placeholders = placeholder_values(graph)
    expected = None
    if stage != "backward":
        expected = _expected_inputs(placeholders, written)
    ready: GraphProgram | None = None
    circumstances = program_options.fingerprint()
    if expected is not None:
        try:
            ready = lowered(*expected)
        except GraphError as error:
            return _boxed(fall_back(error))

    def lower(
        arguments: list[GraphInput],
        storages: list[StorageSpec],
        device: int,
        n_ints: int,
        n_floats: int,
    ) -> GraphProgram | Callable[..., Any]:
        def of_its_own(call: Call) -> GraphProgram:
            return lowered(call.args, call.storages, n_ints, n_floats)

        try:
            bounded = policy.bounded_plan(
                name,
                arguments,
                storages,
                n_ints,
                of_its_own,
                known=known_sizes(placeholders, arguments, options),
            )
        except GraphError as error:
            return fall_back(error)
        if bounded is not None:
            if bounded.report is not None:
                parts = describe(names, arguments, storages) | bounded.report
                report_compile(name, parts, exact=False)
            if bounded.plan.repads:
                return GraphProgram(repads=bounded.plan.repads)
            return bounded.plan  # type: ignore[return-value]
        report_compile(name, describe(names, arguments, storages))
        as_expected = (arguments, storages, n_ints, n_floats) == expected
        if ready is not None and as_expected and program_options.fingerprint() == circumstances:
            return ready
        try:
            return lowered(arguments, storages, n_ints, n_floats)
        except GraphError as error:
            return fall_back(error)

    compiled = _C.CompiledGraph(name, lower, fall_back, _device_of(graph), written)
    # AOTAutograd's wrappers copy it from here: they pass one list, which the callee may empty.
    compiled._boxed_call = True
    if options.async_compile and ready is not None:
        compiled.prepare(ready)
    return compiled


def _boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(inputs: list[Any]) -> Any:
        values = list(inputs)
        inputs.clear()
        return run(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def known_sizes(
    placeholders: Sequence[Any], arguments: Sequence[GraphInput], options: CompileOptions
) -> policy.Known | None:
    """What Dynamo traced as symbols; None if nothing is, or if a symbol is no input's size."""
    values: dict[Any, int] = {}
    buckets: dict[int, policy.Bucket] = {}
    pairs: list[tuple[Any, int]] = []
    for value, argument in zip(placeholders, arguments, strict=True):
        if isinstance(argument, TensorArg):
            pairs += zip(value.shape, argument.sizes, strict=True)
            if argument.view in (views.REGULAR, views.GATHER):
                pairs += zip(value.stride(), argument.strides, strict=True)
        elif isinstance(argument, int) and not isinstance(argument, bool):
            pairs.append((value, argument))
    for size, n in pairs:
        if isinstance(size, torch.SymInt) and _is_size_of_an_input(size):
            values.setdefault(size.node.expr, n)
            buckets.setdefault(n, options.bucket(_upper_bound(size)))
    if not values:
        return None
    # Symbols that have one value are one symbol in this call's pattern.
    distinct = sorted(set(values.values()))
    numbering = {symbol: distinct.index(n) for symbol, n in values.items()}
    numbers = [_expression(size, n, numbering) for size, n in pairs]
    if any(e is None for e in numbers):
        return None
    return policy.Known(tuple(distinct), buckets, numbers)  # type: ignore[arg-type]


def _is_size_of_an_input(size: torch.SymInt) -> bool:
    """Not one that only the data tell, such as the length of a random state."""
    expr = size.node.expr
    return bool(expr.is_symbol) and not symbol_is_type(expr, SymT.UNBACKED_INT)


def _expression(size: Any, n: int, numbering: dict[Any, int]) -> Expression | None:
    if not isinstance(size, torch.SymInt):
        return Expression.constant(n)
    if not size.node.expr.free_symbols <= numbering.keys():
        return Expression.constant(n)
    terms: dict[tuple[int, ...], int] = {}
    for term in size.node.expr.expand().as_ordered_terms():
        coefficient, factors = 1, []
        for factor in term.as_ordered_factors():
            base, power = factor.as_base_exp()
            if factor.is_Integer:
                coefficient *= int(factor)
            elif base in numbering and power.is_Integer and power > 0:
                factors += [numbering[base]] * int(power)
            else:
                return None
        key = tuple(sorted(factors))
        terms[key] = terms.get(key, 0) + coefficient
    return Expression.of(terms)


def _upper_bound(size: torch.SymInt) -> int | None:
    """What ``mark_dynamic(max=)`` or ``torch._check`` limit it to; None for no limit."""
    try:
        upper = size.node.shape_env.bound_sympy(size.node.expr).upper
        return int(upper) if upper.is_finite and upper < 1 << 31 else None
    except (AttributeError, TypeError, ValueError):
        return None


def _expected_inputs(
    values: Sequence[Any], written: Sequence[int]
) -> tuple[list[GraphInput], list[StorageSpec], int, int] | None:
    """The inputs as the native core will describe them if each tensor has a storage of its own;
    None if a shape is symbolic."""
    arguments: list[GraphInput] = []
    storages: list[StorageSpec] = []
    tensors = ints = floats = 0
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if any(not isinstance(n, int) for n in (*value.shape, *value.stride())):
                return None
            if value.device.type == "cpu" and value.dim() == 0 and i not in written:
                slot = floats if value.dtype.is_floating_point else ints
                if value.dtype.is_complex:
                    return None
                arguments.append(TensorArg(tensors, -1, (), (), value.dtype, 5, slot, 1, False))
                floats += value.dtype.is_floating_point
                ints += not value.dtype.is_floating_point
            else:
                try:
                    argument, spec = describe_tensor(value, tensors, len(storages))
                except NotImplementedError:
                    return None
                arguments.append(argument)
                storages.append(spec)
            tensors += 1
        elif isinstance(value, float):
            arguments.append(ScalarArg("float", floats, value))
            floats += 1
        elif value is None or isinstance(value, (bool, int)):
            arguments.append(value)
        else:
            return None
    return arguments, storages, ints, floats
