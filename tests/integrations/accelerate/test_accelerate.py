"""Accelerate: device, memory, training loop and saved states, and what must not change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch
from accelerate import Accelerator, dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import get_max_memory, set_module_tensor_to_device, set_seed


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_device() -> None:
    assert Accelerator().device.type == "tpu"


def test_cpu_when_asked() -> None:
    assert Accelerator(cpu=True).device.type == "cpu"


def test_environment_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert Accelerator().device.type == "cpu"


def test_another_accelerator_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert PartialState.default_device.fget(None).type == "cuda"


def test_importing_accelerate_first_gives_the_same() -> None:
    code = (
        "import accelerate, accelerate.utils.modeling, torch_tpu; "
        "from accelerate.utils import get_max_memory; "
        "print(accelerate.Accelerator().device.type)"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.stdout.strip() == "tpu", done.stderr


def test_max_memory_numbers_the_devices() -> None:
    memory = get_max_memory()
    assert list(memory) == [*range(torch.tpu.device_count()), "cpu"]
    assert all(size > 0 for size in memory.values())


def test_max_memory_given() -> None:
    assert get_max_memory({"cpu": "1GB", 1: "2GB", 0: 5}) == {0: 5, 1: 2 * 10**9, "cpu": 10**9}
    assert get_max_memory({"cpu": 7}) == {"cpu": 7}
    with pytest.raises(ValueError, match="not recognized"):
        get_max_memory({0: 1, "nowhere": 1})


def test_device_map_across_two_devices() -> None:
    with init_empty_weights():
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    layer = 4 * (16 * 16 + 16)
    limits = {0: 3 * layer, 1: 10 * layer, "cpu": 10**9}
    places = infer_auto_device_map(model, max_memory=limits)
    assert set(places.values()) == {0, 1}
    weights = {name: torch.randn_like(p, device="cpu") for name, p in model.named_parameters()}
    for name, value in weights.items():
        place = next(d for prefix, d in places.items() if name.startswith(f"{prefix}."))
        set_module_tensor_to_device(model, name, place, value=value)
    assert {p.device for p in model.parameters()} == {
        torch.device("tpu", 0),
        torch.device("tpu", 1),
    }
    dispatch_model(model, places)
    x = torch.randn(2, 16)
    want = x
    for i in range(4):
        want = torch.nn.functional.linear(want, weights[f"{i}.weight"], weights[f"{i}.bias"])
    torch.testing.assert_close(model(x.to("tpu")).cpu(), want, rtol=1e-4, atol=1e-4)


def _loop(accelerator: Accelerator, steps: int = 4) -> tuple[list[float], Any]:
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for x, y in list(loader)[:steps]:
        assert x.device.type == accelerator.device.type
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses, (model, optimizer, loader, schedule)


def test_training_loop() -> None:
    want, _ = _loop(Accelerator(cpu=True, gradient_accumulation_steps=2))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    got, _ = _loop(Accelerator(gradient_accumulation_steps=2))
    assert got == pytest.approx(want, rel=1e-4)


def test_mixed_precision_is_bfloat16() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    layer = accelerator.prepare(torch.nn.Linear(4, 4))
    with accelerator.autocast():
        inside = layer.weight @ layer.weight
    assert inside.dtype == torch.bfloat16
    assert layer(torch.ones(2, 4, device="tpu")).dtype == torch.float32
    losses, _ = _loop(accelerator)
    assert all(loss == loss for loss in losses)


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="fp16"):
        Accelerator(mixed_precision="fp16")


def test_random_state_travels_with_a_saved_state(tmp_path: Path) -> None:
    accelerator = Accelerator()
    _loop(accelerator)
    accelerator.save_state(str(tmp_path))
    drawn = torch.rand(8, device="tpu").cpu()
    torch.rand(8, device="tpu")
    accelerator.load_state(str(tmp_path))
    assert torch.equal(torch.rand(8, device="tpu").cpu(), drawn)


def test_state_saved_without_the_device_loads(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    _, (model, *_) = _loop(accelerator)
    accelerator.save_state(str(tmp_path))
    path = next(tmp_path.glob("random_states_*.pkl"))
    states = torch.load(path, weights_only=False)
    states.pop("torch_tpu_manual_seed", None)
    torch.save(states, path)
    before = [p.clone() for p in model.parameters()]
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
