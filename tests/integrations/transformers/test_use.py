"""Loading, generation, pipelines and training as users of Transformers write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
NEW = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


@pytest.fixture(scope="module")
def saved(on_cpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    on_cpu.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran"]
    words += [f"w{i}" for i in range(64 - len(words))]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words_to_ids = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(words_to_ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_tpu(saved: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved, device_map="tpu").eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_fallbacks() -> Any:
    before = torch.tpu.stats()["fallbacks"]
    yield
    assert torch.tpu.stats()["fallbacks"] == before


def places(model: torch.nn.Module) -> set[str]:
    return {p.device.type for p in model.parameters()}


def test_device_map_tpu(on_tpu: Any, on_cpu: Any, ids: torch.Tensor) -> None:
    assert places(on_tpu) == {"tpu"}
    assert on_tpu.lm_head.weight is on_tpu.model.embed_tokens.weight
    torch.testing.assert_close(on_tpu(ids.to("tpu")).logits.cpu(), on_cpu(ids).logits)


def test_device_map_auto(saved: Path) -> None:
    assert places(AutoModelForCausalLM.from_pretrained(saved, device_map="auto")) == {"tpu"}


def test_layers_on_the_cpu_visit_the_device(saved: Path, on_cpu: Any, ids: torch.Tensor) -> None:
    places = {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": "cpu",
        "model.norm": 0,
        "model.rotary_emb": 0,
        "lm_head": 0,
    }
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=places)
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "tpu"
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"  # between visits
    torch.testing.assert_close(model(ids.to("tpu")).logits.cpu(), on_cpu(ids).logits)


def test_bfloat16(saved: Path, ids: torch.Tensor) -> None:
    wide = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16, device_map="tpu")
    got = model(ids.to("tpu")).logits
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), wide(ids).logits, rtol=5e-2, atol=5e-2)


def test_save_pretrained(on_tpu: Any, tmp_path: Path) -> None:
    on_tpu.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for want, got in zip(on_tpu.parameters(), again.parameters(), strict=True):
        assert torch.equal(want.cpu(), got)


def test_loading_makes_no_program(saved: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved, device_map="tpu")
    before = torch.tpu.stats()["compiles"]
    AutoModelForCausalLM.from_pretrained(saved, device_map="tpu")
    assert torch.tpu.stats()["compiles"] == before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2},
        {"cache_implementation": "static", "disable_compile": True},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        pytest.param({"num_beams": 4, "num_return_sequences": 2}, marks=pytest.mark.full),
        pytest.param({"num_beams": 2, "length_penalty": 0.5}, marks=pytest.mark.full),
        pytest.param({"cache_implementation": "quantized"}, marks=pytest.mark.full),
    ],
    ids=lambda o: "-".join(map(str, o.values())) or "greedy",
)
def test_generate(on_tpu: Any, on_cpu: Any, ids: torch.Tensor, options: dict[str, Any]) -> None:
    if options.get("cache_implementation") == "quantized":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    want = on_cpu.generate(ids, **NEW, **options)
    got = on_tpu.generate(ids.to("tpu"), **NEW, **options)
    assert got.device.type == "tpu"
    assert torch.equal(got.cpu(), want)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_speculative_generation(on_tpu: Any, on_cpu: Any, ids: torch.Tensor, kind: str) -> None:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 2}
    if kind == "assistant":
        options = {"assistant_model": on_tpu}
    got = on_tpu.generate(ids[:1].to("tpu"), **NEW, **options)
    assert torch.equal(got.cpu(), on_cpu.generate(ids[:1], **NEW))


def test_sampling_repeats_with_a_seed(on_tpu: Any, ids: torch.Tensor) -> None:
    options = {
        "max_new_tokens": 6,
        "do_sample": True,
        "top_k": 20,
        "top_p": 0.95,
        "temperature": 0.9,
    }
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(on_tpu.generate(ids.to("tpu"), **options).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_left_padding(on_tpu: Any, on_cpu: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    want = on_cpu.generate(ids, attention_mask=mask, **NEW)
    got = on_tpu.generate(ids.to("tpu"), attention_mask=mask.to("tpu"), **NEW)
    assert torch.equal(got.cpu(), want)


def test_generation_settles_with_a_static_cache(on_tpu: Any, ids: torch.Tensor) -> None:
    """A second prompt of the same length makes no program, nor do more new tokens."""
    options = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    on_tpu.generate(ids.to("tpu"), max_new_tokens=8, min_new_tokens=8, **options)
    before = torch.tpu.stats()["compiles"]
    on_tpu.generate(ids.flip(0).to("tpu"), max_new_tokens=8, min_new_tokens=8, **options)
    assert torch.tpu.stats()["compiles"] == before


def test_sliding_window_cache(ids: torch.Tensor) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    config = Gemma2Config(**sizes, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
    model = Gemma2ForCausalLM(config).eval()
    want = model.generate(ids, **NEW)
    assert torch.equal(model.to("tpu").generate(ids.to("tpu"), **NEW).cpu(), want)


def test_pipeline(saved: Path) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    want = pipeline("text-generation", model=str(saved), device="cpu")("the cat sat", **options)
    generate = pipeline("text-generation", model=str(saved), device="tpu")
    assert generate.device.type == "tpu" and places(generate.model) == {"tpu"}
    assert generate("the cat sat", **options) == want


def test_gradient_checkpointing(on_cpu: Any, ids: torch.Tensor) -> None:
    gradients = []
    for device, checkpointed in (("cpu", False), ("tpu", True)):
        model = copy.deepcopy(on_cpu).to(device).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        given = ids.to(device)
        model(given, labels=given).loss.backward()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


class _Sentences(torch.utils.data.Dataset):
    """Label 1 where token 5 occurs."""

    def __init__(self, n: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(6, 60, (n, 8), generator=generator)
        self.ids[::2, 3] = 5

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": (self.ids[i] == 5).any().long()}


def _train(folder: Path, **options: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=2e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=_Sentences(),
        eval_dataset=_Sentences(16),
    )
    trainer.train()
    return [h["loss"] for h in trainer.state.log_history if "loss" in h], trainer


def test_trainer_uses_the_device_without_being_told(tmp_path: Path) -> None:
    want, _ = _train(tmp_path, use_cpu=True)
    # Accelerate keeps its device for the process.
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    got, trainer = _train(tmp_path)
    assert trainer.args.device.type == trainer.accelerator.device.type == "tpu"
    assert places(trainer.model) == {"tpu"}
    assert len(got) == 12 and got == pytest.approx(want, rel=1e-3)
    assert trainer.evaluate()["eval_loss"] < want[0]


@pytest.mark.full
def test_trainer_bf16_with_accumulation_and_a_checkpoint(tmp_path: Path) -> None:
    got, trainer = _train(tmp_path, bf16=True, gradient_accumulation_steps=2, max_grad_norm=1.0)
    assert got[-1] < got[0]
    trainer.save_model(str(tmp_path / "model"))
    trainer._save_checkpoint(trainer.model, trial=None)
    trainer.train(resume_from_checkpoint=True)
