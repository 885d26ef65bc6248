"""Every model type of Transformers on the device: `make test-models`, or

    python -m tests.integrations.transformers.sweep OUT.json [--types REGEX] [--mode fused] ...

A worker process takes one type after another, so that programs are shared; a crash or a timeout
costs the type it happened in and starts another worker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

# A worker is replaced after so many types: XLA:CPU does not give all memory of programs back.
TYPES_A_WORKER = 60
MODES = ("strict", "fused", "compile")


def serve(mode: str) -> None:
    """Worker: a model type a line in, a result as JSON a line out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models print
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    import torch_tpu  # noqa: F401

    from . import compare

    if mode == "fused":
        torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE
    for line in sys.stdin:
        result = compare.check(line.strip(), compiled=mode == "compile")
        print(json.dumps(result.asdict()), file=out, flush=True)


class Worker:
    def __init__(self, mode: str) -> None:
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
        self.served = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, model_type: str, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.served += 1
        print(model_type, file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.stop()
            return {"type": model_type, "status": "timeout", "detail": f"{seconds:.0f} s"}
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            return {"type": model_type, "status": "crash", "detail": f"exit status {code}"}
        return json.loads(line)

    @property
    def usable(self) -> bool:
        return self.process.poll() is None and self.served < TYPES_A_WORKER

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def sweep(
    types: list[str], out: Path, mode: str = "strict", seconds: float = 240, budget: float = 1e9
) -> list[dict[str, Any]]:
    """Check ``types``; ``out`` is written after each, and types it already has are kept."""
    results = json.loads(out.read_text()) if out.exists() else []
    done = {r["type"] for r in results}
    worker: Worker | None = None
    started = time.monotonic()
    for model_type in types:
        if model_type in done:
            continue
        if time.monotonic() - started > budget:
            break
        if worker is None or not worker.usable:
            if worker is not None:
                worker.stop()
            worker = Worker(mode)
        result = worker.ask(model_type, seconds)
        results.append(result)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{model_type:32}{result['status']:9}{result.get('detail', '')[:140]}", flush=True)
    if worker is not None:
        worker.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("build/models.json"))
    parser.add_argument("--types", default=".*", help="regular expression, whole name")
    parser.add_argument("--mode", choices=MODES, default="strict")
    parser.add_argument("--shard", default="0/1", help="k/n: every n-th type from the k-th on")
    parser.add_argument("--seconds", type=float, default=240, help="for one type")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds in all; resume later")
    parser.add_argument("--again", default="", help="statuses to check again, comma-separated")
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    from . import tiny

    part, parts = map(int, options.shard.split("/"))
    types = [t for t in tiny.model_types() if re.fullmatch(options.types, t)][part::parts]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.again and options.out.exists():
        again = set(options.again.split(","))
        kept = [r for r in json.loads(options.out.read_text()) if r["status"] not in again]
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    results = sweep(types, options.out, options.mode, options.seconds, options.budget)
    print(dict(Counter(r["status"] for r in results)))
    if any(r["status"] not in ("ok", "unbuilt") for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
