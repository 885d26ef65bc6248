"""JAX's program for the transformers of examples/models, as StableHLO: the peer of our estimates.

Runs in an environment of its own that has jax (no libtpu needed, nothing is compiled here):

    python benchmarks/aot_jax_peer.py --size qwen3_8b --devices 8 --batch 8 --out step.mlir

``benchmarks/aot_compare.py`` costs the file with the same compiler and model as ours. The program
is what a JAX user would write: ``lax.scan`` over stacked layers, ``jax.checkpoint`` around a block,
float32 weights, bfloat16 arithmetic, AdamW, parameters over "fsdp", arguments donated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

# layers, width, hidden, heads, key heads, head width, words, rope base, query norm
SIZES = {
    "llama3_8b": (32, 4096, 14336, 32, 8, 128, 128_256, 5e5, False),
    "qwen3_0_6b": (28, 1024, 3072, 16, 8, 128, 151_936, 1e6, True),
    "qwen3_8b": (36, 4096, 12288, 32, 8, 128, 151_936, 1e6, True),
    "small": (4, 1024, 3072, 8, 4, 128, 32_768, 1e6, True),
}


def program(size: str, devices: int, batch: int, seq: int, layers: int | None) -> tuple[str, int]:
    """StableHLO text of a training step, and the number of parameters."""
    depth, width, hidden, heads, kv, hd, words, base, qnorm = SIZES[size]
    depth = layers or depth
    mesh = AbstractMesh((devices,), ("fsdp",))

    def spec(shape: tuple[int, ...], stacked: bool) -> NamedSharding:
        parts: list[str | None] = [None] * len(shape)
        if len(shape) - stacked > 1:
            for d in range(int(stacked), len(shape)):
                if shape[d] % devices == 0:
                    parts[d] = "fsdp"
                    break
        return NamedSharding(mesh, PartitionSpec(*parts))

    def parameter(*shape: int, stacked: bool = False) -> Any:
        shape = (depth, *shape) if stacked else shape
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec(shape, stacked))

    block_shapes = {
        "q": (heads * hd, width),
        "k": (kv * hd, width),
        "v": (kv * hd, width),
        "o": (width, heads * hd),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
        "norm1": (width,),
        "norm2": (width,),
    }
    if qnorm:
        block_shapes |= {"qnorm": (hd,), "knorm": (hd,)}
    parameters = {
        "embedding": parameter(words, width),
        "norm": parameter(width),
        "head": parameter(words, width),
        "blocks": {k: parameter(*s, stacked=True) for k, s in block_shapes.items()},
    }
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def rms(x: Any, w: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
        return (wide * w).astype(jnp.bfloat16)

    def linear(x: Any, w: Any) -> Any:
        return jnp.einsum("...i,oi->...o", x, w.astype(jnp.bfloat16))

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, c = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-c, a], -1) * sin

    def block(x: Any, p: Any, cos: Any, sin: Any) -> Any:
        n = x.shape[0]
        h = rms(x, p["norm1"])
        q = linear(h, p["q"]).reshape(n, seq, heads, hd)
        k = linear(h, p["k"]).reshape(n, seq, kv, hd)
        v = linear(h, p["v"]).reshape(n, seq, kv, hd)
        if qnorm:
            q, k = rms(q, p["qnorm"]), rms(k, p["knorm"])
        q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (jnp.repeat(t, heads // kv, 1) for t in (k, v))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores * hd**-0.5, -jnp.inf), -1)
        out = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(jnp.bfloat16), v)
        x = x + linear(out.transpose(0, 2, 1, 3).reshape(n, seq, heads * hd), p["o"])
        h = rms(x, p["norm2"])
        return x + linear(jax.nn.silu(linear(h, p["gate"])) * linear(h, p["up"]), p["down"])

    def loss(p: Any, tokens: Any, wanted: Any) -> Any:
        x = p["embedding"][tokens].astype(jnp.bfloat16)
        x = jax.lax.with_sharding_constraint(x, rows)
        angles = jnp.arange(seq, dtype=jnp.float32)[:, None]
        angles = angles * base ** -(jnp.arange(0, hd, 2, dtype=jnp.float32) / hd)
        angles = jnp.concatenate([angles, angles], -1)
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        step = jax.checkpoint(block)
        x, _ = jax.lax.scan(lambda c, q: (step(c, q, cos, sin), None), x, p["blocks"])
        logits = linear(rms(x, p["norm"]), p["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, wanted[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def train(p: Any, m: Any, v: Any, t: Any, tokens: Any, wanted: Any) -> Any:
        value, g = jax.value_and_grad(loss)(p, tokens, wanted)
        t = t + 1
        m = jax.tree.map(lambda a, d: 0.9 * a + 0.1 * d, m, g)
        v = jax.tree.map(lambda a, d: 0.95 * a + 0.05 * d * d, v, g)

        def update(w: Any, a: Any, c: Any) -> Any:
            a, c = a / (1 - 0.9**t), c / (1 - 0.95**t)
            return w * (1 - 1e-4 * 1e-2) - 1e-4 * a / (jnp.sqrt(c) + 1e-8)

        return value, jax.tree.map(update, p, m, v), m, v, t

    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=rows)
    state = (parameters, parameters, parameters, scalar)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    jitted = jax.jit(
        train, donate_argnums=(0, 1, 2, 3), out_shardings=(scalar.sharding, *shardings)
    )
    lowered = jitted.trace(*state, tokens, tokens).lower(lowering_platforms=("tpu",))
    count = sum(x.size for x in jax.tree.leaves(parameters))
    return lowered.as_text(), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="qwen3_8b")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="another depth")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    jax.config.update("jax_use_shardy_partitioner", False)
    text, count = program(options.size, options.devices, options.batch, options.seq, options.layers)
    options.out.write_text(text)
    print(json.dumps({"parameters": count, "characters": len(text)}))


if __name__ == "__main__":
    main()
