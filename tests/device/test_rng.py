"""Random state: seeds, saved states, generators."""

from __future__ import annotations

import threading

import pytest
import torch


def draw(n: int = 8, **kwargs) -> torch.Tensor:
    return torch.rand(n, device="tpu", **kwargs).cpu()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


def test_torch_manual_seed_reaches_every_device() -> None:
    torch.manual_seed(7)
    first = [torch.rand(4, device=f"tpu:{i}").cpu() for i in range(2)]
    torch.manual_seed(7)
    second = [torch.rand(4, device=f"tpu:{i}").cpu() for i in range(2)]
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(8)
    assert not same(first[0], torch.rand(4, device="tpu").cpu())


def test_a_seed_set_before_the_import_counts(run_python) -> None:
    code = """
        import torch
        torch.manual_seed(11)
        import torch_tpu
        print(torch.tpu.initial_seed(), torch.tpu.is_initialized())
    """
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "11 False\n"


def test_draws_go_on() -> None:
    torch.tpu.manual_seed(3)
    assert not same(draw(), draw())


def test_negative_and_large_seeds() -> None:
    torch.tpu.manual_seed_all(-1)
    assert torch.tpu.initial_seed() == 2**64 - 1
    torch.tpu.manual_seed(-1)
    assert torch.tpu.initial_seed() == 2**64 - 1
    with pytest.raises(RuntimeError):
        torch.tpu.manual_seed_all(2**64)


def test_seed_is_not_foreseeable() -> None:
    torch.tpu.manual_seed(5)
    torch.tpu.seed()
    assert torch.tpu.initial_seed() != 5
    torch.tpu.seed_all()
    assert len({generator.initial_seed() for generator in torch.tpu.default_generators}) == 1


def test_state_is_saved_and_restored() -> None:
    torch.manual_seed(1)
    draw()
    state = torch.tpu.get_rng_state()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
    expected = draw()
    torch.tpu.set_rng_state(state)
    assert same(draw(), expected)
    assert same(torch.tpu.get_rng_state("tpu:0"), torch.tpu.get_rng_state(0))


def test_state_of_all_devices() -> None:
    states = torch.tpu.get_rng_state_all()
    expected = [torch.rand(3, device=f"tpu:{i}").cpu() for i in range(2)]
    torch.tpu.set_rng_state_all(states)
    again = [torch.rand(3, device=f"tpu:{i}").cpu() for i in range(2)]
    assert all(same(a, b) for a, b in zip(expected, again, strict=True))


def test_a_wrong_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.tpu.set_rng_state(torch.zeros(5, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.tpu.set_rng_state(torch.zeros(16))


def test_fork_rng() -> None:
    torch.manual_seed(2)
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        inside = draw()
    assert same(draw(), inside)
    with torch.random.fork_rng():  # the accelerator's devices by default
        draw()
    after = draw()
    torch.manual_seed(2)
    draw()
    assert same(after, draw())


def test_generator() -> None:
    generator = torch.Generator(device="tpu")
    assert generator.device == torch.device("tpu:0")
    generator.manual_seed(42)
    assert generator.initial_seed() == 42
    first = draw(generator=generator)
    state = generator.get_state()
    second = draw(generator=generator)
    generator.manual_seed(42)
    assert same(draw(generator=generator), first)
    generator.set_state(state)
    assert same(draw(generator=generator), second)
    assert generator.seed() == generator.initial_seed()
    assert torch.Generator(device="tpu:1").device.index == 1


def test_a_generator_leaves_the_default_one_alone() -> None:
    before = torch.tpu.get_rng_state()
    draw(generator=torch.Generator(device="tpu").manual_seed(0))
    assert same(torch.tpu.get_rng_state(), before)


def test_generator_offset_and_clone() -> None:
    generator = torch.Generator(device="tpu").manual_seed(9)
    assert generator.get_offset() == 0
    first = draw(generator=generator)
    assert generator.get_offset() == 1
    clone = generator.clone_state()
    second = draw(generator=generator)
    assert same(draw(generator=clone), second)
    generator.set_offset(0)
    assert same(draw(generator=generator), first)


def test_graphsafe_state_is_shared() -> None:
    first, second = (torch.Generator(device="tpu").manual_seed(s) for s in (1, 2))
    second.graphsafe_set_state(first.graphsafe_get_state())
    draw(generator=first)
    assert second.get_offset() == 1
    with pytest.raises(RuntimeError):
        second.graphsafe_set_state(torch.Generator())


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device type for generator but found"):
        torch.rand(2, device="tpu", generator=torch.Generator())


def test_default_generators() -> None:
    generators = torch.tpu.default_generators
    assert len(generators) == 2
    assert generators[1].device == torch.device("tpu:1")
    assert generators[0] is torch.tpu.default_generators[0]
    torch.tpu.manual_seed(77)
    assert generators[0].initial_seed() == 77


def test_threads_never_draw_the_same_numbers() -> None:
    torch.manual_seed(0)
    draw()
    drawn: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            drawn.append(draw(4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 80
    assert torch.tpu.default_generators[0].get_offset() == 81


def test_checkpointing_replays_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, 64, device="tpu", requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) * 3

    torch.manual_seed(4)
    y = checkpoint(block, x, use_reentrant=False)
    y.sum().backward()
    assert same(x.grad.cpu(), y.detach().cpu())
