"""Trains a small character-level GPT on the Python standard library's own sources.

It shows the device at its main job, with no download: the text is read from the running Python,
the model (1 M parameters) learns on `tpu`, writes a sample, and the first losses are compared
with the same run on the CPU. Exit code 0 means that they agree.

    python examples/char_gpt.py [--device tpu] [--steps 800] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

CHECKED_STEPS = 20
TOLERANCE = 1e-4  # relative; f32 sums taken in another order differ by about 1e-6
PROMPT = "def "


@dataclass(frozen=True)
class Config:
    width: int = 144
    heads: int = 4
    layers: int = 4
    context: int = 64
    batch: int = 16
    learning_rate: float = 3e-3
    warmup: int = 20
    seed: int = 1


# --- text ---------------------------------------------------------------------------------------


def read_corpus(limit: int = 4_000_000) -> str:
    """Concatenated ASCII sources of the standard library's top-level modules and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "idlelib",
        "lib2to3",
        "encodings",
    }
    parts: list[str] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if left_out & set(path.relative_to(root).parts):
            continue
        text = path.read_bytes()
        if text.isascii() and size < limit:
            parts.append(text.decode("ascii"))
            size += len(text)
    if size < 100_000:
        raise SystemExit(f"char_gpt: no standard library sources below {root}")
    return "\n".join(parts)


class Corpus:
    """Characters as integers, the last 5 % held out; batches are drawn on the CPU."""

    def __init__(self, text: str, config: Config) -> None:
        self.alphabet = sorted(set(text))
        self.index = {char: i for i, char in enumerate(self.alphabet)}
        data = torch.tensor([self.index[char] for char in text])
        cut = len(data) * 95 // 100
        self.train, self.held_out = data[:cut], data[cut:]
        self.config = config

    def batch(self, data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of shape (batch, context), int64, on the CPU."""
        size, length = self.config.batch, self.config.context
        starts = torch.randint(len(data) - length, (size, 1), generator=generator)
        window = data[starts + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]


# --- model --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a GELU MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def sinusoids(length: int, width: int) -> Tensor:
    """Start of the position table (length, width), from "Attention Is All You Need", 3.5.

    It is learned further; a random start takes many more steps to find the previous character.
    """
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1)


class CharGPT(nn.Module):
    """Decoder-only transformer over characters."""

    def __init__(self, vocabulary: int, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.token.weight, std=0.3)
        self.position.weight.data.copy_(0.3 * sinusoids(config.context, config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) for tokens (batch, length), int64."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- training -----------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to a tenth: a new number every step, compiled once."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(
    corpus: Corpus,
    config: Config,
    device: str,
    steps: int,
    planned_steps: int,
    report: Callable[[int, float], None],
) -> tuple[CharGPT, list[float]]:
    """The first `steps` of a run planned for `planned_steps`; the trained model and all losses.

    Weights are initialised and batches drawn on the CPU, so runs on two devices are comparable.
    """
    torch.manual_seed(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    model = CharGPT(len(corpus.alphabet), config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, planned_steps, config)
        tokens, targets = (t.to(device) for t in corpus.batch(corpus.train, generator))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return model, losses


@torch.no_grad()
def held_out_loss(model: CharGPT, corpus: Corpus, device: str, batches: int = 8) -> float:
    """Mean loss on text that was not trained on, in nats per character."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(batches):
        tokens, targets = (t.to(device) for t in corpus.batch(corpus.held_out, generator))
        total += F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    return total / batches


@torch.no_grad()
def sample(model: CharGPT, corpus: Corpus, device: str, length: int, temperature: float) -> str:
    """Text continuing PROMPT, one character at a time.

    The window keeps its full size: what lies right of the current position is invisible to causal
    attention, so every step runs the same programs and nothing is compiled for a growing length.
    """
    context = corpus.config.context
    generator = torch.Generator().manual_seed(corpus.config.seed)
    text = PROMPT
    window = torch.zeros(1, context, dtype=torch.int64)
    window[0, : len(text)] = torch.tensor([corpus.index[char] for char in text])
    window = window.to(device)
    position = len(text)
    for _ in range(length):
        if position == context:
            window, position = window.roll(-1, 1), context - 1
        logits = model(window)[0, position - 1] / temperature
        chosen = int(torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator))
        window[0, position] = chosen
        position += 1
        text += corpus.alphabet[chosen]
    return text


# --- what is shown ------------------------------------------------------------------------------


def counters(device: str) -> dict[str, int]:
    """Compile and cache counts of the device; empty for a device that has none."""
    if torch.device(device).type != "tpu":
        return {}
    stats = torch.tpu.stats()
    return {name: int(stats[name]) for name in ("compiles", "hits", "fallbacks")}


class Reporter:
    """Progress: a live bar on a terminal, a line every 50 steps in a pipe."""

    def __init__(self, console: Console, label: str, device: str, steps: int, tokens: int) -> None:
        self.console, self.label, self.device = console, label, device
        self.steps, self.tokens = steps, tokens
        self.times = [time.perf_counter()]
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(label, total=steps, figures="")

    def __enter__(self) -> Reporter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def rate(self, last: int) -> float:
        """Tokens per second over the last steps."""
        recent = self.times[-last - 1 :]
        return self.tokens * (len(recent) - 1) / (recent[-1] - recent[0])

    def __call__(self, step: int, loss: float) -> None:
        self.times.append(time.perf_counter())
        figures = f"loss {loss:.3f}  {self.rate(10):,.0f} tokens/s"
        for name, value in counters(self.device).items():
            figures += f"  {value:,} {name}"
        self.progress.update(self.task, completed=step + 1, figures=figures)
        if not self.console.is_terminal and (step % 50 == 0 or step + 1 == self.steps):
            self.console.print(f"{self.label} {step + 1:4}/{self.steps}  {figures}")


def run(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Trains, samples and checks; the summary that `--json` prints."""
    config, device, steps = Config(), options.device, options.steps
    corpus = Corpus(read_corpus(), config)
    tokens = config.batch * config.context
    console.print(
        f"{len(corpus.train) + len(corpus.held_out):,} characters of Python source, "
        f"{len(corpus.alphabet)} different ones; device {device}, torch {torch.__version__}"
    )

    start = time.perf_counter()
    with Reporter(console, "training", device, steps, tokens) as reporter:
        model, losses = train(corpus, config, device, steps, steps, reporter)
    seconds = time.perf_counter() - start
    held_out = held_out_loss(model, corpus, device)
    parameters = sum(p.numel() for p in model.parameters())
    settled = max(1, steps - CHECKED_STEPS)
    console.print(
        f"{parameters:,} parameters: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {seconds:.0f} s "
        f"(held-out text: {held_out:.3f})\n"
    )

    text = sample(model, corpus, device, options.sample, options.temperature)
    console.print(text, style="cyan", markup=False, highlight=False)

    checked = min(CHECKED_STEPS, steps)
    console.print()
    with Reporter(console, "cpu check", "cpu", checked, tokens) as cpu_reporter:
        _, reference = train(corpus, config, "cpu", checked, steps, cpu_reporter)
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False)]
    worst = max(differences, default=math.inf)
    passed = worst <= TOLERANCE  # False for NaN too
    console.print(
        f"{'PASS' if passed else 'FAIL'}: the first {checked} losses on {device} and on cpu differ "
        f"by at most {worst:.1e} relative (allowed: {TOLERANCE:.0e})",
        style="bold green" if passed else "bold red",
        highlight=False,
    )
    return {
        "device": device,
        "torch": str(torch.__version__),
        "config": asdict(config),
        "parameters": parameters,
        "steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "held_out_loss": held_out,
        "train_seconds": round(seconds, 2),
        "tokens_per_second": round(reporter.rate(settled)),
        "cpu_tokens_per_second": round(cpu_reporter.rate(max(1, checked - 5))),
        **counters(device),
        "sample": text,
        "checked_steps": checked,
        "worst_relative_difference": worst,
        "passed": passed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's sources.")
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--sample", type=int, default=400, help="characters to generate")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--json", action="store_true", help="summary as JSON on standard output")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.device.startswith("tpu"):
        import torch_tpu  # noqa: F401  (`import torch` does it too where the package is installed)

    # On a TPU f32 matmuls would otherwise be free to multiply in bf16.
    torch.set_float32_matmul_precision("highest")
    summary = run(options, Console(stderr=options.json, soft_wrap=True))
    if options.json:
        print(json.dumps(summary, indent=2))
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
