"""Our program and JAX's for the same training step, compiled and costed by the same libtpu.

    python benchmarks/aot_compare.py step.mlir --size qwen3_8b --target tpu7x-8 --batch 8

``step.mlir`` comes from ``benchmarks/aot_jax_peer.py``. Prints one JSON object: cycles, HBM,
collectives of both, and ratios ours / JAX's. No clock is read: the compiler's figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_tpu import aot
from torch_tpu.aot import hlo, workload
from torch_tpu.aot.compiler import error_of
from torch_tpu.aot.cost import cost_of
from torch_tpu.aot.store import compile_cached
from torch_tpu.aot.worker import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "models"))

import transformer

SIZES = {
    "llama3_8b": transformer.LLAMA3_8B,
    "qwen3_0_6b": replace(transformer.QWEN3_0_6B, tied=False),
    "qwen3_8b": transformer.QWEN3_8B,
    "small": transformer.Config(4, 1024, 3072, 8, 4, 128, 32_768, 1e6, query_norm=True),
}


def figures(cost: aot.CostReport, memory: dict[str, int]) -> dict[str, Any]:
    total = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    return {
        "cycles": cost.cycles,
        "core_seconds": cost.core_seconds,
        "collective_seconds": cost.seconds_of.get("collective", 0.0),
        "high_seconds": cost.high_seconds,
        "hbm_bytes": total + memory["generated_code"],
        "by_kind": cost.seconds_of,
        "unknown_trip_counts": cost.unknown_trip_counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", choices=SIZES, default="qwen3_8b")
    parser.add_argument("--target", default="tpu7x-8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    target = aot.resolve(options.target)
    config = SIZES[options.size]
    if options.layers:
        config = replace(config, layers=options.layers)

    text = options.file.read_text()
    found = re.search(r"mhlo.num_partitions = (\d+)", text)
    request = Request(text, target.topology, int(found[1]) if found else 1)
    (reply,) = compile_cached([request])
    if error := error_of(reply):
        raise SystemExit(f"JAX's program: {error}")
    theirs = figures(
        cost_of(hlo.parse_module(reply.hlo, reply.hlo_kind), target.chip), reply.memory
    )

    work = transformer.train(config, options.batch, options.seq)
    (result,) = workload.run([workload.Job(work, target)])
    if not isinstance(result, aot.Compiled):
        raise SystemExit(f"our program: {result.error}")
    m = result.memory
    sizes = {
        "argument": m.arguments,
        "output": m.outputs,
        "alias": m.aliased,
        "temp": m.temporaries,
        "generated_code": m.program,
    }
    ours = figures(result.cost, sizes)
    ratios = {
        name: ours[name] / theirs[name] if theirs[name] else None
        for name in ("cycles", "collective_seconds", "high_seconds", "hbm_bytes")
    }
    print(
        json.dumps({"target": target.name, "ours": ours, "jax": theirs, "ratios": ratios}, indent=2)
    )


if __name__ == "__main__":
    main()
