"""Fused mode: what is recorded, where it is cut, and that nothing else can be told from Strict."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_tpu import _C
from torch_tpu.program import recompiles

FUSED, STRICT = torch.tpu.EagerMode.DEFER_AND_FUSE, torch.tpu.EagerMode.DEFER_NEVER


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    torch.tpu.synchronize()
    _C.clear_fused_programs()
    with torch.tpu.set_eager_mode(FUSED):
        yield
    torch.tpu.synchronize()


def counted(call: Callable[[], object]) -> dict[str, int]:
    """How the counters move during a call."""
    before = _C.stats()
    call()
    after = _C.stats()
    return {name: after[name] - before[name] for name in before}


def test_ops_wait_for_a_reader() -> None:
    x = torch.ones(8).to("tpu")

    def compute() -> None:
        y = x
        for _ in range(10):
            y = y * 1.5 + 0.25
        moved.append(y)

    moved: list[torch.Tensor] = []
    assert counted(compute)["executions"] == 0
    move = counted(lambda: moved[0].cpu())
    assert move["executions"] == move["fused_runs"] == move["compiles"] == 1
    compute()
    move = counted(lambda: moved[1].cpu())
    assert move["executions"] == 1
    assert move["compiles"] == 0
    expected = torch.ones(8)
    for _ in range(10):
        expected = expected * 1.5 + 0.25
    torch.testing.assert_close(moved[1].cpu(), expected)


def test_what_nobody_holds_is_not_computed() -> None:
    x = torch.ones(8).to("tpu")
    torch.tpu.synchronize()

    def compute() -> None:
        y = x * 2
        del y
        torch.tpu.synchronize()

    assert counted(compute)["executions"] == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x + torch.ones(3, device="tpu"), RuntimeError),
        (lambda x: x.view(2, 2) @ x.view(1, 4), RuntimeError),
        (lambda x: x.sum(5), IndexError),
        (lambda x: torch.cat([x.view(2, 2), x.view(1, 4)]), RuntimeError),
    ],
)
def test_wrong_shapes_are_refused_at_the_call(call, error) -> None:
    x = torch.ones(4, device="tpu")
    y = x * 2
    with pytest.raises(error):
        call(x)
    assert y.tolist() == [2.0] * 4


def test_writes_reach_every_alias() -> None:
    def run(device: str) -> list[torch.Tensor]:
        base = torch.arange(24.0, device=device).view(4, 6)
        column, rows = base[:, 2], base[1:3]
        column += 100
        rows.mul_(2)
        copy = base.clone()
        base.t()[0] = -1
        rows.fill_(7)
        copy[0, :2].zero_()
        return [base.cpu(), column.cpu(), rows.cpu(), copy.cpu()]

    for got, expected in zip(run("tpu"), run("cpu"), strict=True):
        assert torch.equal(got, expected)


def test_random_numbers_are_those_of_strict() -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(5, 4, device="tpu")
        y = F.dropout(x, 0.5)
        z = torch.rand(3, device="tpu").bernoulli_()
        return [x, y, z, torch.randperm(9, device="tpu")]

    fused = [t.cpu() for t in draw()]
    with torch.tpu.set_eager_mode(STRICT):
        strict = [t.cpu() for t in draw()]
    for a, b in zip(fused, strict, strict=True):
        assert torch.equal(a, b)


def test_an_index_out_of_range_names_its_op() -> None:
    x = torch.arange(4.0, device="tpu")
    y = x.index_select(0, torch.tensor([9], device="tpu")) + 1
    with pytest.raises(IndexError, match="index_select"):
        y.cpu()
    assert (x + 1).tolist() == [1, 2, 3, 4]


def test_modes_may_be_mixed() -> None:
    x = torch.ones(4, device="tpu")
    y = x * 3
    with torch.tpu.set_eager_mode(STRICT):
        z = y + 1
        y.add_(1)
    y += z
    assert y.tolist() == [8.0] * 4


def test_devices_have_traces_of_their_own() -> None:
    if torch.tpu.device_count() < 2:
        pytest.skip("needs two devices")
    a = torch.ones(4, device="tpu:0") * 2
    b = torch.ones(4, device="tpu:1") * 3
    assert (a + b.to("tpu:0")).tolist() == [5.0] * 4


def test_threads_share_a_trace() -> None:
    results: list[list[float]] = []

    def work(k: int) -> None:
        with torch.tpu.set_eager_mode(FUSED):
            x = torch.full((4,), float(k), device="tpu")
            for _ in range(50):
                x = x * 1.0 + 1.0
            results.append(x.tolist())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(r[0] for r in results) == [50.0, 51.0, 52.0, 53.0]


def test_an_endless_loop_is_cut_into_equal_pieces() -> None:
    def loop(n: int) -> torch.Tensor:
        x = torch.zeros(4, device="tpu")
        for i in range(n):
            x = (x + float(i)).clamp(max=1e6) * 0.5
        return x

    loop(3000).cpu()
    move = counted(lambda: loop(3000).cpu())
    assert move["compiles"] <= 2
    move = counted(lambda: loop(6000).cpu())
    assert move["compiles"] <= 2  # a longer loop differs in its end only
    expected = torch.zeros(4)
    for i in range(3000):
        expected = (expected + float(i)).clamp(max=1e6) * 0.5
    torch.testing.assert_close(loop(3000).cpu(), expected)


def test_buffers_are_not_held_by_the_trace() -> None:
    gc.collect()
    torch.tpu.synchronize()
    start = torch.tpu.memory_allocated()
    x = torch.ones(1 << 16, device="tpu")
    for _ in range(20):
        x = x + 1
    x.sum().item()
    assert torch.tpu.memory_allocated() - start <= 2 * x.nbytes
    del x
    assert torch.tpu.memory_allocated() <= start


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def _models() -> dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor]]:
    conv = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )
    mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))
    tokens = torch.arange(12).view(2, 6) % 11
    return {
        "mlp": (mlp, torch.linspace(-1, 1, 24).view(4, 6), torch.arange(4)),
        "conv": (conv, torch.linspace(-1, 1, 128).view(2, 1, 8, 8), torch.arange(2)),
        "gpt": (Gpt(), tokens, tokens.flatten()),
        "lstm": (Lstm(), tokens, tokens.flatten()),
    }


@pytest.mark.parametrize("name", ["mlp", "conv", "gpt", "lstm"])
def test_a_training_loop_settles(name: str) -> None:
    """After the second iteration nothing is compiled, with logging and evaluation in between."""
    torch.manual_seed(0)
    model, x, y = _models()[name]
    reference, rx, ry = _models()[name]
    reference.load_state_dict(model.state_dict())
    model.to("tpu")
    x, y = x.to("tpu"), y.to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    expected = torch.optim.AdamW(reference.parameters(), 1e-2)

    def loss_of(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = m(a)
        return F.cross_entropy(out.flatten(0, -2), b)

    def step(m: nn.Module, o: torch.optim.Optimizer, a: torch.Tensor, b: torch.Tensor):
        o.zero_grad()
        loss = loss_of(m, a, b)
        loss.backward()
        o.step()
        return loss

    def evaluate(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> float:
        m.eval()
        with torch.no_grad():
            value = loss_of(m, a, b).item()
        m.train()
        return value

    def iteration(i: int) -> None:
        loss = step(model, optimizer, x, y)
        if i % 3 == 0:
            losses.append(loss.item())
        if i in (1, 5):
            evaluate(model, x, y)

    losses: list[float] = []
    for i in range(2):
        iteration(i)
    moves = [counted(lambda i=i: iteration(i)) for i in range(2, 10)]
    torch.tpu.synchronize()
    assert [m["compiles"] for m in moves] == [0] * len(moves)
    assert all(m["executions"] <= 3 for m in moves)
    wanted = [step(reference, expected, rx, ry).item() for _ in range(10)][::3]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=2e-4, atol=1e-5)


def test_compiles_are_reported() -> None:
    def compute(n: int) -> None:
        (torch.ones(n, device="tpu") * 3.5).cumsum(0).cpu()

    for n in (17, 18):
        compute(n)
    compiled = [r for r in recompiles.reports() if r.name == "fused calls"][-1]
    assert "18" in str(compiled)
    assert "17" in str(compiled)
    assert "cumsum" in str(compiled)


def test_a_hook_sees_its_gradient() -> None:
    seen: list[list[float]] = []
    x = torch.ones(3, device="tpu", requires_grad=True)
    x.register_hook(lambda g: seen.append(g.tolist()))
    (x * 2).sum().backward()
    assert seen == [[2.0] * 3]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
