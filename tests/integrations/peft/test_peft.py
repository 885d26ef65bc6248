"""PEFT: adapters trained, saved, loaded, merged and switched on the device, against the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "v_proj"]
KINDS: dict[str, Any] = {
    "lora": LoraConfig(r=4, target_modules=TARGETS),
    "dora": LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "loha": LoHaConfig(r=4, target_modules=TARGETS),
    "lokr": LoKrConfig(r=4, target_modules=TARGETS),
    "vera": VeraConfig(r=4, target_modules=TARGETS),
    "oft": OFTConfig(oft_block_size=4, target_modules=["q_proj", "o_proj"]),
    "adalora": AdaLoraConfig(r=4, init_r=4, target_modules=TARGETS, total_step=20),
}


def base() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=64,
            pad_token_id=0,
        )
    )


def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))


def adapted(kind: str) -> Any:
    torch.manual_seed(1)
    model = get_peft_model(base(), copy.deepcopy(KINDS[kind]))
    with torch.no_grad():  # adapters start as nothing; a test of nothing would pass
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) / 9)
    return model.eval()


def step(model: Any, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits before and adapter weights after one optimizer step."""
    model = model.to(device)
    given = ids().to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    out = model(given, labels=given)
    out.loss.backward()
    optimizer.step()
    new = {n: p.detach().cpu() for n, p in model.named_parameters() if p.requires_grad}
    return out.logits.detach().cpu(), new


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "lora")]
)
def test_training_step(kind: str) -> None:
    model = adapted(kind)
    fallbacks = torch.tpu.stats()["fallbacks"]
    got, got_weights = step(copy.deepcopy(model), "tpu")
    want, want_weights = step(model, "cpu")
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert got_weights and got_weights.keys() == want_weights.keys()
    torch.testing.assert_close(got_weights, want_weights, rtol=1e-3, atol=1e-5)
    assert torch.tpu.stats()["fallbacks"] == fallbacks


def test_save_load_and_merge(tmp_path: Path) -> None:
    model = adapted("lora").to("tpu")
    with torch.no_grad():
        want = model(ids().to("tpu")).logits.cpu()
        plain = base().eval()(ids()).logits
    assert not torch.allclose(want, plain, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base().to("tpu"), tmp_path).eval()
    assert {p.device.type for p in loaded.parameters()} == {"tpu"}
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids().to("tpu")).logits.cpu(), want)
        with loaded.disable_adapter():
            off = loaded(ids().to("tpu")).logits.cpu()
        torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-5)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(ids().to("tpu")).logits.cpu(), want, rtol=1e-4, atol=1e-5)


def test_adapters_load_to_the_device_when_none_is_named() -> None:
    from peft.utils import infer_device

    assert infer_device() == "tpu"


def test_another_accelerator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.utils import infer_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert infer_device() == "cuda"
