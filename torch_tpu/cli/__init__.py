"""Command line: ``python -m torch_tpu {doctor,info,cache,explain,estimate,selftest}``.

Nothing here loads torch or the native core: the commands have to work, and to say what is wrong,
where those cannot be loaded. Facts about them come from a child process (torch_tpu.cli.facts). Only
`explain`, `estimate` and `selftest` load them, when they run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 where all is well, 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m torch_tpu", description="PyTorch on TPUs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what was found, what is wrong and what to do next")
    commands.add_parser("info", help="the same facts as JSON")
    from torch_tpu.cli import cache, estimate, explain, selftest

    estimate.add_parser(commands)
    selftest.add_parser(commands)
    cache.add_arguments(commands.add_parser("cache", help="compiled programs kept on this host"))
    explain.add_parser(commands)
    options = parser.parse_args(arguments)
    if options.command == "cache":
        return cache.run(options)
    if options.command == "estimate":
        return estimate.run(options)
    if options.command == "selftest":
        return selftest.run(options)
    if options.command == "explain":
        return explain.run(options)

    from torch_tpu.cli.facts import collect

    facts = collect()
    if options.command == "info":
        print(json.dumps(facts, indent=2))
    else:
        from torch_tpu.cli.doctor import show

        show(facts)
    return 0 if facts["ok"] else 1
