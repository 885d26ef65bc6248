"""A process that compiles StableHLO for a TPU: one JSON line in, one out.

Apart from the tests, because libtpu ends its process on some programs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO


def answers(requests: TextIO, target: str) -> Iterator[dict[str, str | None]]:
    """For each {"text": module}: {"error": None}, or the compiler's message."""
    from torch_tpu import aot

    for line in requests:
        try:
            aot.compile_stablehlo(json.loads(line)["text"], target)
            error = None
        except aot.TpuCompileError as failure:
            error = f"{failure.code}: {failure}"
        yield {"error": error}


def main() -> None:
    # libtpu prints to the standard output: answers go out through a copy of it.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for answer in answers(sys.stdin, sys.argv[1]):
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
