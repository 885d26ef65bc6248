"""Diffusers: images and videos of tiny random pipelines equal the CPU's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import diffusers
import torch

from . import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("stable_diffusion", "flux")


@pytest.fixture(autouse=True)
def no_fallbacks() -> Any:
    before = torch.tpu.stats()["fallbacks"]
    yield
    assert torch.tpu.stats()["fallbacks"] == before


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.std() > 1e-3  # a black image would equal any other
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in tiny.CALLS]
)
def test_image(name: str) -> None:
    made = tiny.pipeline(name)
    want = tiny.image(made, name)
    same(tiny.image(made.to("tpu"), name), want)
    assert made._execution_device.type == "tpu"


def test_no_programs_after_the_first_image() -> None:
    made = tiny.pipeline("stable_diffusion").to("tpu")
    tiny.image(made, "stable_diffusion")
    before = torch.tpu.stats()["compiles"]
    tiny.image(made, "stable_diffusion", prompt="a dog ran", guidance_scale=3.0)
    assert torch.tpu.stats()["compiles"] == before


def test_noise_drawn_on_the_device_repeats() -> None:
    made = tiny.pipeline("stable_diffusion").to("tpu")
    images = [
        tiny.image(made, "stable_diffusion", generator=torch.Generator("tpu").manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.full
def test_bfloat16() -> None:
    made = tiny.pipeline("stable_diffusion")
    want = tiny.image(made, "stable_diffusion")
    got = tiny.image(made.to("tpu", torch.bfloat16), "stable_diffusion")
    torch.testing.assert_close(got, want, rtol=0, atol=0.1)


@pytest.mark.full
def test_tiled_and_sliced_decoding() -> None:
    made = tiny.pipeline("stable_diffusion")
    made.vae.enable_tiling()
    made.vae.tile_sample_min_size, made.vae.tile_latent_min_size = 16, 8
    made.vae.enable_slicing()
    want = tiny.image(made, "stable_diffusion")
    same(tiny.image(made.to("tpu"), "stable_diffusion"), want)


@pytest.mark.full
def test_model_offload() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    made = tiny.pipeline("stable_diffusion")
    want = tiny.image(made, "stable_diffusion")
    made.enable_model_cpu_offload(device="tpu")
    same(tiny.image(made, "stable_diffusion"), want)
    assert made.unet.device.type == "cpu"


@pytest.mark.full
def test_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    made = tiny.pipeline("stable_diffusion")
    plain = tiny.image(made, "stable_diffusion")
    made.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"]))
    with torch.no_grad():
        for name, p in made.unet.named_parameters():
            if "lora_B" in name:
                p.normal_(std=2.0, generator=torch.Generator().manual_seed(len(name)))
    want = tiny.image(made, "stable_diffusion")
    assert (want - plain).abs().max() > 1e-3
    weights = get_peft_model_state_dict(made.unet)
    made.save_lora_weights(tmp_path, unet_lora_layers=weights)

    fresh = tiny.pipeline("stable_diffusion").to("tpu")
    fresh.load_lora_weights(tmp_path)
    same(tiny.image(fresh, "stable_diffusion"), want)
    fresh.fuse_lora()
    same(tiny.image(fresh, "stable_diffusion"), want)
    fresh.unfuse_lora()
    fresh.unload_lora_weights()
    same(tiny.image(fresh, "stable_diffusion"), plain)


# Need a package (torchsde), a learned variance, a model's structure or a mask beside the noise:
# the CPU does not run them on plain noise. One that it does run does not belong here.
OTHER_INPUTS = {
    "AmusedScheduler",
    "BlockRefinementScheduler",
    "CogVideoXDPMScheduler",
    "CosineDPMSolverMultistepScheduler",
    "DDPMWuerstchenScheduler",
    "DPMSolverSDEScheduler",
    "DiscreteDDIMScheduler",
    "EntropyBoundScheduler",
    "HeliosDMDScheduler",
    "HeliosScheduler",
    "KarrasVeScheduler",
    "PiflowScheduler",
    "RFD4ProteinaScheduler",
    "RePaintScheduler",
    "SCMScheduler",
    "ScoreSdeVeScheduler",
    "VQDiffusionScheduler",
}


def schedulers() -> list[str]:
    mixin = diffusers.SchedulerMixin
    names = [n for n in dir(diffusers) if n.endswith("Scheduler")]
    found = []
    for name in names:
        kind = getattr(diffusers, name)
        if inspect.isclass(kind) and issubclass(kind, mixin) and name not in OTHER_INPUTS:
            found.append(name)
    return found


def _denoise(name: str, device: str) -> torch.Tensor:
    scheduler = getattr(diffusers, name)()
    sigmas = {}
    scheduler.set_timesteps(4, device=device, **sigmas)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 3, 8, 8, generator=generator).to(device)
    options = {}
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = torch.Generator().manual_seed(1)
    for step in scheduler.timesteps:
        scaled = sample
        if hasattr(scheduler, "scale_model_input"):
            scaled = scheduler.scale_model_input(sample, step)
        noise = 0.1 * torch.tanh(scaled)
        sample = scheduler.step(noise, step, sample, **options).prev_sample
    return sample.cpu()


@pytest.mark.parametrize("name", schedulers())
def test_scheduler(name: str) -> None:
    want = _denoise(name, "cpu")
    assert want.isfinite().all()
    torch.testing.assert_close(_denoise(name, "tpu"), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", sorted(OTHER_INPUTS))
def test_left_out_scheduler_fails_on_the_cpu_too(name: str) -> None:
    with pytest.raises(
        (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
    ):
        _denoise(name, "cpu")
