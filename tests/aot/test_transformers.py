"""Hugging Face models as they come: captured whole, their layers one loop."""

from __future__ import annotations

import pytest
import torch

from tests.aot.test_capture import evaluate, state_of
from torch_tpu.aot.capture import capture
from torch_tpu.aot.program import write

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def llama(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_inference_gives_the_models_logits() -> None:
    torch.manual_seed(0)
    model = llama(4)
    tokens = torch.randint(97, (2, 12))
    captured = capture(model, (), {"input_ids": tokens, "use_cache": False})
    assert captured.loops == 1
    values = [*state_of(model, captured).values(), tokens]
    assert [i.role for i in captured.inputs[len(values) - 1 :]] == ["input"]
    logits = evaluate(captured, values)[0]
    expected = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_object_that_layers_write_to_is_not_folded() -> None:
    torch.manual_seed(0)
    model = llama(4)
    tokens = torch.randint(97, (2, 12))
    captured = capture(model, (), {"input_ids": tokens, "use_cache": True})
    assert captured.loops == 0
    logits = evaluate(captured, [*state_of(model, captured).values(), tokens])[0]
    expected = model(input_ids=tokens, use_cache=True).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_training_step_needs_no_loss_function() -> None:
    with torch.device("meta"):
        model, tokens = llama(5), torch.zeros(2, 12, dtype=torch.long)
    arguments = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    captured = capture(model, (), arguments, train=True)
    assert captured.loops == 2
    text = write(captured).text
    # The result is the loss; every parameter and its two moments are donated.
    trained = sum(i.role == "parameter" for i in captured.inputs)
    assert text.count("tf.aliasing_output") == 4 * trained  # with the step counts
