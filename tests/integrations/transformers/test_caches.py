"""`generate` with the caches there are: static with its own compile, sliding, hybrid, recurrent."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import recipes, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
STATIC = {**GREEDY, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    before = torch.tpu.stats()["fallbacks"]
    yield
    assert torch.tpu.stats()["fallbacks"] == before
    torch._dynamo.reset()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def prompt(vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, 5), generator=torch.Generator().manual_seed(3))


def causal(model_type: str) -> Any:
    """A tiny language model of the sweep's kind, with its head."""
    torch.manual_seed(0)
    config = recipes.configure(model_type, tiny.shrink(CONFIG_MAPPING[model_type]()))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    tiny._randomise(model)
    return model


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def test_static_cache_compiles_the_decoding_step() -> None:
    """One graph, that further prompts and more tokens use again; the prompt itself runs eagerly."""
    model = llama()
    want = model.generate(prompt(), **STATIC)
    model = model.to("tpu")
    assert torch.equal(model.generate(prompt().to("tpu"), **STATIC).cpu(), want)
    assert graphs() == 1
    before = torch.tpu.stats()["compiles"]
    again = model.generate(prompt().flip(0).to("tpu"), **STATIC)
    assert torch.equal(again.cpu(), want.flip(0))
    assert graphs() == 1 and torch.tpu.stats()["compiles"] == before


@pytest.mark.full
def test_two_programs_where_the_whole_forward_is_compiled() -> None:
    """The prompt's and the step's; a second prompt of the same length adds none."""
    model = llama()
    want = model.generate(prompt(), **STATIC)
    model = model.to("tpu")
    model.forward = torch.compile(model.forward, backend="tpu", dynamic=False, fullgraph=True)
    for _ in range(2):
        got = model.generate(prompt().to("tpu"), **STATIC, disable_compile=True)
        assert torch.equal(got.cpu(), want)
        assert graphs() == 2


@pytest.mark.full
@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize(
    "model_type", ["gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "olmo3", "cohere2"]
)
def test_sliding_and_hybrid_caches(model_type: str, implementation: str | None) -> None:
    """More tokens than the window (16) holds, so that it has to move."""
    model = causal(model_type)
    options = {**GREEDY, "max_new_tokens": 20, "min_new_tokens": 20}
    options["cache_implementation"] = implementation
    ids = prompt(500)
    want = model.generate(ids, **options)
    assert torch.equal(model.to("tpu").generate(ids.to("tpu"), **options).cpu(), want)


@pytest.mark.full
@pytest.mark.parametrize(
    "model_type", ["mamba", "mamba2", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next"]
)
def test_recurrent_states(model_type: str) -> None:
    model, ids = causal(model_type), prompt(500)
    want = model.generate(ids, **GREEDY)
    assert torch.equal(model.to("tpu").generate(ids.to("tpu"), **GREEDY).cpu(), want)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_encoder_and_decoder(model_type: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = recipes.configure(model_type, tiny.shrink(CONFIG_MAPPING[model_type]()))
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.generation_config.decoder_start_token_id = 0
    ids = prompt(500)
    want = model.generate(ids, **GREEDY, **options)
    model = copy.deepcopy(model).to("tpu")
    assert torch.equal(model.generate(ids.to("tpu"), **GREEDY, **options).cpu(), want)
