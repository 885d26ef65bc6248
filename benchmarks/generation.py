"""Tokens a second of a small Llama: torch CPU beside the device, with a growing and a static cache.

    python benchmarks/generation.py --new 128 --json out.json

Needs Transformers. Random weights; greedy. Each way generates twice untimed (compiling), then
`--repeat` times with prompts of `--prompt` tokens; `programs` are those that had to be compiled or
loaded meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from torch_tpu import _C


def model_of(device: str, layers: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval().to(device)


def programs() -> int:
    stats = _C.stats()
    return int(stats["compiles"] + stats["disk_hits"])


def measure(
    device: str, prompt: int, new: int, repeat: int, layers: int, width: int, cache: str | None
) -> dict[str, Any]:
    """Tokens a second over `repeat` prompts."""
    model = model_of(device, layers, width)
    arguments = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    if cache is not None:
        arguments["cache_implementation"] = cache

    def generate(seed: int) -> None:
        ids = torch.randint(0, 4096, (1, prompt), generator=torch.Generator().manual_seed(seed))
        model.generate(ids.to(device), **arguments).cpu()

    start = time.perf_counter()
    generate(0)
    first = time.perf_counter() - start
    generate(1)
    before = programs()
    start = time.perf_counter()
    for seed in range(repeat):
        generate(seed)
    seconds = time.perf_counter() - start
    return {
        "device": device,
        "cache": cache or "dynamic",
        "first (s)": first,
        "tokens/s": repeat * new / seconds,
        "programs": programs() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=20)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    size = (arguments.prompt, arguments.new, arguments.repeat, arguments.layers, arguments.width)
    rows = []
    for device, cache in (("cpu", None), ("tpu", None), ("tpu", "static")):
        row = measure(device, *size, cache)
        row["x CPU"] = row["tokens/s"] / (rows[0]["tokens/s"] if rows else row["tokens/s"])
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
