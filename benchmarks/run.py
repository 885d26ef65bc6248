"""Runs the cases on several backends, each in a fresh process, and prints them as ratios.

    python benchmarks/run.py [--backends cpu,tpu] [--only add,gpt] [--json out.json]
    python benchmarks/run.py --jax-python /path/to/python    # adds JAX, installed there

Absolute times drift with the machine; ratios taken in one run do not, so only those are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Backend:
    """How one column is produced."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    runs: int = 1  # in one directory of compiled programs; the last one counts


@dataclass
class Result:
    """Figures and per-case errors of one backend; `missing` says why it did not run at all."""

    figures: dict[str, float]
    errors: dict[str, str]
    missing: str = ""


def busy() -> str:
    """A warning where other work competes for the cores, else ""; ratios then mean little."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load {load:.1f} on {cores} cores before the run" if load > 0.5 * cores else ""


def backend(name: str, options: argparse.Namespace) -> Backend:
    """cpu, tpu (strict), tpu-strict, tpu-fused, tpu-debug or jax.

    Each tpu backend starts without compiled programs on disk; with "+warm" behind its name it
    runs twice, and the second process finds those of the first.
    """
    if name == "jax":
        environment = {"JAX_PLATFORMS": "cpu"}
        return Backend(name, (options.jax_python, str(HERE / "jax_peer.py")), environment)
    command = [sys.executable, str(HERE / "cases.py"), "--threads", str(options.threads)]
    if options.only:
        command += ["--only", options.only]
    base, plus, warm = name.partition("+")
    device, _, mode = base.partition("-")
    if device == "cpu" and not mode:
        # torch CPU is the yardstick and must not depend on whether this package loads.
        command += ["--device", "cpu"]
        return Backend(name, tuple(command), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    modes = {"", "strict", "fused", "debug"}
    if device == "tpu" and mode in modes and plus + warm in {"", "+warm"}:
        command += ["--device", "tpu", *(["--mode", mode] if mode else [])]
        return Backend(name, tuple(command), {}, runs=2 if warm else 1)
    known = "cpu, tpu[-strict|-fused|-debug][+warm]"
    raise SystemExit(f"run.py: unknown backend {name!r}; there are {known}")


def run(which: Backend, console: Console) -> Result:
    """Starts the backend's process and reads what it wrote."""
    console.print(f"{which.name} ...", style="dim")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        cache = {"TORCH_TPU_CACHE_DIR": str(Path(folder) / "cache")}
        for _ in range(which.runs):
            done = subprocess.run(
                [*which.command, "--json", str(out)],
                env={**os.environ, **cache, **which.environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        if done.returncode == 0 and out.exists():
            return Result(**json.loads(out.read_text()))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Result({}, {}, lines[-1].strip() if lines else f"exit code {done.returncode}")


def shown(figure: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "–"
    if figure.endswith("_compiles"):
        return f"{value:.0f}"
    microseconds = value * 1e3 if figure.endswith("_ms") else value
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if microseconds < limit:
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None


def ratios(results: dict[str, Result], bases: list[str]) -> dict[str, dict[str, float]]:
    """{"tpu/cpu": {figure: ratio}} for every backend against every base that ran."""
    table: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        for base in bases:
            if name in bases and (name == base or bases.index(name) < bases.index(base)):
                continue
            pairs = {
                figure: ratio(value, results[base].figures.get(figure))
                for figure, value in result.figures.items()
                if not figure.endswith("_compiles")
            }
            table[f"{name}/{base}"] = {f: r for f, r in pairs.items() if r is not None}
    return {column: values for column, values in table.items() if values}


def show(
    results: dict[str, Result], compared: dict[str, dict[str, float]], console: Console
) -> None:
    figures = list(dict.fromkeys(f for result in results.values() for f in result.figures))
    ran = [name for name, result in results.items() if not result.missing]
    table = Table("figure", caption="time by unit; a/b is a ratio, below 1 a is faster")
    for column in (*ran, *compared):
        table.add_column(column, justify="right")
    for figure in figures:
        times = (shown(figure, results[name].figures.get(figure)) for name in ran)
        quotients = (values.get(figure) for values in compared.values())
        table.add_row(figure, *times, *("–" if q is None else f"{q:.2f}" for q in quotients))
    console.print(table)
    for name, result in results.items():
        if result.missing:
            console.print(f"{name} did not run: {result.missing}", markup=False)
        for case, message in result.errors.items():
            console.print(f"{name}, {case}: {message}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark backends side by side.")
    parser.add_argument("--backends", default="cpu,tpu", help="also tpu-fused,tpu-debug,tpu+warm")
    parser.add_argument("--only", default="", help="cases, comma-separated; all by default")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--jax-python", default="", help="a Python with jax; adds backend jax")
    parser.add_argument("--json", type=Path, help="file for figures, errors and ratios")
    options = parser.parse_args()
    names = list(dict.fromkeys(options.backends.split(",")))
    if options.jax_python:
        names.append("jax")
    backends = [backend(name, options) for name in names]  # a wrong name fails before the first run

    console = Console(highlight=False)
    warning = busy()
    results = {each.name: run(each, console) for each in backends}
    bases = [base for base in ("cpu", "jax") if base in results and not results[base].missing]
    compared = ratios(results, bases)
    show(results, compared, console)
    if warning:
        console.print(f"The machine was busy ({warning}): do not trust these ratios.", style="bold")
    if options.json:
        record: dict[str, Any] = {
            "threads": options.threads,
            "busy": warning,
            "backends": {name: vars(result) for name, result in results.items()},
            "ratios": compared,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    # A backend that was asked for and did not run is a failure; a failing case is a figure.
    return 1 if any(result.missing for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
