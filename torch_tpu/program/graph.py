"""A whole FX graph of ATen calls → one program.

:func:`lower_graph` is the only way from a graph to StableHLO: ``torch.compile``, export and
ahead-of-time compilation use it, and it emits each node through the lowerings that eager calls use.

It needs no device and no values. Inputs may be real, fake or meta tensors, or descriptions
(:class:`~torch_tpu.program.plan.TensorArg`) made by the native core; nothing is read from them but
shape, strides and dtype. To write for another kind of device than the current one, lower inside
``options.for_target("tpu")``::

    module = make_fx(fn, tracing_mode="fake")(*inputs)    # functional; AOTAutograd's graphs are
    with options.for_target("tpu"):
        program = lower_graph(module, inputs, keep_unused=True)
    program.text          # one module with a public @main
    program.parameters    # what each parameter is: an input, a constant, the packs
    program.results       # shape and dtype of each result

The graph has to be functional, except that it may write to its inputs with ``aten.copy_``. A
written input is a result too, aliased to its parameter (donated) where shape and dtype allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_tpu.lowering import views
from torch_tpu.lowering.emit import Spec
from torch_tpu.lowering.interpreter import GraphError, Interpreter, node_name, source_line
from torch_tpu.lowering.types import Value
from torch_tpu.program import options as program_options
from torch_tpu.program.emitter import (
    CallEmitter,
    finish,
    new_output,
    stride_order,
)
from torch_tpu.program.plan import Output, Plan, ScalarArg, StorageSpec, TensorArg

GraphInput = torch.Tensor | TensorArg | ScalarArg | int | float | bool | None

# Tensor attributes of a graph up to this many elements are written into the text.
MAX_INLINE_CONSTANT = 64


@dataclass(frozen=True)
class Parameter:
    """One parameter of the program.

    kind   "input": the base of the storage of ``placeholders`` (positions in the graph's inputs);
           "constant": the tensor ``constants[index]``; "ints", "floats": the operand packs, in
           which two last ints are the random state (seed, offset) if ``Plan.takes_rng``
    """

    kind: Literal["input", "constant", "ints", "floats"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    placeholders: tuple[int, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class Result:
    """What one value of the graph's output is; ``to_cpu`` if the graph leaves it on the host.

    kind   "new": output ``index`` of the program; "argument": input ``index`` itself;
           "view": ``sizes``/``strides``/``offset`` over input ``index``; "view_new": the same over
           output ``index``; "number": the Python number ``value``; "none": None
    """

    kind: Literal["new", "argument", "view", "view_new", "number", "none"]
    index: int = 0
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    value: int | float | bool | None = None
    to_cpu: bool = False


@dataclass
class GraphProgram(Plan):
    """A lowered graph.

    arguments   the program's parameters in order
    values      one :class:`Result` for each leaf of the graph's output
    results     (shape, dtype) of the program's results: new tensors, then the new bases of written
                inputs (``outputs[i].target`` names the input), then the check if there is one
    constants   tensors that became parameters
    draws       how far the program moves the generator's offset
    """

    arguments: list[Parameter] = field(default_factory=list)
    values: list[Result] = field(default_factory=list)
    results: list[Spec] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    draws: int = 0

    @property
    def aliases(self) -> dict[int, int]:
        """Donated parameters: {parameter: result}."""
        return {o.donates: i for i, o in enumerate(self.outputs) if o.donates >= 0}


def describe_tensor(
    tensor: torch.Tensor, index: int, storage: int
) -> tuple[TensorArg, StorageSpec]:
    """A tensor with a storage of its own, as the device would lay it out.

    ``index`` is the input's position. A tensor without gaps is the whole of its base, in the order
    of its strides; anything else is refused with NotImplementedError.
    """
    sizes, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    if tensor.numel() == 0:
        spec = StorageSpec(sizes, tensor.dtype)
        return TensorArg(
            index, storage, sizes, strides, tensor.dtype, views.EMPTY, 0, 0, False
        ), spec
    order = stride_order(sizes, strides)
    if order is None:
        raise NotImplementedError(
            f"input {index}: sizes {sizes} with strides {strides} have gaps or overlap"
        )
    dims = tuple(sizes[d] for d in order)
    view = views.WHOLE if order == list(range(len(sizes))) else views.REGULAR
    arg = TensorArg(index, storage, sizes, strides, tensor.dtype, view, 0, 0, False)
    return arg, StorageSpec(dims, tensor.dtype)


class GraphInterpreter(Interpreter):
    """Emits a graph whose inputs are storages.

    Random ops draw as they do one by one: the k-th of them uses the generator's offset + k, so a
    graph gives the numbers that eager execution gives.
    """

    b: CallEmitter

    def __init__(
        self,
        b: CallEmitter,
        module: torch.fx.GraphModule,
        arguments: Sequence[GraphInput],
        lift: Callable[[torch.Tensor], Value],
        locate: Callable[[torch.fx.Node], str | None] | None,
    ) -> None:
        super().__init__(b, module)
        self.arguments = arguments
        self.lift = lift
        self.locate = locate
        self.draws = 0
        self.written: dict[int, Value] = {}
        self.node: torch.fx.Node | None = None  # that is being emitted
        b.describe_op = self._describe_node
        self.position = {
            node: i for i, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")
        }

    def constant(self, node: torch.fx.Node, tensor: torch.Tensor) -> Any:
        if tensor.numel() > MAX_INLINE_CONSTANT:
            return self.lift(tensor)
        if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            return self.lift(tensor)
        return super().constant(node, tensor)

    def _describe_node(self) -> str:
        if self.node is None:
            return ""
        where = source_line(self.node)
        return node_name(self.node) + (f" (at {where})" if where else "")

    def before(self, node: torch.fx.Node) -> None:
        self.node = node
        if self.locate is not None:
            self.b.location = self.locate(node)

    def emit(
        self, node: torch.fx.Node, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return self._drawing(
            lambda: super(GraphInterpreter, self).emit(node, overload, args, kwargs)
        )

    def _drawing(self, emit: Callable[[], Any]) -> Any:
        """Emit one node with a random state of its own."""
        b = self.b
        state = b.rng_state
        b.rng_used, b._rng_draws = False, 0
        if state is not None and self.draws:
            # Computed where it is used: constants of regions stay inside.
            b.rng_state = (state[0], b.add(state[1], self.draws))
        try:
            return emit()
        finally:
            self.draws += b.rng_used
            b.rng_state = state

    def call(self, node: torch.fx.Node) -> Any:
        """Emit a node. Tracing has checked the call, so any error is the lowering's."""
        try:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return self._drawing(lambda: super(GraphInterpreter, self).call(node))
            return super().call(node)
        except GraphError as error:
            if error.where:
                raise
            raise GraphError(node, str(error)) from error
        except NotImplementedError as error:
            raise GraphError(node, str(error)) from error
        except Exception as error:
            reason = f"lowering failed: {type(error).__name__}: {error}"
            raise GraphError(node, reason) from error

    def op(
        self, node: torch.fx.Node, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if overload in _STRIDED:
            args = [self._in_memory_order(node, args[0]), *args[1:]]
        return super().op(node, overload, args, kwargs)

    def _in_memory_order(self, node: torch.fx.Node, x: Any) -> Any:
        """What ``as_strided`` addresses: the elements of its argument as they lie in memory."""
        val = node.args[0].meta.get("val")  # type: ignore[union-attr]
        if not isinstance(val, torch.Tensor) or not isinstance(x, Value):
            return x
        sizes, strides = tuple(map(int, x.shape)), tuple(map(int, val.stride()))
        if int(val.storage_offset()) != 0:
            raise GraphError(node, "as_strided of a view that does not start its storage")
        order = stride_order(sizes, strides) if x.numel else list(range(x.rank))
        if order is None:
            raise GraphError(node, "as_strided of a view with gaps")
        return self.b.transpose(x, order)

    def mutate(self, node: torch.fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = node.args[0]
        if node.target is not torch.ops.aten.copy_.default or target not in self.position:
            return super().mutate(node, args, kwargs)
        position = self.position[target]
        argument = self.arguments[position]
        if not isinstance(argument, TensorArg):
            raise GraphError(node, "the graph writes to an input that is a number")
        value = self.b.convert(args[1], argument.dtype)
        value = self.b.broadcast_to(value, argument.sizes)
        self.written[position] = value
        self.env[target] = value  # type: ignore[index]
        return value


_STRIDED = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.as_strided_copy.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)


def lower_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[GraphInput],
    *,
    storages: Sequence[StorageSpec] | None = None,
    n_ints: int = 0,
    n_floats: int = 0,
    keep_unused: bool = False,
    embedded: Mapping[int, torch.Tensor] | None = None,
    alias_results: bool = False,
    locate: Callable[[torch.fx.Node], str | None] | None = None,
    parameter_attributes: Mapping[int, str] | None = None,
    result_attributes: Mapping[int, str] | None = None,
    module_attributes: str = "",
) -> GraphProgram:
    """Write one program for a functional FX graph of ATen calls.

    inputs     one for each placeholder: a tensor (fake, meta or real: only its layout is used), a
               TensorArg over ``storages``, a ScalarArg (an operand) or a Python number (a constant)
    storages, n_ints, n_floats   what the TensorArgs and ScalarArgs refer to; leave out with tensors
    embedded        inputs (by position) whose values are written into the text
    keep_unused     parameter i is input i's storage even if the graph does not read it
    alias_results   results that are inputs, or views of inputs or of other results, are described
                    instead of computed; else every value of the output is a result
    locate     gives a node's location as MLIR text ('"layer1"("model.py":12:0)') for debug info
    parameter_attributes, result_attributes, module_attributes   MLIR attribute text by input, by
               result and for the module, such as ``{0: 'mhlo.sharding = "{replicated}"'}``

    Raises GraphError (a NotImplementedError) naming the node and its Python line if an op cannot
    become part of a program.
    """
    embedded = embedded or {}
    known = [None if i in embedded else given for i, given in enumerate(inputs)]
    arguments, specs = _describe(known, storages)
    owners: dict[int, list[int]] = {}
    for i, argument in enumerate(arguments):
        if isinstance(argument, TensorArg) and argument.view != views.SCALAR:
            owners.setdefault(argument.storage, []).append(i)

    constants, lifted = _lifted_constants(module)
    first_constant = len(specs)
    constant_args: list[TensorArg] = []
    for tensor in constants:
        arg, spec = describe_tensor(tensor, len(inputs) + len(constant_args), len(specs))
        constant_args.append(arg)
        specs.append(spec)

    b = CallEmitter(specs, n_ints, n_floats)
    b.matmul_precision = program_options.matmul_precision()
    b.emulate_precision = program_options.emulate_precision()
    b.target = program_options.target()

    def lift(tensor: torch.Tensor) -> Value:
        return b.value(constant_args[lifted[id(tensor)]])

    interpreter = GraphInterpreter(b, module, arguments, lift, locate)
    feed = [b.value(a) if isinstance(a, (TensorArg, ScalarArg)) else a for a in arguments]
    for i, tensor in embedded.items():
        feed[i] = b.constant_array(tensor.detach().cpu(), tensor.dtype)
    # Whoever traces may have a fake mode on; lowerings compute with small tensors of their own.
    with _disable_current_modes(), torch.no_grad():
        out = interpreter.run(feed)
    b.location = None
    program = GraphProgram(constants=constants, draws=interpreter.draws)
    node = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    leaves = _leaves(out)
    nodes = _leaves(node.args[0])
    finished: list[tuple[Value, Output | TensorArg]] = []
    if alias_results:
        collector = _Results(interpreter, program, finished)
        for value, source in zip(leaves, nodes, strict=True):
            program.values.append(collector.add(value, source))
    else:
        for value, source in zip(leaves, nodes, strict=True):
            if isinstance(value, Value):
                program.values.append(Result("new", len(finished)))
                finished.append(new_output(b, value, _value_of(source)))
            else:
                program.values.append(_number(value))
    for position, value in interpreter.written.items():
        target = arguments[position]
        assert isinstance(target, TensorArg)
        finished.append((value, target))
    by_storage: dict[int, str] = {}
    for i, text in (parameter_attributes or {}).items():
        argument = arguments[i]
        if isinstance(argument, TensorArg):
            by_storage[argument.storage] = text
    finish(
        program,
        b,
        specs,
        finished,
        keep_unused=keep_unused,
        parameter_attributes=by_storage,
        result_attributes=result_attributes,
        module_attributes=module_attributes,
    )
    _describe_signature(program, specs, owners, first_constant, n_ints, n_floats)
    return program


def _describe(
    inputs: Sequence[GraphInput], storages: Sequence[StorageSpec] | None
) -> tuple[list[GraphInput], list[StorageSpec]]:
    specs = list(storages or ())
    arguments: list[GraphInput] = []
    for i, given in enumerate(inputs):
        if isinstance(given, torch.Tensor):
            if storages is not None:
                raise TypeError(f"lower_graph: input {i} is a tensor; with storages= expected none")
            given, spec = describe_tensor(given, i, len(specs))
            specs.append(spec)
        arguments.append(given)
    return arguments, specs


def _lifted_constants(module: torch.fx.GraphModule) -> tuple[list[torch.Tensor], dict[int, int]]:
    """Tensor attributes that become parameters, and their places by identity."""
    constants: list[torch.Tensor] = []
    places: dict[int, int] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor) or id(value) in places:
            continue
        fake = isinstance(value, torch._subclasses.FakeTensor) or value.device.type == "meta"
        if fake or value.numel() > MAX_INLINE_CONSTANT:
            places[id(value)] = len(constants)
            constants.append(value)
    return constants, places


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _number(value: Any) -> Result:
    return Result("none") if value is None else Result("number", value=value)


def _value_of(source: Any) -> torch.Tensor | None:
    """The traced tensor of an output's node, for its strides; None if a stride is symbolic."""
    val = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not isinstance(val, torch.Tensor):
        return None
    return val if all(isinstance(s, int) for s in (*val.shape, *val.stride())) else None


# Ops whose result shares its argument's memory, element for element as its strides say.
_VIEWS = frozenset(
    getattr(getattr(torch.ops.aten, op), overload)
    for op, overload in (
        ("alias", "default"),
        ("detach", "default"),
        ("view", "default"),
        ("t", "default"),
        ("transpose", "int"),
        ("permute", "default"),
        ("unsqueeze", "default"),
        ("squeeze", "default"),
        ("squeeze", "dim"),
        ("squeeze", "dims"),
        ("expand", "default"),
        ("slice", "Tensor"),
        ("select", "int"),
    )
)


class _Results:
    """Decides what becomes of each value of the output, sharing memory where PyTorch would."""

    def __init__(
        self,
        interpreter: GraphInterpreter,
        program: GraphProgram,
        finished: list[tuple[Value, Output | TensorArg]],
    ) -> None:
        self.interpreter = interpreter
        self.program = program
        self.finished = finished
        self.places: dict[torch.fx.Node, int] = {}
        # Only beside tensors of the device is a CPU tensor one that stays on the host.
        self.mixed = any(
            isinstance(val := n.meta.get("val"), torch.Tensor) and val.device.type == "tpu"
            for n in interpreter.module.graph.nodes
        )

    def add(self, value: Any, source: Any) -> Result:
        if not isinstance(value, Value):
            return _number(value)
        traced = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
        if self.mixed and isinstance(traced, torch.Tensor) and traced.device.type == "cpu":
            if source in self.interpreter.position:
                return Result("argument", self.interpreter.position[source])
            return replace(self._new(value, source), to_cpu=True)
        root = source
        while root.target in _VIEWS and isinstance(root.args[0], torch.fx.Node):
            root = root.args[0]
        val, base = _value_of(source), _value_of(root)
        position = self.interpreter.position.get(root)
        if position is not None and position in self.interpreter.written:
            return self._new(value, source)
        if position is not None:
            if root is source:
                return Result("argument", position)
            argument = self.interpreter.arguments[position]
            if val is not None and base is not None and isinstance(argument, TensorArg):
                if argument.view == views.SCALAR or argument.strides != tuple(base.stride()):
                    return self._new(value, source)
                offset = int(val.storage_offset()) - int(base.storage_offset())
                return Result("view", position, tuple(val.shape), tuple(val.stride()), offset)
            return self._new(value, source)
        if root is not source and val is not None and base is not None:
            whole = self.interpreter.env[root]
            shared = root in self.places or whole.numel <= value.numel
            if shared and stride_order(base.shape, base.stride()) is not None:
                index = self._new(whole, root).index
                offset = int(val.storage_offset()) - int(base.storage_offset())
                return Result("view_new", index, tuple(val.shape), tuple(val.stride()), offset)
        return self._new(value, source)

    def _new(self, value: Value, source: torch.fx.Node) -> Result:
        if source not in self.places:
            self.places[source] = len(self.finished)
            self.finished.append(new_output(self.interpreter.b, value, _value_of(source)))
        return Result("new", self.places[source])


def _describe_signature(
    program: GraphProgram,
    specs: Sequence[StorageSpec],
    owners: Mapping[int, Sequence[int]],
    first_constant: int,
    n_ints: int,
    n_floats: int,
) -> None:
    for storage in program.parameters:
        spec = specs[storage]
        if storage >= first_constant:
            index = storage - first_constant
            program.arguments.append(Parameter("constant", spec.dims, spec.dtype, (), index))
        else:
            users = tuple(owners.get(storage, ()))
            program.arguments.append(Parameter("input", spec.dims, spec.dtype, users))
    if program.takes_ints:
        count = n_ints + 2 * program.takes_rng
        program.arguments.append(Parameter("ints", (count,), torch.int64))
    if program.takes_floats:
        program.arguments.append(Parameter("floats", (n_floats,), torch.float64))
    program.results = [(o.base, o.base_dtype) for o in program.outputs]
    if program.checks:
        program.results.append(((), torch.int64))
