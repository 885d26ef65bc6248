"""What to estimate: a model with example arguments, and how it is used."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_tpu.aot.capture import Captured, OptimizerFactory, capture
from torch_tpu.aot.chips import Target, resolve
from torch_tpu.aot.compiled import Compiled, Memory, cache_key
from torch_tpu.aot.compiler import DEFAULT_TIMEOUT, HbmExceededError, error_of
from torch_tpu.aot.program import Program, write
from torch_tpu.aot.sharding import Mesh, Rules
from torch_tpu.aot.store import compile_cached
from torch_tpu.aot.topology import TpuCompileError
from torch_tpu.aot.worker import Reply, Request


@dataclass(frozen=True)
class Workload:
    """A call of ``module(*args, **kwargs)``, or a training step of it.

    Arguments are those of :func:`torch_tpu.aot.compile`. A builder, the function that the command
    line calls, returns one.
    """

    module: Callable[..., Any] | nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: bool = False
    loss: Callable[..., torch.Tensor] | None = None
    optimizer: OptimizerFactory | None = None
    autocast: torch.dtype | None = None
    mesh: Mesh | Mapping[str, int] | None = None
    shard: Rules | None = None
    donate: Sequence[int] = ()
    fold_layers: bool = True
    name: str = ""

    def capture(self) -> Captured:
        captured = capture(
            self.module,
            self.args,
            self.kwargs,
            train=self.train,
            loss=self.loss,
            optimizer=self.optimizer,
            autocast=self.autocast,
            donate=self.donate,
            fold_layers=self.fold_layers,
        )
        return replace(captured, name=self.name) if self.name else captured


@dataclass(frozen=True)
class Failure:
    """A target for which there is no program: why, and for HBM how much was missing."""

    name: str
    target: Target
    error: TpuCompileError
    notes: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        return getattr(self.error, "needed", 0)

    @property
    def available(self) -> int:
        return getattr(self.error, "available", 0) or self.target.chip.hbm_bytes

    @property
    def too_large(self) -> bool:
        return isinstance(self.error, HbmExceededError)

    def report(self, top: int = 20) -> dict[str, Any]:
        """JSON-serialisable; ``top`` is for what a program that compiled has more of."""
        return {
            "name": self.name,
            "target": self.target.name,
            "topology": self.target.topology,
            "fits": False if self.too_large else None,
            "error": {"code": self.error.code, "message": str(self.error)},
            "needed": self.needed,
            "available": self.available,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Job:
    """A workload for a target; ``label`` says which variant it is."""

    workload: Workload
    target: Target
    label: str = ""


def mesh_for(target: Target, mesh: Mesh | Mapping[str, int] | None) -> Mesh:
    """The mesh to use on a target. Raises ValueError if it has another number of devices."""
    if mesh is None:
        return Mesh((("fsdp", target.devices),))
    grid = Mesh.of(mesh)
    if grid.size != target.devices:
        raise ValueError(
            f"mesh: {dict(grid.axes)} has {grid.size} devices; {target.name} has {target.devices}"
        )
    return grid


def run(
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], None] | None = None,
) -> list[Compiled | Failure]:
    """Compile every job, several at a time; a failure is a result, not an exception.

    processes  compiler processes; default: half the cores
    timeout    seconds for each program
    progress   called with one line for each thing that is done
    """
    tell = progress or (lambda line: None)
    captured: dict[int, Captured] = {}
    prepared: list[tuple[Captured, Program, Mesh]] = []
    requests: list[Request] = []
    for job in jobs:
        grid = mesh_for(job.target, job.workload.mesh)
        if id(job.workload) not in captured:
            captured[id(job.workload)] = job.workload.capture()
            tell(f"captured {captured[id(job.workload)].name} {job.label}".rstrip())
        graph = captured[id(job.workload)]
        program = write(graph, grid, job.workload.shard)
        prepared.append((graph, program, grid))
        requests.append(Request(program.text, job.target.topology, program.partitions))

    def done(index: int, reply: Reply) -> None:
        job = jobs[index]
        how = "from the cache" if reply.cached else f"in {reply.seconds:.1f} s"
        what = reply.code or how
        tell(f"compiled {job.label or prepared[index][0].name} for {job.target.name} {what}")

    replies = compile_cached(requests, jobs=processes, timeout=timeout, done=done)
    out: list[Compiled | Failure] = []
    for job, (graph, program, grid), reply in zip(jobs, prepared, replies, strict=True):
        error = error_of(reply)
        if error is not None:
            notes = (*graph.notes, *program.notes)
            out.append(Failure(graph.name, job.target, error, notes))
        else:
            out.append(_compiled(graph, program, job.target, grid, reply))
    return out


def _compiled(
    captured: Captured, program: Program, target: Target, mesh: Mesh, reply: Reply
) -> Compiled:
    memory = Memory(
        arguments=reply.memory.get("argument", 0),
        outputs=reply.memory.get("output", 0),
        aliased=reply.memory.get("alias", 0),
        temporaries=reply.memory.get("temp", 0),
        program=reply.memory.get("generated_code", 0),
        available=reply.hbm_bytes or target.chip.hbm_bytes,
        by_role=program.bytes_of,
    )
    return Compiled(
        name=captured.name,
        target=target,
        partitions=program.partitions,
        mesh=dict(mesh.axes) if program.partitions > 1 else {},
        train=captured.train,
        parameters=captured.parameters,
        model_flops=captured.model_flops / program.partitions,
        memory=memory,
        text=program.text,
        hlo=reply.hlo,
        hlo_kind=reply.hlo_kind,
        executable=reply.executable,
        compiler=reply.version,
        compile_seconds=reply.seconds,
        key=cache_key(program.text, target.topology, program.partitions, reply.version),
        notes=[*captured.notes, *program.notes],
    )


# -- builders -----------------------------------------------------------------------------------


def load_builder(reference: str) -> Callable[..., Workload]:
    """The function ``BUILDER`` of "SCRIPT.py:BUILDER" or of "package.module:BUILDER".

    Raises ValueError for a reference of another form, FileNotFoundError for a script that is not
    there, and AttributeError, with the functions there are, for a builder that is not.
    """
    path, colon, name = reference.rpartition(":")
    if not colon or not name:
        raise ValueError(f"builder: got {reference!r}; expected SCRIPT.py:FUNCTION")
    if path.endswith(".py"):
        file = Path(path).resolve()
        if not file.is_file():
            raise FileNotFoundError(f"builder: no file {path}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)
        sys.path.insert(0, str(file.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(file.parent))
    else:
        module = importlib.import_module(path)
    builder = getattr(module, name, None)
    if not callable(builder):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise AttributeError(f"builder: no {name!r} in {path}; it has {', '.join(sorted(names))}")
    return builder


def build(builder: Callable[..., Any], options: Mapping[str, Any]) -> Workload:
    """Call a builder. Raises TypeError for options that it does not take, or another result."""
    parameters = inspect.signature(builder).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not takes_all:
            raise TypeError(
                f"builder: no option {name!r}; expected one of {', '.join(parameters) or 'none'}"
            )
    workload = builder(**options)
    if isinstance(workload, Workload):
        return workload
    if isinstance(workload, tuple) and workload and callable(workload[0]):
        return Workload(workload[0], tuple(workload[1:]))
    raise TypeError(
        f"builder: got {type(workload).__name__}; expected an aot.Workload, or a tuple of a module "
        "and its example arguments"
    )


def largest_batch(
    make: Callable[[int], Workload],
    target: Target,
    *,
    start: int = 1,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], None] | None = None,
) -> tuple[int, Compiled | None, Compiled | Failure | None]:
    """(largest batch that fits, its program, what the next larger multiple of ``start`` gave).

    Doubles until it does not fit, then halves the interval down to ``start``. Raises the error of
    a program that fails for another reason than memory.
    """
    best, program = 0, None
    failed: Compiled | Failure | None = None
    low, high, batch = 0, 0, start
    while True:
        (result,) = run(
            [Job(make(batch), target, f"batch {batch}")], timeout=timeout, progress=progress
        )
        if isinstance(result, Failure) and not result.too_large:
            raise result.error
        if isinstance(result, Compiled) and result.fits:
            low, best, program = batch, batch, result
        else:
            high, failed = batch, result
        if not high:
            batch *= 2
            continue
        middle = (low + high) // 2 // start * start
        if middle in (low, high) or middle == 0:
            return best, program, failed
        batch = middle


def compile(
    fn_or_module: Callable[..., Any] | nn.Module,
    *args: Any,
    target: str | Target = "v6e-1",
    train: bool = False,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerFactory | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    shard: Rules | None = None,
    autocast: torch.dtype | None = None,
    donate: Sequence[int] = (),
    fold_layers: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
    **kwargs: Any,
) -> Compiled:
    """Compile a function, a model or a training step for a TPU that need not be there.

    args, kwargs   example arguments of the call; tensors and parameters may be real, ``meta`` or
                   fake, only shapes and dtypes are looked at: an 8B model needs no memory
    target         a slice ("v6e-8", "tpu7x-64") or a topology ("v6e:2x4"); see ``aot.target_names``
    train          one program with forward, backward and ``optimizer``'s update (AdamW by default)
    loss           for ``train``: from the module's output, or output and arguments, to a scalar
    mesh           axes of devices, {"fsdp": 64, "tensor": 4}: one SPMD program over all of them.
                   Default for a target with several devices: {"fsdp": devices}
    shard          rules for how inputs are divided: {"*.q_proj.weight": ("tensor", "fsdp")}, or a
                   function of name and shape; see torch_tpu.aot.sharding
    autocast       dtype of ``torch.autocast`` around the forward pass
    donate         positions of tensor arguments whose memory results of the same shape may take
    fold_layers    trace a stack of equal layers once and run it as a loop; in training their
                   activations are then computed again in the backward pass
    timeout        seconds for the compiler

    The precision of float32 matmuls is that of ``torch.tpu.precision`` and
    ``torch.set_float32_matmul_precision`` at the time of the call.

    Raises CompilerNotFoundError without libtpu, HbmExceededError for a program that does not fit,
    TpuCompileError for one that the compiler refuses, ValueError for a wrong target, mesh or rule.
    """
    workload = Workload(
        module=fn_or_module,
        args=args,
        kwargs=kwargs,
        train=train,
        loss=loss,
        optimizer=optimizer,
        autocast=autocast,
        mesh=mesh,
        shard=shard,
        donate=donate,
        fold_layers=fold_layers,
    )
    (result,) = run([Job(workload, resolve(target))], timeout=timeout)
    if isinstance(result, Failure):
        raise result.error
    return result
