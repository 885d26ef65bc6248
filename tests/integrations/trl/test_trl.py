"""TRL's trainers on a tiny random Llama, offline: SFT and DPO as on the CPU, GRPO end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed")

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["<pad>", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "to", "house"]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    """Accelerate keeps its device for the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    before = torch.tpu.stats()["fallbacks"]
    yield
    assert torch.tpu.stats()["fallbacks"] == before
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def tokenizer() -> Any:
    made = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(WORDS),
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def history(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def both(train: Any) -> Any:
    """The trainer on the device, after its losses were compared with the CPU's."""
    want = history(train(use_cpu=True))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    trainer = train()
    assert {p.device.type for p in trainer.model.parameters()} == {"tpu"}
    got = history(trainer)
    assert len(got) == COMMON["max_steps"] and got == pytest.approx(want, rel=1e-3)
    return trainer


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    texts = ["the cat sat on a mat", "a dog ran to the big red house"] * 6

    def train(**options: Any) -> SFTTrainer:
        arguments = SFTConfig(str(tmp_path), max_length=16, **COMMON, **options)
        trainer = SFTTrainer(
            model(),
            arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
        )
        trainer.train()
        return trainer

    losses = history(both(train))
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_direct_preference_optimization(tmp_path: Path) -> None:
    pairs = {
        "prompt": ["the cat", "a big dog"] * 6,
        "chosen": [" sat on a mat", " ran to the house"] * 6,
        "rejected": [" ran and ran", " sat"] * 6,
    }

    def train(**options: Any) -> DPOTrainer:
        arguments = DPOConfig(str(tmp_path), max_length=16, **COMMON, **options)
        trainer = DPOTrainer(
            model(),
            ref_model=model(),  # the default loads it again by name
            args=arguments,
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer(),
        )
        trainer.train()
        return trainer

    losses = history(both(train))
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are equal
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_group_relative_policy_optimization(tmp_path: Path) -> None:
    """Samples are the device's own, so the reward has to rise instead of being the CPU's."""

    def cats(completions: list[str], **_: Any) -> list[float]:
        return [float(text.split().count("cat")) for text in completions]

    options = {**COMMON, "max_steps": 8, "learning_rate": 2e-2, "per_device_train_batch_size": 16}
    trainer = GRPOTrainer(
        model(),
        reward_funcs=cats,
        args=GRPOConfig(
            str(tmp_path), num_generations=8, max_completion_length=6, beta=0.0, **options
        ),
        train_dataset=Dataset.from_dict({"prompt": ["the cat", "a dog"] * 80}),
        processing_class=tokenizer(),
    )
    trainer.train()
    rewards = history(trainer, "reward")
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.5
    assert {p.device.type for p in trainer.model.parameters()} == {"tpu"}
