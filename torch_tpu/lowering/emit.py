"""From one ATen call on typed values to StableHLO: promotion, broadcasting, checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_tpu.lowering import registry
from torch_tpu.lowering.builder import Builder
from torch_tpu.lowering.decompose import trace_decomposition
from torch_tpu.lowering.meta import call_on_meta
from torch_tpu.lowering.types import LoweringError, Value, element_type, opmath_dtype
from torch_tpu.lowering.variants import functional_variant, written_arguments

Spec = tuple[tuple[int, ...], torch.dtype]

# Arguments that say where and how a result is stored; the caller of a program decides that.
_PLACEMENT = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "generator", "non_blocking"}
)


class OpBuilder(Builder):
    """The builder a lowering sees: ``result`` holds what PyTorch's meta kernel says comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Spec] = []

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return self.results[0][0]

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the (first) result."""
        return self.results[0][1]

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Emit another ATen op by name ("aten.softplus.default") on values; for composition."""
        (overload,) = registry.resolve(name)
        return emit_op(self, overload, args, kwargs)


def meta_tensor(value: Value) -> torch.Tensor:
    """A meta tensor of this value's shape and dtype; a weak value stands for a wrapped number."""
    if value.weak:
        return wrapped_number(value.dtype)
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def wrapped_number(dtype: torch.dtype) -> torch.Tensor:
    """What PyTorch makes of a Python number given for a tensor: 0-d, on the CPU, weak."""
    from torch_tpu import _C

    tensor = torch.tensor(representative(dtype), dtype=dtype)
    _C.set_wrapped_number(tensor)
    return tensor


def _is_scalar(argument: Any) -> bool:
    kind = str(argument.type)
    return kind in ("number", "Scalar", "Optional[number]", "Optional[Scalar]")


def bind(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All schema arguments in order, defaults filled in; TypeError if one is missing."""
    values = []
    for i, argument in enumerate(overload._schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            values.append(args[i])
        elif argument.name in kwargs:
            values.append(kwargs[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
        else:
            raise TypeError(f"{overload}: missing argument {argument.name}")
    return values


def unbind_arguments(overload: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The inverse of :func:`bind`: positional and keyword-only arguments."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(overload._schema.arguments, values, strict=True):
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def infer_results(overload: Any, values: Sequence[Any]) -> Any:
    """Run PyTorch's meta kernel on the values' shapes; returns meta tensors as the op would."""

    def to_meta(x: Any, argument: Any) -> Any:
        if isinstance(x, Value):
            if (
                x.weak
                and not str(argument.type).endswith("Tensor]")
                and "Tensor" not in str(argument.type)
            ):
                return representative(x.dtype)
            return meta_tensor(x)
        if isinstance(x, (list, tuple)):
            return type(x)(to_meta(v, argument) for v in x)
        if argument.name == "device" and x is not None:
            return torch.device("meta")
        return x

    schema = overload._schema.arguments
    metas = [to_meta(v, a) for v, a in zip(values, schema, strict=True)]
    args, kwargs = unbind_arguments(overload, metas)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    for name in ("pin_memory", "generator"):
        if name in kwargs:
            kwargs[name] = None
    try:
        return call_on_meta(overload, args, kwargs)
    except NotImplementedError:
        raise
    except Exception:
        # Some shape functions stumble over meta tensors only: index_add's over empty ones.
        return overload(*args, **kwargs)


def representative(dtype: torch.dtype) -> int | float | bool | complex:
    """A number of the Python type that stands for an operand whose value is not known."""
    if dtype is torch.bool:
        return True
    if dtype.is_complex:
        return 1.5 + 0.5j
    return 0.5 if dtype.is_floating_point else 2


def specs_of(results: Any) -> list[Spec]:
    """Shapes and dtypes of the tensors in an op's results, in order."""
    leaves = pytree.tree_leaves(results)
    return [(tuple(t.shape), t.dtype) for t in leaves if isinstance(t, torch.Tensor)]


def expected_specs(overload: Any, values: Sequence[Any]) -> list[Spec]:
    """The specs a lowering of ``overload`` has to deliver for these bound arguments.

    A mutating overload that is lowered as such delivers its written arguments; else a lowering's
    own ``specs`` rule is asked, then PyTorch's meta kernel.
    """
    lowering = registry.find(overload)
    if lowering is not None and lowering.specs is not None:
        return [spec for spec in lowering.specs(*values) if spec is not None]
    written = written_arguments(overload)
    if written and not any(overload._schema.arguments[i].is_out for i in written):
        leaves = pytree.tree_leaves(
            [values[i] for i in written], is_leaf=lambda x: isinstance(x, Value)
        )
        return [(v.shape, v.dtype) for v in leaves if isinstance(v, Value)]
    return specs_of(infer_results(overload, values))


def absent_results(overload: Any, values: Sequence[Any]) -> frozenset[int]:
    """Positions of results that a lowering's ``specs`` rule says are undefined tensors."""
    lowering = registry.find(overload)
    if lowering is None or lowering.specs is None:
        return frozenset()
    return frozenset(i for i, spec in enumerate(lowering.specs(*values)) if spec is None)


def emit_op(
    b: OpBuilder,
    overload: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    results: list[Spec] | None = None,
) -> Any:
    """Emit one functional ATen call on values; returns a Value or a list of Values.

    ``results`` are the expected specs when the caller knows them; else the meta kernel is asked.
    Raises NotImplementedError when the op has neither a lowering nor a decomposition, and
    LoweringError when a lowering's result disagrees with PyTorch's rules.
    """
    values = bind(overload, args, kwargs or {})
    lowering = registry.find(overload)
    if lowering is None:
        variant = functional_variant(overload)
        if variant is not None and registry.find(variant.functional) is not None:
            # Inside a program a mutation that nobody else sees is its functional form.
            picked = [values[i] if i >= 0 else None for i in variant.arguments]
            a, k = unbind_arguments(variant.functional, picked)
            return emit_op(b, variant.functional, a, k)
        return emit_decomposed(b, overload, values)
    if results is None:
        results = expected_specs(overload, values)
    for _, dtype in results:
        element_type(dtype)  # NotImplementedError before the lowering stumbles over it
    if results and all(0 in shape for shape, _ in results):
        empties = [b.constant(0, dtype, shape) for shape, dtype in results]
        return _structure(overload, empties)
    return _structure(overload, _run(b, lowering, overload, values, results))


def _structure(overload: Any, values: list[Value]) -> Any:
    returns = overload._schema.returns
    if (
        len(values) == 1
        and len(returns) == 1
        and "List" not in str(returns[0].type)
        and "[]" not in str(returns[0].type)
    ):
        return values[0]
    return values


def _run(
    b: OpBuilder, lowering: registry.Lowering, overload: Any, values: list[Any], results: list[Spec]
) -> list[Value]:
    schema = overload._schema.arguments
    prepared = _prepare(b, lowering, schema, values, results)
    if lowering.mutates:
        written = [v for a, v in zip(schema, values, strict=True) if a.name in lowering.mutates]
        results = [*results, *((v.shape, v.dtype) for v in written if isinstance(v, Value))]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(schema, prepared, strict=True):
        if argument.name in _PLACEMENT:
            continue
        if argument.kwarg_only:
            if argument.name in lowering.parameters:
                kwargs[argument.name] = value
            elif argument.name != "dtype" and value is not None and value != argument.default_value:
                raise LoweringError(
                    f"{overload}: the lowering does not take {argument.name}={value}"
                )
        else:
            args.append(value)
    saved, b.results = b.results, results
    try:
        raw = lowering.fn(b, *args, **kwargs)
    finally:
        b.results = saved
    outs = [raw] if isinstance(raw, Value) else list(raw)
    if len(outs) != len(results):
        raise LoweringError(f"{overload}: {len(outs)} results; expected {len(results)}")
    checked = []
    for i, (out, (shape, dtype)) in enumerate(zip(outs, results, strict=True)):
        if out.dtype is not dtype and lowering.promote != "none":
            out = b.convert(out, dtype)
        if (
            lowering.lift_0d
            and out.shape != shape
            and out.shape in ((1,), ())
            and shape in ((1,), ())
        ):
            out = b.reshape(out, shape)
        if out.shape != shape or out.dtype is not dtype:
            raise LoweringError(
                f"{overload}: result {i} is {out.dtype} {out.shape}; PyTorch says {dtype} {shape}"
            )
        checked.append(b.convert(out, dtype) if out.weak else out)
    return checked


def _prepare(
    b: OpBuilder, lowering: registry.Lowering, schema: Any, values: list[Any], results: list[Spec]
) -> list[Any]:
    """Apply the declared promotion, broadcasting and 0-d lifting to the arguments."""
    if lowering.promote == "none" and not lowering.lift_0d:
        return values
    dtype: torch.dtype | None = None
    if lowering.promote == "result":
        dtype = results[0][1]
    elif lowering.promote == "operands":
        dtype = _common_dtype(lowering, schema, values)
    if dtype is not None and lowering.opmath:
        dtype = opmath_dtype(dtype)
    shape = results[0][0] if lowering.broadcast else None

    def prepare(x: Any, argument: Any) -> Any:
        if isinstance(x, (list, tuple)) and any(isinstance(v, Value) for v in x):
            return [prepare(v, argument) for v in x]
        if not isinstance(x, Value):
            return x
        kept = argument.name in lowering.keep
        if dtype is not None and not kept:
            x = b.convert(x, dtype)
        if "Tensor" in str(argument.type):
            if shape is not None:
                x = b.broadcast_to(x, shape)
            elif lowering.lift_0d and x.rank == 0:
                x = b.reshape(x, (1,))
        return x

    return [prepare(v, a) for v, a in zip(values, schema, strict=True)]


def _common_dtype(lowering: registry.Lowering, schema: Any, values: list[Any]) -> torch.dtype:
    """``torch.result_type`` over all promoted operands."""
    operands: list[Any] = []
    for argument, value in zip(schema, values, strict=True):
        if argument.name in lowering.keep:
            continue
        if isinstance(value, Value):
            if value.weak and "Tensor" not in str(argument.type):
                operands.append(representative(value.dtype))
            else:
                operands.append(meta_tensor(value))
        elif (_is_scalar(argument) and value is not None) or (
            isinstance(value, (int, float, complex)) and "Tensor" in str(argument.type)
        ):
            operands.append(value)
    dtype: torch.dtype | None = None
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    for o in operands:
        dtype = torch.result_type(tensors[0], o) if dtype is None else dtype
    # result_type is defined on pairs with dimension categories; fold through meta arithmetic.
    acc = tensors[0]
    for o in operands:
        if o is acc:
            continue
        # Of the shapes only the rank counts; torch.broadcast_shapes would import sympy.
        rank = max(acc.dim(), o.dim() if isinstance(o, torch.Tensor) else 0)
        acc = torch.empty((1,) * rank, dtype=torch.result_type(acc, o), device="meta")
    return acc.dtype if len(operands) > 1 else tensors[0].dtype


def emit_decomposed(b: OpBuilder, overload: Any, values: list[Any]) -> Any:
    """Emit an op through PyTorch's own decomposition, inside the same program."""
    graph_module, inputs = trace_decomposition(overload, _strengthen(b, values))
    return emit_graph(b, graph_module, inputs)


def _strengthen(b: OpBuilder, values: list[Any]) -> list[Any]:
    """Weak values as ordinary 0-d tensors of the dtype they would promote to.

    A trace cannot carry wrapped numbers: Python dispatch turns them into constants.
    """
    leaves = pytree.tree_leaves(values, is_leaf=lambda x: isinstance(x, Value))
    strong = [v for v in leaves if isinstance(v, Value) and not v.weak]

    def convert(x: Any) -> Any:
        if not isinstance(x, Value) or not x.weak:
            return x
        dtype = x.dtype if not strong else torch.result_type(meta_tensor(strong[0]), meta_tensor(x))
        return b.convert(x, dtype)

    return pytree.tree_map(convert, values, is_leaf=lambda x: isinstance(x, Value))


def emit_graph(b: OpBuilder, module: torch.fx.GraphModule, inputs: Sequence[Value]) -> Any:
    """Emit an FX graph of ATen calls; ``inputs`` are its placeholders' values."""
    from torch_tpu.lowering.interpreter import Interpreter  # it emits ops through this module

    return Interpreter(b, module).run(inputs)
