"""The same work in JAX, for comparison; runs in a Python that has jax and does not need torch.

    python benchmarks/jax_peer.py --json out.json

Small ops are dispatched one by one. Training steps are whole jitted functions with donated state,
so they are the yardstick of the compiled figures (`cgpt_*`); `mlp_*` stands beside eager steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from timing import median_us, once_ms

Params = Any
KEY = jax.random.PRNGKey(0)


def small_ops(figures: dict[str, float]) -> None:
    """Dispatch cost: one add, a chain of 41 ops with a host read, a changing Python number."""
    last: list[jax.Array] = [jnp.zeros(())]

    def keep(function: Callable[[], jax.Array]) -> Callable[[], None]:
        def call() -> None:
            last[0] = function()

        return call

    def sync() -> None:
        jax.block_until_ready(last[0])

    for size in (16, 1024, 1 << 20):
        a, b = jnp.ones(size), jnp.ones(size)
        call = keep(lambda a=a, b=b: a + b)
        figures[f"add_{size}"] = median_us(call, sync, 2000 if size < 100_000 else 100)

    start = jnp.ones(16)

    def chain() -> float:
        x = start
        for _ in range(20):
            x = x * 1.01 + 0.5
        return float(x.sum())

    figures["chain_41_small_ops"] = median_us(chain, sync, 50)

    vector, scalar = jnp.ones(64), 0.0

    def changing() -> jax.Array:
        nonlocal scalar
        scalar += 1e-3
        return vector * scalar + scalar

    figures["lr_changing_scalar_2_ops"] = median_us(keep(changing), sync, 300)


def linear(inputs: int, outputs: int) -> Params:
    return {"w": jax.random.normal(KEY, (inputs, outputs)) * 0.02, "b": jnp.zeros(outputs)}


def norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def apply_linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def apply_norm(p: Params, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["shift"]


def mlp_loss(params: Params, x: jax.Array) -> jax.Array:
    for layer in params:
        x = apply_linear(layer["linear"], x)
        x = apply_norm(layer["norm"], jax.nn.gelu(x, approximate=False))
    return (x * x).mean()


def gpt_params(
    vocabulary: int = 256, width: int = 256, layers: int = 4, length: int = 128
) -> Params:
    def block() -> Params:
        return {
            "norm1": norm(width),
            "norm2": norm(width),
            "qkv": linear(width, 3 * width),
            "out": linear(width, width),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
        }

    return {
        "token": jax.random.normal(KEY, (vocabulary, width)),
        "position": jax.random.normal(KEY, (length, width)),
        "blocks": [block() for _ in range(4)],
        "norm": norm(width),
        "head": linear(width, vocabulary),
    }


def gpt_loss(params: Params, tokens: jax.Array, targets: jax.Array, heads: int = 4) -> jax.Array:
    """Mean cross entropy for tokens and targets (batch, length); attention written out."""
    x = params["token"][tokens] + params["position"][: tokens.shape[1]]
    batch, length, width = x.shape
    future = jnp.triu(jnp.ones((length, length), bool), 1)
    for p in params["blocks"]:
        qkv = apply_linear(p["qkv"], apply_norm(p["norm1"], x))
        qkv = qkv.reshape(batch, length, 3, heads, width // heads)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        scores = (q @ k.swapaxes(-1, -2)) * (width // heads) ** -0.5
        y = jax.nn.softmax(jnp.where(future, -jnp.inf, scores), -1) @ v
        x = x + apply_linear(p["out"], y.swapaxes(1, 2).reshape(batch, length, width))
        hidden = jax.nn.gelu(apply_linear(p["up"], apply_norm(p["norm2"], x)), approximate=False)
        x = x + apply_linear(p["down"], hidden)
    logits = apply_linear(params["head"], apply_norm(params["norm"], x))
    scores = jax.nn.log_softmax(logits, -1)
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


def adamw_step(loss: Callable[..., jax.Array], rate: float = 1e-3, decay: float = 1e-2) -> Any:
    """Jitted AdamW, PyTorch defaults: (params, m, v, count, *batch) to the same and the loss."""

    def step(params: Params, m: Params, v: Params, count: jax.Array, *batch: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        count = count + 1
        m = jax.tree.map(lambda old, g: 0.9 * old + 0.1 * g, m, gradient)
        v = jax.tree.map(lambda old, g: 0.999 * old + 0.001 * g * g, v, gradient)
        unbias1, unbias2 = 1 - 0.9**count, 1 - 0.999**count

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p * (1 - rate * decay) - rate * (m / unbias1) / (jnp.sqrt(v / unbias2) + 1e-8)

        return jax.tree.map(update, params, m, v), m, v, count, value

    return jax.jit(step, donate_argnums=(0, 1, 2, 3))


def training(
    figures: dict[str, float],
    name: str,
    loss: Callable[..., jax.Array],
    params: Params,
    *batch: jax.Array,
) -> None:
    step = adamw_step(loss)
    state = [
        params,
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(jnp.zeros_like, params),
        jnp.zeros(()),
    ]

    def call() -> float:
        *state[:], value = step(*state, *batch)
        return float(value)

    figures[f"{name}_first_step_ms"] = once_ms(call)
    figures[f"{name}_train_step"] = median_us(call, lambda: None, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmark cases in JAX.")
    parser.add_argument("--json", type=Path, help="file for figures and errors")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    small_ops(figures)
    layers = [{"linear": linear(256, 256), "norm": norm(256)} for _ in range(8)]
    training(figures, "mlp", mlp_loss, layers, jax.random.normal(KEY, (32, 256)))
    tokens = jax.random.randint(KEY, (4, 128), 0, 256)
    params = gpt_params()
    forward = jax.jit(gpt_loss)
    figures["cgpt_forward"] = median_us(lambda: float(forward(params, tokens, tokens)), list, 5)
    training(figures, "cgpt", gpt_loss, params, tokens, tokens)
    result = {"figures": figures, "errors": {}}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    else:
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
