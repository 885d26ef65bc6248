"""The fast paths that nn.MultiheadAttention and nn.TransformerEncoderLayer take for inference."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value

Specs = list[tuple[tuple[int, ...], torch.dtype] | None]

# What a mask given to the fast path covers, as nn.MultiheadAttention.merge_masks numbers it.
_ATTENTION, _PADDING = 0, 1


def _project(b: OpBuilder, x: Value, weight: Value, bias: Value) -> Value:
    return b.call(
        "aten.add.Tensor", b.call("aten.matmul.default", x, b.transpose(weight, (1, 0))), bias
    )


def _heads(b: OpBuilder, x: Value, heads: int) -> Value:
    """(B, T, D) as (B, H, T, D / H)."""
    batch, rows, width = x.shape
    return b.transpose(b.reshape(x, (batch, rows, heads, width // heads)), (0, 2, 1, 3))


def _merged_mask(b: OpBuilder, mask: Value, kind: int | None, shape: tuple[int, ...]) -> Value:
    """The mask, True where a score is left out, as wide as the scores (B, H, T, S)."""
    if kind == _ATTENTION and mask.rank == 2:
        mask = b.reshape(mask, (1, 1, *mask.shape))
    elif kind == _PADDING:
        mask = b.reshape(mask, (mask.shape[0], 1, 1, mask.shape[1]))
    return b.broadcast_to(mask, shape)


def _attention_specs(query: Value, key: Value, *rest: Any) -> Specs:
    heads, need_weights, average = rest[2], rest[8], rest[9]
    batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
    weights = (batch, rows, columns) if average else (batch, heads, rows, columns)
    return [(query.shape, query.dtype), (weights, query.dtype) if need_weights else None]


@lower("aten._native_multi_head_attention", specs=_attention_specs)
def native_multi_head_attention(
    b: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    num_head: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None,
    need_weights: bool,
    average_attn_weights: bool,
    mask_type: int | None,
) -> list[Value]:
    projected = []
    for i, x in enumerate((query, key, value)):
        weight = b.slice_dim(qkv_weight, 0, i * embed_dim, (i + 1) * embed_dim)
        bias = b.slice_dim(qkv_bias, 0, i * embed_dim, (i + 1) * embed_dim)
        projected.append(_heads(b, _project(b, x, weight, bias), num_head))
    q, k, v = projected
    q = b.mul(q, 1.0 / math.sqrt(embed_dim // num_head))
    scores = b.call("aten.matmul.default", q, b.transpose(k, (0, 1, 3, 2)))
    if mask is not None:
        left_out = _merged_mask(b, b.convert(mask, torch.bool), mask_type, scores.shape)
        scores = b.select(left_out, -math.inf, scores)
    weights = b.call("aten._softmax.default", scores, -1, False)
    out = b.transpose(b.call("aten.matmul.default", weights, v), (0, 2, 1, 3))
    results = [_project(b, b.reshape(out, query.shape), proj_weight, proj_bias)]
    if need_weights:
        results.append(b.call("aten.mean.dim", weights, [1]) if average_attn_weights else weights)
    return results


def _layer_specs(src: Value, *_: Any) -> Specs:
    return [(src.shape, src.dtype)]


@lower("aten._transformer_encoder_layer_fwd", specs=_layer_specs)
def transformer_encoder_layer(
    b: OpBuilder,
    src: Value,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None,
    mask_type: int | None,
) -> Value:
    def norm(x: Value, weight: Value, bias: Value) -> Value:
        return b.call("aten.native_layer_norm.default", x, [embed_dim], weight, bias, eps)[0]

    def attention(x: Value) -> Value:
        return b.call(
            "aten._native_multi_head_attention.default",
            *(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias),
            *(mask, False, True, mask_type),
        )[0]

    def feed_forward(x: Value) -> Value:
        hidden = _project(b, x, ffn_weight_1, ffn_bias_1)
        hidden = b.call("aten.gelu.default" if use_gelu else "aten.relu.default", hidden)
        return _project(b, hidden, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = b.add(attention(norm(src, norm_weight_1, norm_bias_1)), src)
        return b.add(feed_forward(norm(x, norm_weight_2, norm_bias_2)), x)
    x = norm(b.add(attention(src), src), norm_weight_1, norm_bias_1)
    return norm(b.add(feed_forward(x), x), norm_weight_2, norm_bias_2)
