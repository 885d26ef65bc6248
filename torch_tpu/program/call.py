"""One ATen call → one program. Entered by the native core on a cache miss, with the GIL.

The core describes the call's arguments; :func:`compile_call` answers with a :class:`Plan`:
StableHLO text, which storages and operand packs it takes, and what becomes of each result.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from torch_tpu.lowering import emit, registry, views
from torch_tpu.lowering.argument_checks import ARGUMENT_CHECKS
from torch_tpu.lowering.meta import call_on_meta, empty_on_cpu, is_structured
from torch_tpu.lowering.types import LoweringError, UnsupportedDtypeError, Value, scalar_type
from torch_tpu.lowering.variants import Variant, functional_variant, written_arguments
from torch_tpu.program import options as program_options
from torch_tpu.program.bounded import policy
from torch_tpu.program.bounded.description import Call
from torch_tpu.program.cpu_errors import (
    check_dtypes,
    check_result_dtypes,
    error_of_cpu,
    map_arguments,
)
from torch_tpu.program.describe import describe
from torch_tpu.program.emitter import CallEmitter, finish, new_output
from torch_tpu.program.fallback import announce_fallback
from torch_tpu.program.plan import Output, Plan, Return, ScalarArg, StorageSpec, TensorArg
from torch_tpu.program.recompiles import report_compile


@cache
def find_overload(name: str) -> Any:
    """The OpOverload of "namespace::op.overload"."""
    namespace, rest = name.split("::")
    op, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


def number_slots(args: Any, ints: int, floats: int) -> tuple[Any, int, int]:
    """Give every ScalarArg its slot, counting as the native core does."""
    if isinstance(args, TensorArg):
        if args.view == views.SCALAR:
            if args.dtype.is_complex:
                return args, ints, floats + 2
            if args.dtype.is_floating_point:
                return args, ints, floats + 1
            return args, ints + 1, floats
        return args, ints + args.count, floats
    if isinstance(args, ScalarArg):
        if args.kind == "complex":
            return ScalarArg(args.kind, floats, args.value), ints, floats + 2
        if args.kind == "float":
            return ScalarArg(args.kind, floats, args.value), ints, floats + 1
        return ScalarArg(args.kind, ints, args.value), ints + 1, floats
    if isinstance(args, list):
        out = []
        for a in args:
            a, ints, floats = number_slots(a, ints, floats)
            out.append(a)
        return out, ints, floats
    return args, ints, floats


def compile_call(
    name: str,
    args: list[Any],
    storages: list[StorageSpec],
    device: int,
    n_ints: int,
    n_floats: int,
) -> Plan | None:
    """Plan the program of one call; None asks the core to run the op on the CPU.

    Raises what PyTorch raises for wrong shapes and dtypes, and NotImplementedError for an op that
    has neither a lowering nor a decomposition when the CPU fallback is off.
    """
    overload = find_overload(name)
    args, _, _ = number_slots(args, 0, 0)
    check_call(name, args)
    check_dtypes(overload, args)
    written = written_arguments(overload)
    check_overlap(overload, args, written)
    names = [a.name for a in overload._schema.arguments]

    def lower(call: Call) -> Plan:
        return _plan(overload, call.args, call.storages, written, n_ints, n_floats)

    try:
        bounded = policy.bounded_plan(name, args, storages, n_ints, lower)
        if bounded is not None:
            if bounded.report is not None:
                report_compile(name, describe(names, args, storages) | bounded.report, exact=False)
            return bounded.plan
        plan = lower(Call(args, storages))
    except Refused as refused:
        raise refused.error from None
    except NotImplementedError as error:
        if isinstance(error, UnsupportedDtypeError):
            on_cpu = error_of_cpu(overload, args, unimplemented=True)
            if on_cpu is not None:
                raise on_cpu from None
        announce_fallback(name, error)
        return None
    if plan.text:
        report_compile(name, describe(names, args, storages))
    return plan


def has_check(name: str) -> bool:
    """Whether the values of this op's arguments are checked (by Python, when they are new)."""
    return registry.overload_name(find_overload(name)) in ARGUMENT_CHECKS


def check_call(name: str, args: list[Any]) -> None:
    """Raise what PyTorch's CPU kernel raises for these argument values."""
    check = ARGUMENT_CHECKS.get(registry.overload_name(find_overload(name)))
    if check is not None:

        def known(arg: TensorArg | ScalarArg) -> Any:
            return arg.meta() if isinstance(arg, TensorArg) else arg.value

        check(*[map_arguments(a, known) for a in args])


def check_overlap(overload: Any, args: Sequence[Any], written: Sequence[int]) -> None:
    """Refuse to write through a view whose elements share memory, as PyTorch does."""
    for i in written:
        for arg in args[i] if isinstance(args[i], list) else [args[i]]:
            if isinstance(arg, TensorArg) and any(
                n > 1 and s == 0 for n, s in zip(arg.sizes, arg.strides, strict=True)
            ):
                raise RuntimeError(
                    "unsupported operation: more than one element of the written-to tensor refers "
                    "to a single memory location. Please clone() the tensor before performing the "
                    "operation."
                )


class Refused(Exception):
    """A NotImplementedError that PyTorch raises for the call on every device."""

    def __init__(self, error: NotImplementedError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_tangents() -> Iterator[None]:
    """Python knows of no forward-mode AD meanwhile; tangents are taken care of above this kernel.

    Some of PyTorch's Python meta kernels print tensors (to try the next overload), which takes
    tangents apart, and that is an internal error below autograd.
    """
    level = forward_ad._current_level
    if level < 0:
        yield
        return
    forward_ad._current_level = -1
    try:
        yield
    finally:
        forward_ad._current_level = level


def _run_meta(overload: Any, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """PyTorch's meta kernel on this call; returns its results and the meta arguments.

    Results are None where PyTorch has no meta kernel.
    """

    def to_meta(arg: TensorArg | ScalarArg) -> Any:
        return arg.meta() if isinstance(arg, TensorArg) else arg.value

    metas = [map_arguments(a, to_meta) for a in args]
    for i, argument in enumerate(overload._schema.arguments):
        if argument.name == "device" and metas[i] is not None:
            metas[i] = torch.device("meta")
        elif argument.name == "pin_memory":
            metas[i] = None
    positional, keywords = emit.unbind_arguments(overload, metas)
    if "device" in keywords:
        keywords["device"] = torch.device("meta")
    # Resizing an out= argument warns; the core does it again, for real.
    has_out = any(a.is_out for a in overload._schema.arguments)
    with _quiet() if has_out else nullcontext(), torch.no_grad(), _without_tangents():
        try:
            return call_on_meta(overload, positional, keywords), metas
        except Exception as error:
            if isinstance(error, NotImplementedError):
                if is_structured(overload):  # the rule of every device
                    raise Refused(error) from None
                return None, metas
            on_cpu = error_of_cpu(overload, args)
            if on_cpu is not None:
                raise on_cpu from None
            # A rule of PyTorch's own that fails on absent tensors, or refuses what only CUDA
            # refuses: the lowering's own rule holds, where it has one.
            lowering = registry.find(overload)
            if lowering is not None and lowering.specs is not None:
                return None, metas
            if is_structured(overload):
                # Some shape functions stumble over meta tensors only: index_add's over empty ones.
                return overload(*positional, **keywords), metas
            raise error


def _plan(
    overload: Any,
    args: list[Any],
    storages: list[StorageSpec],
    written: tuple[int, ...],
    n_ints: int,
    n_floats: int,
) -> Plan:
    schema = overload._schema
    results, metas = _run_meta(overload, args)
    plan = Plan()
    for i in written:
        if schema.arguments[i].is_out and isinstance(args[i], TensorArg):
            shape = tuple(metas[i].shape)
            if results is not None and shape != args[i].sizes:
                plan.resizes.append((args[i].index, shape))
    if plan.resizes:
        return plan

    b = CallEmitter(storages, n_ints, n_floats)
    b.matmul_precision = program_options.matmul_precision()
    b.emulate_precision = program_options.emulate_precision()
    b.target = program_options.target()
    lowering = registry.find(overload)
    variant = functional_variant(overload) if written and lowering is None else None
    targets: list[TensorArg] = []
    results_given: set[int] = set()  # ids of out= arguments
    # A functional form returns what is new first, then what it would have written.
    written = tuple(sorted(written, key=lambda i: not schema.arguments[i].is_out))
    for i in written:
        given = args[i] if isinstance(args[i], list) else [args[i]]
        targets += given
        if schema.arguments[i].is_out:
            results_given |= {id(t) for t in given}

    values = [map_arguments(a, b.value) for a in args]
    ruled = results is not None and not written and lowering is not None and lowering.specs
    if ruled and emit.expected_specs(overload, values) != emit.specs_of(results):
        # Where PyTorch's meta kernel differs from its CPU kernel, the lowering's own rule holds.
        results = None
    written_values = [values[i] for i in written]
    if variant is not None:
        outs = _emit_variant(b, variant, values, targets)
    elif written:
        # Only the mutating form exists: its lowering returns the new values of what it writes.
        specs: list[emit.Spec] | None = [(t.sizes, t.dtype) for t in targets]
        outs = emit.emit_op(b, overload, *emit.unbind_arguments(overload, values), results=specs)
    else:
        specs = emit.specs_of(results) if results is not None else None
        outs = emit.emit_op(b, overload, *emit.unbind_arguments(overload, values), results=specs)
    outs = _flatten(outs)

    mutated = _undeclared_mutations(lowering, schema, args)
    finished: list[tuple[Value, Output | TensorArg]] = []
    # New results come first, then the new values of what is written.
    fresh: list[torch.Tensor | None]
    if results is None:
        fresh = [None] * (len(outs) - len(targets) - len(mutated))
    else:
        fresh = list(_new_results(schema, results))
    for i in empty_on_cpu(overload, args):
        outs[i] = b.constant(0, outs[0].dtype, (0,))
        fresh[i] = torch.empty(0, dtype=outs[0].dtype, device="meta")
    for value, meta in zip(outs, fresh, strict=False):
        finished.append(new_output(b, value, meta))
    if results_given and any(
        t.dtype is not v.dtype for t, v in zip(targets, outs[len(fresh) :], strict=False)
    ):
        check_result_dtypes(overload, args)
    for target, value in zip(targets, outs[len(fresh) :], strict=False):
        if id(target) in results_given and value.shape != target.sizes:
            plan.resizes.append((target.index, value.shape))
    if plan.resizes:  # PyTorch's own rule has not said so; an out= argument never broadcasts
        return Plan(resizes=plan.resizes)
    unchanged = {id(t): v for t, v in zip(targets, _flatten(written_values), strict=True)}
    for target, value in zip([*targets, *mutated], outs[len(fresh) :], strict=False):
        if value is not unchanged.get(id(target)):
            finished.append((_fit(b, overload, value, target), target))
    finish(plan, b, storages, finished)
    absent = emit.absent_results(overload, values) if results is None else frozenset()
    plan.returns = _returns(overload, results, written, len(fresh), absent)
    return plan


def _emit_variant(
    b: CallEmitter, variant: Variant, values: list[Any], targets: Sequence[TensorArg]
) -> Any:
    picked = []
    for position, argument in zip(
        variant.arguments, variant.functional._schema.arguments, strict=True
    ):
        value = values[position] if position >= 0 else argument.default_value
        if argument.name == "dtype" and value is None and len(targets) == 1:
            value = targets[0].dtype  # PyTorch computes in the dtype of an out= argument
        picked.append(value)
    positional, keywords = emit.unbind_arguments(variant.functional, picked)
    return emit.emit_op(b, variant.functional, positional, keywords)


def _undeclared_mutations(lowering: Any, schema: Any, args: list[Any]) -> list[TensorArg]:
    """Arguments that the op writes although its schema does not say so (running statistics)."""
    if lowering is None or not lowering.mutates:
        return []
    by_name = {a.name: args[i] for i, a in enumerate(schema.arguments)}
    return [by_name[n] for n in lowering.mutates if isinstance(by_name.get(n), TensorArg)]


def _new_results(schema: Any, results: Any) -> list[torch.Tensor]:
    """The tensors among an op's meta results that are not arguments it has written."""
    items = results if len(schema.returns) > 1 else [results]
    out: list[torch.Tensor] = []
    for r, item in zip(schema.returns, items, strict=False):
        if r.alias_info is None:
            out += [t for t in _flatten(item) if t is not None]
    return out


def _flatten(value: Any) -> list[Any]:
    if value is None or isinstance(value, (Value, torch.Tensor)):
        return [value]
    return [leaf for item in value for leaf in _flatten(item)]


def _fit(b: CallEmitter, overload: Any, value: Value, target: TensorArg) -> Value:
    """A written value in its target's dtype and shape."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {scalar_type(value.dtype)} can't be cast to the desired output type "
            f"{scalar_type(target.dtype)}"
        )
    value = b.convert(value, target.dtype)
    if value.shape != target.sizes:
        try:
            return b.broadcast_to(value, target.sizes)
        except LoweringError:
            raise RuntimeError(
                f"output with shape {list(target.sizes)} doesn't match the broadcast shape "
                f"{list(value.shape)}"
            ) from None
    return value


def _returns(
    overload: Any,
    results: Any,
    written: tuple[int, ...],
    n_new: int,
    absent: frozenset[int] = frozenset(),
) -> list[Return]:
    """What the op returns; ``n_new`` tensors are new, all of them a list if nothing else tells.

    ``absent`` results are undefined tensors; it is asked where PyTorch has no meta kernel.
    """
    schema = overload._schema
    by_alias = {frozenset(schema.arguments[i].alias_info.before_set): i for i in written}
    returns: list[Return] = []
    position = 0
    items = results if isinstance(results, (tuple, list)) and len(schema.returns) > 1 else [results]
    if results is None:
        lists = [r for r in schema.returns if str(r.type).startswith("List")]
        if lists and len(schema.returns) > 1:
            raise NotImplementedError(f"{overload}: no meta kernel to tell its lists apart")
        count = len(schema.returns)
        items = [None if i in absent else Ellipsis for i in range(count)]
        items = [[Ellipsis] * n_new] if lists else items
    for r, item in zip(schema.returns, items, strict=True):
        if r.alias_info is not None:
            returns.append(Return("argument", by_alias[frozenset(r.alias_info.before_set)]))
        elif isinstance(item, (list, tuple)):
            returns.append(Return("list", 0, tuple(range(position, position + len(item)))))
            position += len(item)
        elif item is None:
            returns.append(Return("none"))
        else:
            returns.append(Return("new", position))
            position += 1
    return returns
