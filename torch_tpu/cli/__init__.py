"""Command line: ``python -m torch_tpu {doctor,info}``.

Nothing here loads torch or the native core: the commands have to work, and to say what is wrong,
where those cannot be loaded. Facts about them come from a child process (torch_tpu.cli.facts).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 where the device works, 1 where it does not."""
    parser = argparse.ArgumentParser(prog="python -m torch_tpu", description="PyTorch on TPUs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what was found, what is wrong and what to do next")
    commands.add_parser("info", help="the same facts as JSON")
    options = parser.parse_args(arguments)

    from torch_tpu.cli.facts import collect

    facts = collect()
    if options.command == "info":
        print(json.dumps(facts, indent=2))
    else:
        from torch_tpu.cli.doctor import show

        show(facts)
    return 0 if facts["ok"] else 1
