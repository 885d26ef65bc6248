"""Model types whose default configuration or inputs do not fit the general rules of tiny.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# -- configurations: dotted field -> value, set after shrinking ------------------------------------

_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
_STAGES = {
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 2, 1],
    "num_stages": 4,
    "image_size": 64,
}
_SWIN = {
    "embed_dim": 16,
    "depths": [1, 2, 1],
    "num_heads": [2, 2, 4],
    "num_layers": 3,
    "hidden_size": 64,
    "window_size": 4,
    "patch_size": 4,
    "image_size": 64,
}
_MAMBA2 = {
    "num_heads": 8,
    "head_dim": 16,
    "hidden_size": 64,
    "expand": 2,
    "n_groups": 2,
    "chunk_size": 8,
}


def _sub(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


_LATENT_HEADS = {
    "num_key_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
}
_SAM2 = {
    "embed_dim_per_stage": [16, 32, 48, 64],
    "hidden_size": 16,
    "image_size": [64, 64],
    "blocks_per_stage": [1, 1, 2, 1],
    "num_attention_heads_per_stage": [1, 2, 4, 4],
    "global_attention_blocks": [3],
    "window_size_per_stage": [4, 2, 2, 2],
}
_SAM2_VISION = {
    **_sub("backbone_config", _SAM2),
    "backbone_channel_list": [64, 48, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
}
_SAM_DECODER = {
    "prompt_encoder_config.hidden_size": 32,
    "prompt_encoder_config.image_size": 64,
    "prompt_encoder_config.image_embedding_size": 8,
    "prompt_encoder_config.patch_size": 8,
    "mask_decoder_config.hidden_size": 32,
    "mask_decoder_config.iou_head_hidden_dim": 32,
    "mask_decoder_config.mlp_dim": 64,
}
_SAM = {
    "vision_config.image_size": 64,
    "vision_config.window_size": 4,
    "vision_config.global_attn_indexes": [1],
    "vision_config.mlp_dim": 96,
    "vision_config.output_channels": 32,
    "vision_config.num_pos_feats": 16,
    **_SAM_DECODER,
}
_SWIN_STAGES = {
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 4],
    "num_layers": 4,
    "hidden_size": 128,
    "window_size": 4,
    "patch_size": 4,
    "image_size": 64,
}
_RT_DETR = {
    "backbone_config.hidden_sizes": [16, 16, 32, 64],
    "backbone_config.embedding_size": 16,
    "backbone_config.depths": [1, 1, 1, 1],
    "encoder_in_channels": [16, 32, 64],
    "encoder_hidden_dim": 64,
    "decoder_in_channels": [64, 64, 64],
    "num_queries": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
}
_MIMI = {
    "hidden_size": 64,
    "upsample_groups": 64,
    "num_filters": 8,
    "codebook_dim": 32,
    "vector_quantization_hidden_dimension": 32,
    "num_quantizers": 4,
    "codebook_size": 64,
}
_SEAMLESS = {
    "speech_encoder_layers": 2,
    "t2u_encoder_layers": 2,
    "t2u_decoder_layers": 2,
    "speech_encoder_intermediate_size": 96,
    "t2u_encoder_ffn_dim": 96,
    "t2u_decoder_ffn_dim": 96,
    "speech_encoder_attention_heads": 4,
    "t2u_vocab_size": 100,
    "unit_hifi_gan_vocab_size": 100,
    "char_vocab_size": 100,
    "upsample_initial_channel": 32,
    "t2u_encoder_attention_heads": 4,
    "t2u_decoder_attention_heads": 4,
}
_SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3]}

CONFIG: dict[str, dict[str, Any]] = {
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "swin2sr": {**_SWIN, "num_heads": [2, 2, 4]},
    "mamba2": _MAMBA2,
    "autoformer": {**_SERIES, "autocorrelation_factor": 2, "feature_size": 5},
    "informer": {**_SERIES, "feature_size": 5},
    "time_series_transformer": {**_SERIES, "feature_size": 5},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 64,
        "attention_window_size": 8,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "mamba_d_state": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "kv_channels": 16,
        "num_query_groups": 4,
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "perceiver": {
        "d_latents": 64,
        "num_latents": 16,
        "num_self_attends_per_block": 2,
        "d_model": 64,
    },
    "sam": _SAM,
    "sam_hq": {**_SAM, "mask_decoder_config.vit_dim": 64},
    "sam2_hiera_det_model": _SAM2,
    "sam2_vision_model": _SAM2_VISION,
    "sam2": {**_sub("vision_config", _SAM2_VISION), **_SAM_DECODER},
    "mask2former": {
        **_sub("backbone_config", _SWIN_STAGES),
        "feature_size": 32,
        "mask_feature_size": 32,
        "num_queries": 10,
        "decoder_layers": 3,
    },
    "grounding-dino": _sub("backbone_config", _SWIN_STAGES),
    "mm-grounding-dino": _sub("backbone_config", _SWIN_STAGES),
    "vjepa2": {"crop_size": 32, "frames_per_clip": 4, "patch_size": 8},
    "d_fine": {"num_queries": 10},
    "deimv2": {"num_queries": 10},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "mimi": _MIMI,
    "mimi_decoder": _MIMI,
    "csm": _sub("codec_config", _MIMI),
    "encodec": {"hidden_size": 128, "num_filters": 8, "num_lstm_layers": 1},
    "siglip": {"text_config.projection_size": 64},
    "siglip2": {"text_config.projection_size": 64, "vision_config.num_patches": 16},
    "luke": {"entity_vocab_size": 100, "entity_emb_size": 32},
    "blip-2": {
        "qformer_config.encoder_hidden_size": 64,
        "num_query_tokens": 4,
        "text_config.word_embed_proj_dim": 64,
    },
    "deepseek_v32": _LATENT_HEADS,
    "axk2": _LATENT_HEADS,
    "glm_moe_dsa": _LATENT_HEADS,
    "hy_v4": _LATENT_HEADS,
    "hy_v4_vl_text": _LATENT_HEADS,
    "glm5_next_text": _LATENT_HEADS,
    "mistral_large4_text": _LATENT_HEADS,
    "mistral4": {"rope_parameters.partial_rotary_factor": 1.0},
    "t5gemma": {"decoder.cross_attention_hidden_size": 64},
    "seamless_m4t_v2": _SEAMLESS,
    "radio": {"patch_dim": 192},
    "granite_speech5_encoder": {"max_position_embeddings": 512, "context_size": 16},
    "gemma4_text": {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16},
    "gemma4": {
        "text_config.vocab_size_per_layer_input": 512,
        "text_config.hidden_size_per_layer_input": 16,
    },
    "wav2vec2-bert": {"feature_projection_input_dim": 32},
    "dac": {
        "decoder_hidden_size": 64,
        "encoder_hidden_size": 8,
        "hidden_size": 128,
        "codebook_size": 64,
        "n_codebooks": 4,
    },
    "reformer": {
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "vocab_size": 500,
        "num_hashes": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 96},
    "mgp-str": {"image_size": [32, 128], "patch_size": 4},
    "seamless_m4t": _SEAMLESS,
    "xlstm": {"embedding_dim": 64, "num_heads": 4, "num_blocks": 2, "chunk_size": 16},
    "rwkv": {"attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}

_DETR_BACKBONE = ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer")


def _rope_sections(config: Any) -> None:
    """Sections of a multimodal rotary embedding add up to half the head."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    head = getattr(config, "head_dim", None) or (config.hidden_size // config.num_attention_heads)
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    if half < 3:
        rope["partial_rotary_factor"], half = 1.0, head // 2
    rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _with_sections(model_type: str) -> bool:
    known = (
        "glm4v",
        "glm_ocr",
        "glm_image",
        "qwen2_vl",
        "qwen2_5_vl",
        "glmga",
        "glm46v",
        "paddleocr_vl",
        "qwen2_5_omni",
        "ernie4_5_vl",
    )
    return model_type.startswith(known)


def configure(model_type: str, config: Any) -> Any:
    """``config`` with the fields this type needs."""
    for path, value in CONFIG.get(model_type, {}).items():
        *parents, name = path.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(target, dict):
            target[name] = value
            continue
        with suppress(AttributeError):  # a property: the fields it is made of are set themselves
            setattr(target, name, value)
    if model_type in _DETR_BACKBONE:
        from transformers import ResNetConfig

        config.use_timm_backbone = False
        config.backbone = None
        config.backbone_config = ResNetConfig(
            **_RESNET,
            out_features=["stage2", "stage3", "stage4"]
            if model_type == "deformable_detr"
            else ["stage4"],
        )
        if model_type == "deformable_detr":
            config.num_feature_levels = 4
    if _with_sections(model_type):
        _rope_sections(getattr(config, "text_config", config))
    return config


# -- inputs ----------------------------------------------------------------------------------------

Inputs = dict[str, torch.Tensor]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids(*shape: int, low: int = 3, high: int = 400) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))


def _series(config: Any) -> Inputs:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": _normal(2, past),
        "past_time_features": _normal(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _normal(2, config.prediction_length),
        "future_time_features": _normal(2, config.prediction_length, config.num_time_features),
    }


def _sam(config: Any) -> Inputs:
    return {"pixel_values": _normal(1, 3, 64, 64), "input_points": 32 + _normal(1, 1, 2, 2)}


def _siglip2(config: Any) -> Inputs:
    vision = getattr(config, "vision_config", config)
    found = {
        "pixel_values": _normal(2, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    }
    return found if vision is config else {"input_ids": _ids(2, 16), **found}


def _boxes() -> torch.Tensor:
    corner = _ids(2, 16, 2, low=0, high=60)
    return torch.cat([corner, corner + 20], -1)


def _video(size: int = 32, frames: int = 8) -> Callable[[Any], Inputs]:
    def make(config: Any) -> Inputs:
        side = getattr(config, "image_size", size)
        vision = getattr(config, "vision_config", None)
        side = getattr(vision, "image_size", side)
        frames_ = getattr(config, "num_frames", None) or frames
        return {"pixel_values": _normal(1, frames_, 3, side, side)}

    return make


def _clip_video(config: Any) -> Inputs:
    return {**_video()(config), "input_ids": _ids(1, 16)}


INPUTS: dict[str, Callable[[Any], Inputs]] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "sam": _sam,
    "sam_hq": _sam,
    "sam2": _sam,
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "bros": lambda c: {"input_ids": _ids(2, 16), "bbox": _normal(2, 16, 4)},
    "layoutlmv3": lambda c: {"input_ids": _ids(2, 16), "bbox": _boxes()},
    "lilt": lambda c: {"input_ids": _ids(2, 16), "bbox": _boxes()},
    "timesformer": _video(),
    "videomae": _video(),
    "vivit": _video(),
    "vjepa2": lambda c: {"pixel_values_videos": _normal(1, 4, 3, c.crop_size, c.crop_size)},
    "lxmert": lambda c: {
        "input_ids": _ids(2, 16),
        "visual_feats": _normal(2, 4, c.visual_feat_dim),
        "visual_pos": _normal(2, 4, 4),
    },
    "decision_transformer": lambda c: {
        "states": _normal(2, 4, c.state_dim),
        "actions": _normal(2, 4, c.act_dim),
        "rewards": _normal(2, 4, 1),
        "returns_to_go": _normal(2, 4, 1),
        "timesteps": _ids(2, 4, low=0, high=8),
    },
    "patchtst": lambda c: {"past_values": _normal(2, c.context_length, c.num_input_channels)},
    "patchtsmixer": lambda c: {"past_values": _normal(2, c.context_length, c.num_input_channels)},
    "lightglue": lambda c: {"pixel_values": _normal(1, 2, 3, 64, 64)},
    "efficientloftr": lambda c: {"pixel_values": _normal(1, 2, 1, 64, 64)},
    "idefics": lambda c: {
        "input_ids": _ids(2, 16),
        "pixel_values": _normal(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, 16, 1),
    },
    "encodec": lambda c: {"input_values": _normal(2, 1, 2000)},
    "dac": lambda c: {"input_values": _normal(2, 1, 2048)},
    "speech_to_text": lambda c: {
        "input_features": _normal(2, 32, c.input_feat_per_channel),
        "decoder_input_ids": _ids(2, 8),
    },
    "speecht5": lambda c: {
        "input_values": _normal(2, 16, c.hidden_size),
        "decoder_input_values": _normal(2, 16, c.hidden_size),
    },
    "reformer": lambda c: {"input_ids": _ids(2, 16)},
    "esm": lambda c: {"input_ids": _ids(2, 16, low=4, high=30)},
    "esmc": lambda c: {"input_ids": _ids(2, 16, low=4, high=30)},
    "mgp-str": lambda c: {"pixel_values": _normal(2, 3, 32, 128)},
    "timesfm": lambda c: {
        "past_values": _normal(2, 64),
        "past_values_padding": torch.zeros(2, 64),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    },
    "blip_2_qformer": lambda c: {"query_embeds": _normal(2, 4, c.hidden_size)},
    "perceiver": lambda c: {"inputs": _normal(2, 16, c.d_model)},
    "xclip": _clip_video,
    "univnet": lambda c: {"input_features": _normal(2, 16, c.num_mel_bins)},
    "pe_audio_encoder": lambda c: {"input_values": _normal(2, 1, 2000)},
    "wavtokenizer_encoder": lambda c: {"input_values": _normal(2, 1, 2000)},
    "mimi_encoder": lambda c: {"input_values": _normal(2, 1, 2000)},
    "seggpt": lambda c: {
        name: _normal(1, 3, *(c.image_size if isinstance(c.image_size, list) else [32, 32]))
        for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
}


def inputs(model_type: str, config: Any) -> Inputs | None:
    """This type's own inputs, None where the general rules fit."""
    make = INPUTS.get(model_type)
    return make(config) if make is not None else None
