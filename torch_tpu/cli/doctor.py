"""Shows the facts as a table a person reads, with what to do next below."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch_tpu.cli.cache import readable

Row = tuple[str, str]


def rows(facts: dict[str, Any]) -> list[Row]:
    """Label and value of every line of the table."""
    versions, extension, plugin = facts["versions"], facts["extension"], facts["plugin"]
    hardware, smoke, counters = facts["hardware"], facts["smoke"], facts["cache"]["counters"]
    table: list[Row] = [
        ("Python", versions["python"]),
        ("torch", versions["torch"] or "not installed"),
        ("torch-tpu", versions["torch_tpu"] or "not installed (imported from a folder)"),
        ("loaded by import torch", "yes" if facts["autoload"] else "no"),
    ]

    if extension["built_for_torch"] is None:
        table.append(("native core", "not built"))
    else:
        match = "matches" if extension["matches"] else "does NOT match the installed torch"
        table.append(("native core", f"built for torch {extension['built_for_torch']}: {match}"))

    if plugin is None:
        table.append(("plug-in", "none"))
    else:
        kinds = Counter(plugin["device_kinds"])
        names = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        # Version strings of plug-ins span lines; the CPU plug-in only repeats its name.
        platform = " ".join(dict.fromkeys([plugin["platform_name"], plugin["platform_version"]]))
        table += [
            ("plug-in", f"{plugin['kind']}: {plugin['path']}"),
            ("platform", platform),
            ("PJRT API", ".".join(str(part) for part in plugin["api_version"])),
            ("devices", f"{plugin['num_devices']} ({names})"),
        ]

    if smoke is not None:
        verdict = "right" if smoke["right"] else "WRONG"
        times = f"first {smoke['first_ms']} ms, then {smoke['second_ms']} ms"
        table.append(("a + b on tpu", f"{verdict}; {times}"))
    cache = facts["cache"]
    if cache["problem"]:
        kept = "not used"
    elif cache["directory"] is None:
        kept = "off"
    else:
        size, limit = readable(cache["bytes"]), readable(cache["limit_bytes"])
        kept = f"{cache['directory']}: {cache['programs']} programs, {size} of {limit}"
    if counters is not None:
        names = ("compiles", "disk_hits")
        kept += f"\n{', '.join(f'{counters[name]} {name}' for name in names)} in this check"
    chips = Counter(hardware["chips"])
    precision = "float32 ('highest'); 'medium' is one pass of bfloat16 (torch.tpu.precision)"
    table += [
        ("float32 matmuls", precision),
        ("compile cache", kept),
        *([("remote cache", cache["remote"])] if cache["remote"] else []),
        ("TPU chips", ", ".join(f"{n} x {kind}" for kind, n in chips.items()) or "none"),
        ("libtpu", versions["libtpu"] or "not installed"),
        ("xla-cpu-pjrt", versions["xla_cpu_pjrt"] or "not installed"),
    ]
    table.append(("libraries", "\n".join(library_lines(facts["libraries"]))))
    variables = facts["environment"].items()
    table.append(("environment", "\n".join(f"{k}={v}" for k, v in variables) or "nothing set"))
    return table


def library_lines(found: list[dict[str, Any]]) -> list[str]:
    """A line for each library that is installed, with the range that is tested and its limits."""
    lines = []
    for row in found:
        if row["version"] is not None:
            line = f"{row['library']} {row['version']}: {row['verdict']} ({row['tested']})"
            lines.append(line + (f"; {row['limits']}" if row["limits"] else ""))
    return lines or ["none of those that docs/integrations lists"]


def show(facts: dict[str, Any]) -> None:
    """Prints the table, problems and hints to standard output; colours on a terminal only."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        # A broken environment is what this command is for: it goes without its own dependency.
        for label, value in rows(facts):
            print(f"{label:24}{value}".replace("\n", "\n" + " " * 24))
        for problem in facts["problems"]:
            print(f"\nPROBLEM  {problem['what']}\n  do     {problem['do']}")
        print("\nhint     rich is not installed: `pip install rich`")
        return

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows(facts):
        table.add_row(label, Text(value))
    console.print(table)
    console.print()
    for problem in facts["problems"]:
        console.print(Text.assemble(("PROBLEM  ", "bold red"), problem["what"]))
        console.print(Text.assemble(("  do     ", "bold"), problem["do"]))
    for hint in facts["hints"]:
        console.print(Text.assemble(("hint     ", "bold cyan"), hint))
    if facts["ok"]:
        console.print(Text("device tpu works", style="bold green"))
