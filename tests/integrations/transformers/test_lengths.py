"""Generation settles: programs for buckets of lengths, not for lengths."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import MODE
from torch_tpu import _C

transformers = pytest.importorskip("transformers")


def programs() -> int:
    return int(_C.stats()["compiles"] + _C.stats()["disk_hits"])


@pytest.mark.skipif(MODE != "strict", reason="Fused mode compiles whole recordings")
def test_a_dynamic_cache_compiles_few_programs() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    on_device = transformers.LlamaForCausalLM(config).eval()
    on_device.load_state_dict(model.state_dict())
    on_device.to("tpu")

    def generate(length: int, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 128, (1, length))
        arguments = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        got = on_device.generate(ids.to("tpu"), **arguments).cpu()
        return got, model.generate(ids, **arguments)

    for length, new in ((9, 40), (45, 30), (70, 20), (27, 40), (100, 20), (37, 40)):
        got, want = generate(length, new)
        assert torch.equal(got, want)
    before = programs()
    for length, new in ((61, 20), (83, 30), (50, 40), (110, 15)):
        got, want = generate(length, new)
        assert torch.equal(got, want)
    # 105 tokens of 105 lengths, in buckets that were met before.
    assert programs() - before <= 30
