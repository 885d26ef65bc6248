"""Model types of Transformers, forward and backward against the CPU, without a CPU fallback.

A covering dozen here, the fixed list in the full tests; `make test-models` takes all types.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from . import compare, tiny

COVERING = [
    "bert",
    "clip",
    "deepseek_v3",
    "dinov2",
    "gemma3_text",
    "llama",
    "mamba",
    "qwen3_moe",
    "segformer",
    "t5",
    "wav2vec2",
    "whisper",
]
FIXED = [
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mistral",
    "mixtral",
    "phi",
    "phi3",
    "glm",
    "glm4",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "cohere",
    "granite",
    "smollm3",
    "mamba",
    "mamba2",
    "jamba",
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "deberta-v2",
    "modernbert",
    "xlm-roberta",
    "mpnet",
    "t5",
    "bart",
    "whisper",
    "wav2vec2",
    "hubert",
    "dinov2",
    "dinov3_vit",
    "vit",
    "swin",
    "convnext",
    "resnet",
    "segformer",
    "detr",
    "rt_detr",
    "sam",
    "clip",
    "siglip",
    "llava",
    "qwen2_vl",
    "blip",
]


def _check(model_type: str) -> None:
    result = compare.check(model_type)
    assert result.status == "ok", result.detail
    assert result.fallbacks == []
    assert result.outputs and result.gradients


@pytest.mark.parametrize("model_type", COVERING)
def test_covering(model_type: str) -> None:
    _check(model_type)


@pytest.mark.full
@pytest.mark.parametrize("model_type", [t for t in FIXED if t not in COVERING])
def test_fixed_list(model_type: str) -> None:
    _check(model_type)


@pytest.mark.full
@pytest.mark.parametrize("model_type", FIXED)
def test_fixed_list_compiled(model_type: str) -> None:
    result = compare.check(model_type, compiled=True)
    assert result.status == "ok", result.detail
    assert result.fallbacks == []
    assert (result.graphs, result.breaks) == (1, 0)


def test_lists_name_existing_types() -> None:
    assert len(FIXED) == len(set(FIXED)) == 60
    assert set(COVERING) <= set(FIXED) <= set(tiny.model_types())


def test_comparison_sees_a_wrong_element() -> None:
    want = [torch.ones(4)], {"w": torch.ones(3)}
    assert compare.differences(want, ([torch.ones(4)], {"w": torch.ones(3)})) == []
    off = torch.tensor([1.0, 1.0, 1.0, 1.01])
    assert compare.differences(want, ([off], {"w": torch.ones(3)}))
    assert compare.differences(want, ([torch.full((4,), float("nan"))], {"w": torch.ones(3)}))
    assert compare.differences(want, ([torch.ones(4)], {"w": torch.tensor([1.0, 1.0, 1.03])}))
    assert compare.differences(want, ([torch.ones(4)], {}))


def test_a_gradient_with_no_digits_is_told_from_a_wrong_one() -> None:
    """A ReLU on its kink has two gradients and either is right; another has one."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kink = torch.nn.Parameter(torch.tensor([-1.0]))
            self.smooth = torch.nn.Parameter(torch.tensor([1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + torch.cat([self.kink, self.smooth]))

    made = tiny.Tiny(Model(), {"x": torch.ones(2)})
    outputs, gradients = want = compare.run(made.model, made.inputs, "cpu")
    assert gradients["kink"] == 0
    for name, explained in (("kink", True), ("smooth", False)):
        got = (outputs, {**gradients, name: gradients[name] + 0.5})
        found = compare.differences(want, got)
        assert found
        assert (compare._no_digits(made, want, got, found) == []) == explained
