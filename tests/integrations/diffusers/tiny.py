"""Pipelines of Diffusers with tiny random components, and calls that make a small image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    BatchEncoding,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

LENGTH = 16
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


class Tokenizer:
    """One token a character; no vocabulary has to be downloaded."""

    model_max_length = LENGTH
    added_tokens_encoder: dict[str, int] = {}

    def __call__(self, text: str | list[str], max_length: int | None = None, **_: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        width = max_length or LENGTH
        ids = torch.zeros(len(texts), width, dtype=torch.long)
        for row, characters in zip(ids, texts, strict=True):
            codes = [ord(c) % 90 + 3 for c in characters[: width - 1]] + [2]
            row[: len(codes)] = torch.tensor(codes)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def batch_decode(self, ids: torch.Tensor, **_: Any) -> list[str]:
        return [""] * len(ids)


def _clip(kind: Any = CLIPTextModel) -> Any:
    return kind(
        CLIPTextConfig(
            hidden_size=32,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=100,
            max_position_embeddings=LENGTH,
            projection_dim=32,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    ).eval()


def _t5() -> Any:
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 37}
    return T5EncoderModel(T5Config(**sizes, num_layers=2, num_heads=4)).eval()


def _vae(channels: int = 4, **options: Any) -> Any:
    return AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=32,
        **options,
    ).eval()


def _flow_vae(channels: int) -> Any:
    options = {"use_quant_conv": False, "use_post_quant_conv": False}
    return _vae(channels, shift_factor=0.06, scaling_factor=1.5, **options)


def _unet(**options: Any) -> Any:
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        **options,
    ).eval()


def stable_diffusion() -> Any:
    return StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=32, attention_head_dim=4),
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=Tokenizer(),
        scheduler=DDIMScheduler(**_NOISE, clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    unet = _unet(
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )
    return StableDiffusionXLPipeline(
        unet=unet,
        vae=_vae(),
        text_encoder=_clip(),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer=Tokenizer(),
        tokenizer_2=Tokenizer(),
        scheduler=EulerDiscreteScheduler(**_NOISE, steps_offset=1, timestep_spacing="leading"),
    )


def stable_diffusion_3() -> Any:
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
    ).eval()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        vae=_flow_vae(4),
        text_encoder=_clip(CLIPTextModelWithProjection),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        text_encoder_3=_t5(),
        tokenizer=Tokenizer(),
        tokenizer_2=Tokenizer(),
        tokenizer_3=Tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def flux() -> Any:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    return FluxPipeline(
        transformer=transformer,
        vae=_flow_vae(1),
        text_encoder=_clip(),
        text_encoder_2=_t5(),
        tokenizer=Tokenizer(),
        tokenizer_2=Tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def wan() -> Any:
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()
    return WanPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=_t5(),
        tokenizer=Tokenizer(),
    )


_SIDE = {"height": 32, "width": 32}
CALLS: dict[str, dict[str, Any]] = {
    "stable_diffusion": {"guidance_scale": 6.0, **_SIDE},
    "stable_diffusion_xl": {"guidance_scale": 5.0, **_SIDE},
    "stable_diffusion_3": {"guidance_scale": 5.0, **_SIDE, "max_sequence_length": LENGTH},
    "flux": {"guidance_scale": 5.0, "height": 8, "width": 8, "max_sequence_length": LENGTH},
    "wan": {
        "guidance_scale": 6.0,
        "negative_prompt": "x",
        "height": 16,
        "width": 16,
        "num_frames": 9,
        "max_sequence_length": LENGTH,
    },
}


def pipeline(name: str) -> Any:
    """The pipeline of that name, with the same weights each time."""
    torch.manual_seed(0)
    made = globals()[name]()
    made.set_progress_bar_config(disable=True)
    return made


def image(made: Any, name: str, **options: Any) -> torch.Tensor:
    """What the pipeline makes of a prompt in two steps, noise drawn on the CPU unless told."""
    call = {"prompt": "a cat sat", "num_inference_steps": 2, **CALLS[name], **options}
    call.setdefault("generator", torch.Generator().manual_seed(0))
    out = made(output_type="np", **call)
    return torch.from_numpy(out.images if hasattr(out, "images") else out.frames)
