"""Where the time of compiling a training step goes, by the number of layers.

    python benchmarks/tracing.py --layers 1,4,16,64 --json out.json

One GPT a line, compiled by torch.compile in this process with the cache beyond it off: nodes of the
forward and backward graphs, and seconds in TorchDynamo, AOTAutograd, lowering (to StableHLO text)
and XLA. `share` is the first three over all; `ms/1000 nodes` should not grow.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from models import GPT

from torch_tpu import _C
from torch_tpu.program import cache


def measure(layers: int, width: int) -> dict[str, Any]:
    """Seconds of one cold compilation of the forward and backward pass."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(width=width, layers=layers, context=32).to("tpu")
    tokens = torch.randint(0, 256, (2, 32), device="tpu")
    marks: list[tuple[str, float]] = []
    nodes = 0

    def note(stage: str, artifact: Any) -> None:
        nonlocal nodes
        marks.append((stage, time.perf_counter()))
        if stage in ("forward", "backward"):
            nodes += len(artifact.graph.nodes)

    step = torch.compile(model, backend="tpu", options={"debug_callback": note})
    torch.tpu.synchronize()
    before = _C.stats()
    start = time.perf_counter()
    step(tokens, tokens).backward()
    torch.tpu.synchronize()
    total = time.perf_counter() - start
    gained = {k: _C.stats()[k] - before[k] for k in ("compile_seconds", "compiles")}
    at = dict(marks)
    lowering = sum(at[f"{stage}_text"] - at[stage] for stage in ("forward", "backward"))
    dynamo = at["graph"] - start
    xla = gained["compile_seconds"]
    aot = total - dynamo - lowering - xla
    return {
        "layers": layers,
        "nodes": nodes,
        "dynamo": dynamo,
        "aot": aot,
        "lowering": lowering,
        "xla": xla,
        "total": total,
        "share": (total - xla) / total,
        "ms/1000 nodes": (total - xla) / nodes * 1e6,
        "lowering ms/1000 nodes": lowering / nodes * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="1,4,16,64")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with cache.disabled():
        measure(1, arguments.width)  # imports
        for layers in map(int, arguments.layers.split(",")):
            row = measure(layers, arguments.width)
            rows.append(row)
            print(
                "  ".join(
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                ),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
