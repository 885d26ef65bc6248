"""Scaled dot product attention as one program, with its gradient.

Scores and softmax are float32 for half inputs; the products multiply in the inputs' dtype and
accumulate in float32. Fewer key heads than query heads means grouped queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_tpu.lowering.emit import OpBuilder
from torch_tpu.lowering.registry import lower
from torch_tpu.lowering.types import Value, opmath_dtype

_MASKED = -math.inf


@dataclass(frozen=True)
class _Heads:
    """query (B, K, G * Q, D), G query heads for each of K key heads; key, value (B, K, S, …)."""

    query: Value
    key: Value
    value: Value
    batch: int
    query_heads: int
    rows: int

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(B, H, Q, S): one matrix for each query head."""
        return (self.batch, self.query_heads, self.rows, self.key.shape[2])


def _four_dims(b: OpBuilder, x: Value) -> Value:
    return b.unsqueeze(x, 0) if x.rank == 3 else x


def _grouped(b: OpBuilder, x: Value, key_heads: int) -> Value:
    """(B, H, Q, D) as (B, key heads, G * Q, D)."""
    batch, _, _, width = x.shape
    return b.reshape(x, (batch, key_heads, math.prod(x.shape[1:3]) // key_heads, width))


def _heads(b: OpBuilder, query: Value, key: Value, value: Value) -> _Heads:
    q, k, v = (_four_dims(b, t) for t in (query, key, value))
    if q.shape[1] % k.shape[1]:
        raise RuntimeError(
            f"scaled_dot_product_attention: {q.shape[1]} query heads; expected a multiple of the "
            f"{k.shape[1]} key heads"
        )
    batch, heads, rows, _ = q.shape
    return _Heads(_grouped(b, q, k.shape[1]), k, v, batch, heads, rows)


def _dot(b: OpBuilder, x: Value, y: Value, contract: tuple[int, int]) -> Value:
    """Batched product over the first two dims, accumulated in float32 for half inputs."""
    first, second = contract
    return b.dot_general(x, y, ([first], [second]), ([0, 1], [0, 1]), opmath_dtype(x.dtype))


def _scores(b: OpBuilder, h: _Heads, bias: Value | None, is_causal: bool, scale: float) -> Value:
    """Scaled, biased and masked scores (B, H, Q, S)."""
    shape = h.scores_shape
    scores = b.reshape(b.mul(_dot(b, h.query, h.key, (3, 3)), scale), shape)
    if bias is not None:
        if bias.is_bool:
            scores = b.select(b.broadcast_to(bias, shape), scores, _MASKED)
        else:
            scores = b.add(scores, b.broadcast_to(b.convert(bias, scores.dtype), shape))
    if is_causal:
        allowed = b.ge(b.iota(shape, 2, torch.int32), b.iota(shape, 3, torch.int32))
        scores = b.select(allowed, scores, _MASKED)
    return scores


def _finite(b: OpBuilder, x: Value) -> Value:
    """0 for the -inf of a fully masked row, so that differences with it stay -inf."""
    return b.select(b.eq(x, _MASKED), 0, x)


def _scale(scale: float | None, query: Value) -> float:
    width = query.shape[-1]
    return (1.0 / math.sqrt(width) if width else 1.0) if scale is None else scale


def _kept(b: OpBuilder, state: Value, shape: Sequence[int], p: float) -> Value:
    """1 / (1 - p) where the dropout keeps an element, else 0."""
    bits = b.random_step(state, shape)[1]
    keep = b.ge(b.uniform_from_bits(bits, torch.float32), p)
    return b.select(keep, b.constant(1.0 / (1.0 - p) if p < 1 else 0.0, torch.float32), 0.0)


@lower("aten._scaled_dot_product_fused_attention_overrideable")
def attention(
    b: OpBuilder,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> list[Value]:
    """query (B, H, Q, D), key (B, K, S, D), value (B, K, S, E), bias broadcastable to (B, H, Q, S).

    Returns the tensors among the op's results: output (B, H, Q, E), the log-sum-exp of each row
    (-inf where a row is fully masked; its output is 0), and two i64 scalars from which the backward
    draws the same dropout mask.
    """
    h = _heads(b, query, key, value)
    scores = _scores(b, h, attn_bias, is_causal, _scale(scale, query))
    shape = scores.shape
    if shape[3]:
        top = _finite(b, b.reduce(scores, "max", [3], keepdim=True))
        weights = b.exp(b.sub(scores, b.broadcast_to(top, shape)))
        total = b.reduce(weights, "add", [3], keepdim=True)
    else:
        top = total = b.constant(0, scores.dtype, (*shape[:3], 1))
        weights = scores
    # A row without any key sums to 0; dividing by 1 keeps it 0.
    divisor = b.select(b.eq(total, 0), 1, total)
    logsumexp = b.reshape(b.add(top, b.log(total)), shape[:3])
    if dropout_p > 0:
        state = b.random_start()
        weights = b.mul(weights, b.convert(_kept(b, state, shape, dropout_p), weights.dtype))
        seed = b.bitcast(b.slice_dim(state, 0, 0, 2), torch.int64)
        offset = b.convert(b.index_dim(state, 0, 2), torch.int64)
    else:
        seed = offset = b.constant(0, torch.int64)
    probabilities = b.div(weights, b.broadcast_to(divisor, shape))
    narrow = b.convert(_grouped(b, probabilities, h.key.shape[1]), value.dtype)
    out = b.reshape(_dot(b, narrow, h.value, (3, 2)), b.out_shape)
    return [
        b.convert(out, b.out_dtype),
        b.convert(b.reshape(logsumexp, b.results[1][0]), b.results[1][1]),
        seed,
        offset,
    ]


def _reduce_to(b: OpBuilder, x: Value, shape: Sequence[int]) -> Value:
    """Sum over the dims along which ``shape`` was broadcast to x's shape."""
    lead = x.rank - len(shape)
    dims = [d for d in range(x.rank) if d < lead or (shape[d - lead] == 1 and x.shape[d] != 1)]
    return b.reshape(b.reduce(x, "add", dims), shape)


@lower("aten._scaled_dot_product_fused_attention_overrideable_backward")
def attention_backward(
    b: OpBuilder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    attn_bias: Value | None,
    grad_input_mask: Sequence[bool],
    out: Value,
    logsumexp: Value,
    cum_seq_q: Value | None,
    cum_seq_k: Value | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Value,
    philox_offset: Value,
    *,
    scale: float | None = None,
) -> list[Value]:
    """Gradients of query, key, value and (where there is one) bias; zeros where not asked for."""
    factor = _scale(scale, query)
    h = _heads(b, query, key, value)
    key_heads, shape = h.key.shape[1], h.scores_shape
    scores = _scores(b, h, attn_bias, is_causal, factor)
    wide = scores.dtype
    if wide is torch.float64:
        # PyTorch keeps the log-sum-exp in float32, which is too coarse here.
        top = b.broadcast_to(_finite(b, b.reduce(scores, "max", [3], keepdim=True)), shape)
        p = b.exp(b.sub(scores, top))
        total = b.reduce(p, "add", [3], keepdim=True)
        p = b.div(p, b.broadcast_to(b.select(b.eq(total, 0), 1, total), shape))
    else:
        lse = _finite(b, b.reshape(b.convert(logsumexp, wide), (*shape[:3], 1)))
        p = b.exp(b.sub(scores, b.broadcast_to(lse, shape)))
    g = _grouped(b, _four_dims(b, grad), key_heads)
    product = b.mul(b.convert(grad, wide), b.convert(out, wide))
    delta = b.reshape(b.reduce(product, "add", [product.rank - 1]), (*shape[:3], 1))
    dp = b.reshape(_dot(b, g, h.value, (3, 3)), shape)
    dropped = p
    if dropout_p > 0:
        words = [b.bitcast(philox_seed, torch.uint32), b.convert(philox_offset, torch.uint32)]
        state = b.concatenate([words[0], b.reshape(words[1], (1,))], 0)
        kept = b.convert(_kept(b, state, shape, dropout_p), wide)
        dropped, dp = b.mul(p, kept), b.mul(dp, kept)
    ds = b.mul(p, b.sub(dp, b.broadcast_to(delta, shape)))

    def narrow(x: Value) -> Value:
        return b.convert(_grouped(b, x, key_heads), query.dtype)

    def gradient(index: int, compute: Value) -> Value:
        spec_shape, spec_dtype = b.results[index]
        return b.convert(b.reshape(compute, spec_shape), spec_dtype)

    rules = [
        lambda: b.mul(_dot(b, narrow(ds), h.key, (3, 2)), factor),
        lambda: b.mul(_dot(b, narrow(ds), h.query, (2, 2)), factor),
        lambda: _dot(b, narrow(dropped), g, (2, 2)),
        lambda: _reduce_to(b, ds, attn_bias.shape if attn_bias is not None else ()),
    ]
    outs = []
    for i, (result_shape, dtype) in enumerate(b.results):
        wanted = grad_input_mask[i] and dtype is not torch.bool
        outs.append(gradient(i, rules[i]()) if wanted else b.constant(0, dtype, result_shape))
    return outs
