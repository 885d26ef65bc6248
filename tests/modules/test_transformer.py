"""Inference through the fast paths of nn.MultiheadAttention and nn.TransformerEncoder."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torch_tpu import _C


def masks(kind: str, rows: int, batch: int) -> dict[str, torch.Tensor]:
    causal = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, rows, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "causal": {"mask": causal},
        "padding": {"src_key_padding_mask": padding},
        "both": {"mask": causal, "src_key_padding_mask": padding},
    }[kind]


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(kind: str, norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()
    x = torch.randn(2, 5, 16)
    given = masks(kind, 5, 2)
    names = {"mask": "src_mask"}
    with torch.no_grad():
        expected = layer(x, **{names.get(n, n): m for n, m in given.items()})
        before = _C.stats()["fallbacks"]
        on_device = copy.deepcopy(layer).to("tpu")
        actual = on_device(x.to("tpu"), **{names.get(n, n): m.to("tpu") for n, m in given.items()})
    assert _C.stats()["fallbacks"] == before
    assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", [(False, True), (True, True), (True, False)])
def test_multihead_attention(weights: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    options = {"need_weights": weights[0], "average_attn_weights": weights[1]}
    with torch.no_grad():
        expected = attention(x, x, x, **options)
        on_device = copy.deepcopy(attention).to("tpu")
        y = x.to("tpu")
        before = _C.stats()["fallbacks"]
        actual = on_device(y, y, y, **options)
    assert _C.stats()["fallbacks"] == before
    assert_close(actual[0].cpu(), expected[0], rtol=1e-4, atol=1e-5)
    if weights[0]:
        assert_close(actual[1].cpu(), expected[1], rtol=1e-4, atol=1e-5)
    else:
        assert actual[1] is None
