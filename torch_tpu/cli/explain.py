"""``python -m torch_tpu explain script.py [args]``: what each line of a script costs, and why.

Runs the script as ``python script.py`` would, then shows programs, compiles, time and traffic by
Python line, with advice. With ``--json`` the report alone goes to standard output; what the script
prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_tpu.program.activity import LineActivity
    from torch_tpu.program.advice import Advice
    from torch_tpu.program.source_lines import SourceLine


def add_parser(commands: Any) -> None:
    """Adds the command to the command line's sub-parsers."""
    parser = commands.add_parser(
        "explain",
        help="run a script and show what compiled, ran, waited and copied at each line, and why",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--top", type=int, default=25, metavar="N", help="show N lines (default 25)"
    )
    parser.add_argument("-m", action="store_true", dest="module", help="script names a module")
    parser.add_argument("script", help="a Python file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Carries the command out; returns the script's exit code."""
    from torch_tpu import _C
    from torch_tpu.program import activity
    from torch_tpu.program.advice import advise

    with _script_output_on_stderr() if options.json else _nothing():
        with activity.record() as recording:
            code = _run_script(options.script, options.arguments, options.module)
            if _C.is_initialized():
                try:
                    import torch

                    torch.tpu.synchronize()
                except Exception:
                    traceback.print_exc()
                    code = code or 1
        sys.stdout.flush()
    # Without a Python line and without work there is only the wait above.
    lines = [a for a in recording.lines() if a.line is not None or a.ops or a.copy_seconds]
    advice = advise(recording.compiles(), lines)
    if options.json:
        report = {
            "script": options.script,
            "exit_code": code,
            "total": activity.total(lines).as_dict(),
            "lines": [line.as_dict() for line in lines],
            "recompiles": [
                {
                    "name": c.name,
                    "line": None if c.line is None else str(c.line),
                    "changes": [str(change) for change in c.changes],
                }
                for c in recording.compiles()
                if c.is_recompile
            ],
            "advice": [
                {"line": None if a.line is None else str(a.line), "text": a.text} for a in advice
            ],
            "stats": dict(_C.stats()),
        }
        print(json.dumps(report, indent=2))
    else:
        show(lines, advice, options.top)
    return code


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _script_output_on_stderr() -> Iterator[None]:
    """Also of child processes and native code: swaps the file descriptors."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _run_script(script: str, arguments: Sequence[str], module: bool) -> int:
    """Runs it as the main program; returns its exit code, 1 after an exception it did not catch."""
    sys.argv = [script, *arguments]
    try:
        if module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        _print_from(error, script)
        return 1
    return 0


def _print_from(error: BaseException, script: str) -> None:
    """The traceback from the script on, without the frames of this command and of runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in (__file__, runpy.__file__) and not name.startswith("<frozen"):
            break
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def place(line: SourceLine | None) -> str:
    """``train.py:12`` as short as it can be said from here."""
    if line is None:
        return "(no Python line)"
    path = os.path.relpath(line.file) if os.path.isabs(line.file) else line.file
    if len(path) > len(line.file) or path.startswith(".."):
        path = line.file
    return f"{path}:{line.line}" + (" backward" if line.backward else "")


def seconds(value: float) -> str:
    """Three digits and a unit; "" for nothing."""
    if value <= 0:
        return ""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"


def size(count: int) -> str:
    """Bytes with a binary unit; "" for nothing."""
    if count == 0:
        return ""
    value = float(count)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


_MAX_SOURCE = 60
_STYLES = {"compiles": "yellow", "compiling": "yellow", "on CPU": "red"}
_COLUMNS = (
    "programs",
    "compiles",
    "loads",
    "hits",
    "compiling",
    "executing",
    "waiting",
    "to device",
    "to host",
    "on CPU",
)


def cells(a: LineActivity) -> list[str]:
    """A line's row of the table, after its place."""
    return [
        str(a.programs or ""),
        str(a.compiles or ""),
        str(a.loads or ""),
        str(a.hits or ""),
        seconds(a.lower_seconds + a.compile_seconds + a.load_seconds),
        seconds(a.execute_seconds),
        seconds(a.wait_seconds),
        size(a.bytes_to_device),
        size(a.bytes_to_host),
        str(a.fallbacks or ""),
    ]


def _label(activity: LineActivity) -> tuple[str, str]:
    """Where the line is, and its text, shortened."""
    text = activity.line.text if activity.line is not None else ""
    text = text if len(text) <= _MAX_SOURCE else text[: _MAX_SOURCE - 1] + "…"
    return place(activity.line), text


def show(lines: list[LineActivity], advice: list[Advice], top: int) -> None:
    """Prints the table and the advice to standard output, in the terminal's width and colours."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from torch_tpu.program.activity import total

    console = Console(highlight=False)
    console.print()
    if not lines:
        console.print("No op ran on device tpu.")
        return
    rows: list[tuple[Text, list[str]]] = []
    for activity in lines[:top]:
        where, text = _label(activity)
        rows.append((Text.assemble((where, "bold"), "  ", (text, "dim")), cells(activity)))
    if len(lines) > top:
        rows.append((Text(f"{len(lines) - top} more lines"), cells(total(lines[top:]))))
    everything = cells(total(lines))
    rows.append((Text("all lines", style="bold"), everything))
    used = [i for i, cell in enumerate(everything) if cell]

    wide = console.width >= _MAX_SOURCE + 11 * len(used)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    if wide:
        table.add_column("line", overflow="fold", ratio=1)
    for i in used:
        table.add_column(_COLUMNS[i], justify="right", no_wrap=True, min_width=10)
    console.print(Text("device tpu, by line of Python", style="bold"))
    for label, row in rows:
        numbers = [Text(row[i], style=_STYLES.get(_COLUMNS[i], "")) for i in used]
        if wide:
            table.add_row(label, *numbers)
        else:
            console.print(label, no_wrap=True, overflow="ellipsis", crop=True)
            console.print("  " + "  ".join(f"{_COLUMNS[i]} {row[i]}" for i in used if row[i]))
    if wide:
        console.print(table)
    console.print()
    for item in advice:
        console.print(Text.assemble((f"{place(item.line)}  ", "bold cyan"), item.text))
    if not advice:
        console.print(Text("No advice: few recompiles, waits and fallbacks.", style="green"))
