"""Decoder-only transformers of the Llama and Qwen 3 families.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; Qwen 3 normalises queries and keys per
head. Sizes are those of the public configurations. Builders at the end are for
``python -m torch_tpu estimate examples/models/transformer.py:qwen3_8b_train``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import aot

BATCH = ("data", "fsdp")


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    words: int
    rope_base: float
    query_norm: bool = False
    tied: bool = False
    epsilon: float = 1e-6


LLAMA3_8B = Config(32, 4096, 14336, 32, 8, 128, 128_256, 5e5, epsilon=1e-5)
LLAMA3_70B = Config(80, 8192, 28672, 64, 8, 128, 128_256, 5e5, epsilon=1e-5)
QWEN3_0_6B = Config(28, 1024, 3072, 16, 8, 128, 151_936, 1e6, query_norm=True, tied=True)
QWEN3_8B = Config(36, 4096, 12288, 32, 8, 128, 151_936, 1e6, query_norm=True)
QWEN3_32B = Config(64, 5120, 25600, 64, 8, 128, 151_936, 1e6, query_norm=True)


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * self.weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x (batch, heads, length, width), cos and sin (length, width)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = c.heads, c.key_heads, c.head_width
        self.q_proj = nn.Linear(c.width, c.heads * c.head_width, bias=False)
        self.k_proj = nn.Linear(c.width, c.key_heads * c.head_width, bias=False)
        self.v_proj = nn.Linear(c.width, c.key_heads * c.head_width, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_width, c.width, bias=False)
        if c.query_norm:
            self.q_norm = RMSNorm(c.head_width, c.epsilon)
            self.k_norm = RMSNorm(c.head_width, c.epsilon)
        self.query_norm = c.query_norm

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor] | None = None,
        position: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """x (batch, length, width) -> the same, and the keys and values of these positions.

        With a cache (batch, key heads, room, head width) of each, x is one token at ``position``
        (one number), which sees the cache before it; the cache is not written here.
        """
        batch, length, _ = x.shape
        split = lambda y, heads: y.view(batch, length, heads, self.width)  # noqa: E731
        q = split(self.q_proj(x), self.heads)
        k = split(self.k_proj(x), self.key_heads)
        v = split(self.v_proj(x), self.key_heads).transpose(1, 2)
        if self.query_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        if cache is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            assert position is not None
            places = torch.arange(cache[0].shape[2], device=x.device)
            here = (places == position)[:, None]
            keys, values = torch.where(here, k, cache[0]), torch.where(here, v, cache[1])
            seen = (places <= position)[None, None, None]
            out = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
        out = out.transpose(1, 2).reshape(batch, length, self.heads * self.width)
        return self.o_proj(out), (k, v)


class Mlp(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.up_proj = nn.Linear(c.width, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_norm = RMSNorm(c.width, c.epsilon)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.width, c.epsilon)
        self.mlp = Mlp(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin)[0]
        return x + self.mlp(self.mlp_norm(x))

    def cached(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        position: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, (k, v) = self.attention(self.input_norm(x), cos, sin, cache, position)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), k, v


class Transformer(nn.Module):
    """tokens (batch, length) -> logits (batch, length, words)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.words, c.width)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.epsilon)
        self.head = nn.Linear(c.width, c.words, bias=False)
        if c.tied:
            self.head.weight = self.embedding.weight

    def rope(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.config.head_width
        powers = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles = positions.float()[:, None] * (self.config.rope_base**-powers)[None]
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16
        x = aot.constrain(self.embedding(tokens).to(dtype), BATCH)
        cos, sin = self.rope(torch.arange(tokens.shape[1], device=tokens.device), dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, as prefill wants them."""
        return self.head(self.hidden(tokens)[:, -1])


class Trainer(nn.Module):
    """tokens and wanted (batch, length) -> mean cross entropy."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.model = Transformer(c)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = self.model.head(self.model.hidden(tokens)).float()
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class DecodeBlock(Block):
    forward = Block.cached  # type: ignore[assignment]


class Decoder(Transformer):
    """One decode step: token (batch, 1), position (1,), caches (layers, batch, key heads, room,
    head width) -> logits (batch, words) and the new caches."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.layers = nn.ModuleList(DecodeBlock(c) for _ in range(c.layers))

    def forward(  # type: ignore[override]
        self, token: torch.Tensor, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.embedding(token).to(torch.bfloat16)
        cos, sin = self.rope(position, x.dtype)
        new_keys, new_values = [], []
        for layer, k, v in zip(self.layers, keys.unbind(0), values.unbind(0), strict=True):
            x, k, v = layer(x, cos, sin, (k, v), position)
            new_keys.append(k)
            new_values.append(v)
        logits = self.head(self.norm(x))[:, -1]
        # One write into the donated caches, not one copy of them a layer.
        keys = keys.index_copy(3, position, torch.stack(new_keys))
        values = values.index_copy(3, position, torch.stack(new_values))
        return logits, keys, values


# -- builders -----------------------------------------------------------------------------------


def train(c: Config, batch: int = 8, seq: int = 4096) -> aot.Workload:
    """float32 weights, bfloat16 arithmetic, AdamW; activations of a block are computed again."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, seq, dtype=torch.int32)
        return aot.Workload(
            Trainer(c),
            (tokens, tokens.long()),
            train=True,
            autocast=torch.bfloat16,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.9, 0.95)),
        )


def prefill(c: Config, batch: int = 1, seq: int = 4096) -> aot.Workload:
    """bfloat16 weights; logits of the last position."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, seq, dtype=torch.int32)
        return aot.Workload(Transformer(c).bfloat16(), (tokens,))


def decode(c: Config, batch: int = 8, seq: int = 4096) -> aot.Workload:
    """bfloat16 weights and caches with room for ``seq`` positions; one token a sequence."""
    with torch.device("meta"):
        token = torch.zeros(batch, 1, dtype=torch.int32)
        position = torch.zeros(1, dtype=torch.int32)
        room = (c.layers, batch, c.key_heads, seq, c.head_width)
        cache = torch.zeros(room, dtype=torch.bfloat16)
        shard = {"args[[]2]": (None, BATCH), "args[[]3]": (None, BATCH)}
        return aot.Workload(
            Decoder(c).bfloat16(), (token, position, cache, cache), donate=(2, 3), shard=shard
        )


def _builders(c: Config) -> tuple[Callable[..., aot.Workload], ...]:
    return partial(train, c), partial(prefill, c), partial(decode, c)


llama3_8b_train, llama3_8b_prefill, llama3_8b_decode = _builders(LLAMA3_8B)
llama3_70b_train, llama3_70b_prefill, llama3_70b_decode = _builders(LLAMA3_70B)
qwen3_0_6b_train, qwen3_0_6b_prefill, qwen3_0_6b_decode = _builders(QWEN3_0_6B)
qwen3_8b_train, qwen3_8b_prefill, qwen3_8b_decode = _builders(QWEN3_8B)
qwen3_32b_train, qwen3_32b_prefill, qwen3_32b_decode = _builders(QWEN3_32B)
