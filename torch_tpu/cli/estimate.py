"""``python -m torch_tpu estimate``: what the TPU compiler makes of a model, as a table or page."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tpu.aot import Compiled, Failure

GIB = 2**30


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="compile a model for a TPU that is not here: does it fit, how long does a step take",
        description="BUILDER is a function in SCRIPT.py that returns an aot.Workload, or a tuple "
        "of a module and its example arguments. Its parameters can be set with --batch, --seq and "
        "--set, and swept over with --sweep.",
    )
    parser.add_argument("builder", metavar="SCRIPT.py:BUILDER")
    parser.add_argument(
        "--target", default="v6e-1", help="v6e-8, tpu7x-64, v5e:2x4 … (%(default)s)"
    )
    parser.add_argument("--batch", type=int, help="the builder's option batch")
    parser.add_argument("--seq", type=int, help="the builder's option seq")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another option of it"
    )
    parser.add_argument("--mesh", help="axes of the devices, such as fsdp=16,tensor=4")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=A,B,C",
        help="compare values of target, mesh (separated by ;) or an option; may be repeated",
    )
    parser.add_argument("--max-batch", action="store_true", help="find the largest batch that fits")
    parser.add_argument("--top", type=int, default=12, help="rows of the detailed tables")
    parser.add_argument("--jobs", type=int, help="compiler processes (half the cores)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each program")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--save", metavar="FILE", help="write the compiled program")


def run(options: argparse.Namespace) -> int:
    """Exit code: 0 if every program compiled and fits, 1 if one does not, 2 for wrong use."""
    from torch_tpu import aot

    try:
        return _run(options)
    except (ValueError, TypeError, AttributeError, FileNotFoundError) as error:
        print(f"estimate: {error}", file=sys.stderr)
    except (aot.CompilerNotFoundError, aot.TpuCompileError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 1
    return 2


def _run(options: argparse.Namespace) -> int:
    from torch_tpu.aot import resolve
    from torch_tpu.aot.workload import Job, Workload, build, largest_batch, load_builder
    from torch_tpu.aot.workload import run as run_jobs

    builder = load_builder(options.builder)
    given = {name: value(text) for name, text in map(_pair, options.set)}
    for name in ("batch", "seq"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.max_batch:
        target = resolve(options.target)
        mesh = _mesh(options.mesh)

        def make(batch: int) -> Workload:
            return _with_mesh(build(builder, {**given, "batch": batch}), mesh)

        start = given.get("batch") or target.devices
        best, program, failed = largest_batch(
            make, target, start=start, timeout=options.timeout, progress=tell
        )
        results = [r for r in (program, failed) if r is not None]
        if options.json:
            print(json.dumps({"max_batch": best, "results": [r.report() for r in results]}))
        else:
            print(f"largest batch that fits on {target.name}: {best or 'none'}")
            _show(results[:1], [""], options.top)
        return 0 if best else 1

    axes = [_axis(text) for text in options.sweep]
    jobs: list[Job] = []
    built: dict[str, Workload] = {}
    for values in itertools.product(*(values for _, values in axes)):
        chosen = dict(zip((name for name, _ in axes), values, strict=True))
        label = " ".join(f"{k}={v}" for k, v in chosen.items())
        target = resolve(str(chosen.pop("target", options.target)))
        mesh = _mesh(chosen.pop("mesh", options.mesh))
        arguments = {**given, **{k: value(v) for k, v in chosen.items()}}
        key = json.dumps([arguments, mesh], sort_keys=True, default=str)
        if key not in built:
            built[key] = _with_mesh(build(builder, arguments), mesh)
        jobs.append(Job(built[key], target, label))
    results = run_jobs(jobs, processes=options.jobs, timeout=options.timeout, progress=tell)
    labels = [job.label for job in jobs]
    if options.json:
        reports = [r.report(options.top) for r in results]
        print(json.dumps(reports if axes else reports[0], indent=2))
    else:
        _show(results, labels, options.top)
    if options.html:
        from torch_tpu.aot.page import write_page

        write_page(options.html, results, labels)
        tell(f"wrote {options.html}")
    if options.save:
        if len(results) != 1 or not hasattr(results[0], "save"):
            raise ValueError("--save: expected exactly one program that compiled")
        results[0].save(options.save)
        tell(f"wrote {options.save}")
    return 0 if all(getattr(r, "fits", False) for r in results) else 1


def value(text: str) -> Any:
    """A number where the text is one, True/False, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals or not name:
        raise ValueError(f"got {text!r}; expected NAME=VALUE")
    return name, rest


def _axis(text: str) -> tuple[str, list[str]]:
    name, rest = _pair(text)
    values = rest.split(";" if name == "mesh" else ",")
    if not all(values):
        raise ValueError(f"--sweep {text}: expected NAME=A,B,C")
    return name, values


def _mesh(text: str | None) -> dict[str, int] | None:
    if not text:
        return None
    mesh = {}
    for part in text.split(","):
        name, size = _pair(part)
        if not size.isdigit():
            raise ValueError(f"--mesh {text}: size {size!r} of axis {name}; expected a number")
        mesh[name] = int(size)
    return mesh


def _with_mesh(workload: Any, mesh: dict[str, int] | None) -> Any:
    from dataclasses import replace

    return replace(workload, mesh=mesh) if mesh is not None else workload


# -- tables -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """With a unit that keeps three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"


def size(nbytes: float) -> str:
    """In GiB, MiB or KiB."""
    for unit, base in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= base:
            return f"{nbytes / base:.2f} {unit}"
    return f"{nbytes:.0f} B"


def flops(number: float) -> str:
    for unit, base in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if number >= base:
            return f"{number / base:.3g} {unit}"
    return f"{number:.0f} FLOP"


def _show(results: Sequence[Compiled | Failure], labels: Sequence[str], top: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    if len(results) > 1:
        console.print(_comparison(results, labels))
        return
    for result in results:
        if not hasattr(result, "cost"):
            console.print(_failure(result))
            for line in result.notes:
                console.print(f"note    {line}", markup=False)
            continue
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        for label, text in summary(result):
            grid.add_row(label, text)
        console.print(grid)
        console.print(_expensive(result, top))
        if result.cost.collectives():
            console.print(_collectives(result, top))
        for line in result.notes:
            console.print(f"note    {line}", markup=False)
        for line in result.advice():
            console.print(f"advice  {line}", markup=False)
        console.print(
            "Estimates: the compiler's own cycle counts and published bandwidths. Nothing was run.",
            style="dim",
        )


def summary(result: Compiled) -> list[tuple[str, str]]:
    """Label and text of the figures that say most."""
    memory, cost, chip = result.memory, result.cost, result.target.chip
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    roles = ", ".join(f"{name} {size(n)}" for name, n in memory.by_role.items())
    mesh = ", ".join(f"{name} {n}" for name, n in result.mesh.items())
    kinds = ", ".join(
        f"{kind} {duration(s)}"
        for kind, s in sorted(cost.seconds_of.items(), key=lambda x: -x[1])
        if s
    )
    low, high = result.mfu_range
    kind = "training step" if result.train else "call"
    return [
        ("program", f"{result.name}, {kind}, {result.parameters / 1e6:,.1f} M parameters"),
        (
            "target",
            f"{result.target.name}: {result.partitions} of {result.target.devices} devices"
            f" ({chip.title}{', ' + mesh if mesh else ''})",
        ),
        (
            "HBM",
            f"{verdict}: {size(memory.total)} of {size(memory.available)} a device"
            f" ({size(abs(memory.headroom))} {'free' if memory.fits else 'too much'})",
        ),
        (
            "",
            f"arguments {size(memory.arguments)} ({roles}), outputs {size(memory.outputs)} of "
            f"which donated {size(memory.aliased)}, temporaries {size(memory.temporaries)}, "
            f"program {size(memory.program)}",
        ),
        (
            "time",
            f"core {duration(cost.core_seconds)}; step {duration(cost.low_seconds)} (all "
            f"overlapped) to {duration(cost.high_seconds)} (nothing overlapped)",
        ),
        ("", kinds),
        (
            "model FLOPs",
            f"{flops(result.model_flops)} a device; executed {flops(cost.flops)}, "
            f"{size(cost.bytes)} HBM traffic, {cost.intensity:.0f} FLOP/byte",
        ),
        ("MFU", f"{result.mfu:.1%} of the core's time; {low:.1%} to {high:.1%} of the step"),
        ("bound by", result.bound),
        ("compiled", f"in {duration(result.compile_seconds)} by {result.compiler.splitlines()[0]}"),
    ]


def _failure(result: Failure) -> str:
    if result.too_large:
        missing = result.needed - result.available
        by = f" by {size(missing)}" if result.needed else ""
        return (
            f"{result.name} DOES NOT FIT on {result.target.name}{by}: needs {size(result.needed)}, "
            f"a device has {size(result.available)}"
        )
    return f"{result.name} for {result.target.name}: {result.error.code}: {result.error}"


def _comparison(results: Sequence[Compiled | Failure], labels: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table("variant", "target", "HBM a device", "fits", "core", "step", "MFU", "bound")
    for result, label in zip(results, labels, strict=True):
        if not hasattr(result, "cost"):
            needed = size(result.needed) if result.needed else "?"
            word = "no" if result.too_large else result.error.code
            table.add_row(label, result.target.name, needed, word, "", "", "", "")
            continue
        cost = result.cost
        table.add_row(
            label,
            result.target.name,
            size(result.memory.total),
            "yes" if result.fits else "no",
            duration(cost.core_seconds),
            f"{duration(cost.low_seconds)} – {duration(cost.high_seconds)}",
            f"{result.mfu:.1%}",
            result.bound,
        )
    return table


def _expensive(result: Compiled, top: int) -> Any:
    from rich.table import Table

    table = Table(title="most expensive instructions", title_justify="left")
    for name in ("time", "share", "kind", "bound", "times", "module", "line", "shape"):
        table.add_column(name, overflow="fold")
    core = result.cost.core_seconds or 1.0
    for r in result.most_expensive(top):
        where = f"{r.file.rpartition('/')[2]}:{r.line}" if r.file else ""
        share = f"{r.seconds / core:.1%}" if r.cycles else "beside"
        table.add_row(
            duration(r.seconds),
            share,
            r.kind,
            r.bound,
            str(r.count),
            r.module or r.op,
            where,
            r.shape[:60],
        )
    return table


def _collectives(result: Compiled, top: int) -> Any:
    from rich.table import Table

    table = Table(title="collectives", title_justify="left")
    for name in ("time", "bytes", "times", "what", "module"):
        table.add_column(name, overflow="fold")
    for r in result.cost.collectives()[:top]:
        table.add_row(duration(r.seconds), size(r.bytes), str(r.count), r.detail, r.module or r.op)
    return table
