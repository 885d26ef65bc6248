"""Tiny random models and inputs of every model type that Transformers knows, made offline."""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from . import recipes

MAX_PARAMETERS = 60_000_000
BATCH, TOKENS = 2, 16

# Set on a configuration, and on those inside it, where it has the field and the value is smaller.
_SMALL: dict[str, int] = {
    **dict.fromkeys(
        [
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "dim",
            "model_dim",
            "hidden_dim",
            "embedding_size",
        ],
        64,
    ),
    **dict.fromkeys(
        [
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
            "num_encoder_layers",
            "num_decoder_layers",
            "num_blocks",
        ],
        2,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ],
        4,
    ),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"],
        96,
    ),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 128),
    **dict.fromkeys(["max_source_positions", "max_target_positions"], 64),
    **dict.fromkeys(
        ["num_experts", "n_routed_experts", "num_local_experts", "num_image_tokens"], 4
    ),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "bos_token_id"], 1),
    **dict.fromkeys(
        ["head_dim", "d_kv", "num_mel_bins", "sliding_window", "kv_lora_rank", "v_head_dim"], 16
    ),
    **dict.fromkeys(["moe_intermediate_size", "image_size", "q_lora_rank", "projection_dim"], 32),
    **dict.fromkeys(
        [
            "patch_size",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "rotary_dim",
            "state_size",
            "time_step_rank",
        ],
        8,
    ),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "expand", "eos_token_id"], 2),
    "vocab_size": 512,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


class Unbuilt(Exception):
    """No tiny model of this type can be made, or the CPU does not run it; the message says why."""


@dataclass
class Tiny:
    """A model in evaluation mode on the CPU, and inputs its forward accepts."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def model_types() -> list[str]:
    """Every type that has a base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def _get(config: Any, name: str) -> Any:
    """The field, None where there is none or where it differs by layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(Exception):  # read-only or validated fields keep what they have
        setattr(config, name, value)


def shrink(config: Any, depth: int = 0) -> Any:
    """Make ``config`` and the configurations inside it small, in place."""
    for name, value in _SMALL.items():
        current = _get(config, name)
        if isinstance(current, bool) or not isinstance(current, int):
            continue
        if current > value or name in _TOKEN_IDS:
            _set(config, name, value)
    if isinstance(_get(config, "qk_rope_head_dim"), int):
        # Latent attention: the rotary width is the head width.
        rope = config.qk_rope_head_dim
        _set(config, "head_dim", rope)
        _set(config, "qk_head_dim", rope + (_get(config, "qk_nope_head_dim") or 0))
    if isinstance(getattr(config, "conv_dim", None), (tuple, list)):
        _set(config, "conv_dim", type(config.conv_dim)([32] * len(config.conv_dim)))
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and kinds:
        layers = getattr(config, "num_hidden_layers", 2)
        _set(config, "layer_types", (list(dict.fromkeys(kinds)) * layers)[:layers])
    if depth < 3:
        for inner in list(vars(config).values()):
            if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
                shrink(inner, depth + 1)
    return config


def _first_int(config: Any, *names: str) -> int | None:
    parts = [config] + [getattr(config, part, None) for part in _PARTS]
    for part in parts:
        for name in names:
            value = _get(part, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _candidates(model: Any, config: Any) -> list[dict[str, torch.Tensor]]:
    """Inputs to try, the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    accepted = inspect.signature(model.forward).parameters
    vocabulary = min(_first_int(config, "vocab_size") or 100, 500)
    side = _first_int(config, "image_size") or 32
    channels = _first_int(config, "num_channels", "in_chans", "in_channels") or 3
    mels = _first_int(config, "num_mel_bins", "feature_size", "input_feat_per_channel") or 16
    frames = 2 * (_first_int(config, "max_source_positions") or 50)

    def ids() -> torch.Tensor:
        return torch.randint(3, vocabulary, (BATCH, TOKENS), generator=generator)

    def pixels(size: int = side) -> torch.Tensor:
        return torch.randn(BATCH, channels, size, size, generator=generator)

    make = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": pixels,
        "input_features": lambda: torch.randn(BATCH, mels, frames, generator=generator),
        "input_values": lambda: torch.randn(BATCH, 2000, generator=generator),
    }
    main = model.main_input_name
    if not isinstance(main, str):
        main = next((name for name in main if name in accepted), "")
    if "grid_thw" in accepted:
        vision = _get(config, "vision_config") or config
        patch = _get(vision, "patch_size") or 8
        depth = _get(vision, "temporal_patch_size") or 1
        name = next((n for n in ("pixel_values", "hidden_states") if n in accepted), main)
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        flat = torch.randn(48, channels * depth * patch * patch, generator=generator)
        tiles = torch.randn(48, channels, patch, patch, generator=generator)
        return [{name: flat, "grid_thw": grid}, {name: tiles, "grid_thw": grid}]
    names = [main] if main in make else []
    for name in accepted:
        if name == "decoder_input_ids" and not getattr(config, "is_encoder_decoder", False):
            continue
        if name in ("input_ids", "pixel_values", "decoder_input_ids"):
            names.append(name)
    names = list(dict.fromkeys(names)) or [name for name in accepted if name in make]
    full = {name: make[name]() for name in names}
    tries = [
        full,
        {name: value for name, value in full.items() if name == main},
        {name: value for name, value in full.items() if name != "pixel_values"},
    ]
    if "pixel_values" in full:
        tries.append({**full, "pixel_values": pixels(224)})
        tries.append({"pixel_values": pixels(64)})
    if "input_features" in full:  # time before frequency, with a mask of real frames
        turned = full["input_features"].transpose(1, 2).contiguous()
        mask = torch.ones(turned.shape[:2], dtype=torch.long)
        tries.append({**full, "input_features": turned})
        for name in ("input_features_mask", "attention_mask"):
            if name in accepted:
                tries.append({**full, name: mask})
                tries.append({**full, "input_features": turned, name: mask})
    if "input_values" in full:
        tries.append({**full, "input_values": full["input_values"].unsqueeze(1)})
    return [given for given in tries if given]


def _randomise(model: torch.nn.Module) -> None:
    """Give constant, unset and huge parameters random values, and shake biases and norms.

    A router of zeros makes every expert a tie, and a tie has no right answer. Nor has the gradient
    of a bilinear sample exactly between two pixels, where round offsets put it.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() < 2:
                continue
            first = parameter.flatten()[0]
            if not bool(parameter.isfinite().all()) or bool(parameter.abs().max() > 100):
                parameter.normal_(std=0.02)
            elif parameter.dim() == 1 or bool((parameter == first).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def build(model_type: str) -> Tiny:
    """A tiny float32 model of ``model_type`` with inputs; Unbuilt where there is none."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    try:
        config = recipes.configure(model_type, shrink(CONFIG_MAPPING[model_type]()))
    except Exception as error:
        raise Unbuilt(f"configuration: {type(error).__name__}: {str(error)[:160]}") from None
    try:
        with torch.device("meta"):
            meta = AutoModel.from_config(copy.deepcopy(config))
        size = sum(p.numel() for p in meta.parameters())
    except Exception:
        size = 0  # some types cannot be made on meta; those that cannot be made at all fail below
    if size > MAX_PARAMETERS:
        raise Unbuilt(f"{size / 1e6:.0f} M parameters")
    try:
        try:
            model = AutoModel.from_config(copy.deepcopy(config))
        except ValueError:  # no scaled_dot_product_attention in this type
            config._attn_implementation = "eager"
            model = AutoModel.from_config(copy.deepcopy(config))
    except Exception as error:
        raise Unbuilt(f"{type(error).__name__}: {str(error)[:160]}") from None
    model = model.float().eval()
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise Unbuilt("too many parameters")
    _randomise(model)
    # What a first run leaves on a module (a cached codebook) would stay on the CPU.
    fresh = copy.deepcopy(model)
    reasons = []
    own = recipes.inputs(model_type, config)
    for inputs in [own] if own else _candidates(model, config):
        try:
            with torch.no_grad():
                model(**{name: value.clone() for name, value in inputs.items()})
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:160]}")
            continue
        return Tiny(fresh, inputs)
    raise Unbuilt(reasons[0] if reasons else "no known input")
