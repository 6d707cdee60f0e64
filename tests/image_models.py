"""Tiny random image-text models in float64, and a prompt with an image for each."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from tiny import sharpen_
from torch import Tensor

IMAGE = 90
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
    "max_position_embeddings": 768,
}
THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
WINDOWS = {
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

CONFIGS: dict[str, Any] = {
    "qwen2_vl": lambda: t.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": THREE_AXES},
        vision_config={**PATCHES, "depth": 1, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        **QWEN,
    ),
    "qwen3_vl": lambda: t.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": THREE_AXES},
        vision_config={
            **PATCHES,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        **QWEN,
    ),
    "gemma3": lambda: t.Gemma3Config(
        text_config={**TEXT, **WINDOWS, "head_dim": 8},
        vision_config={**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=88,
        eoi_token_index=89,
        image_token_index=IMAGE,
    ),
    "llava": lambda: t.LlavaConfig(
        text_config=t.LlamaConfig(**TEXT),
        vision_config=t.CLIPVisionConfig(**VISION, num_hidden_layers=2, image_size=8, patch_size=4, projection_dim=16),
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_select_strategy="default",
    ),
}


def image_model(name: str) -> Any:
    torch.manual_seed(0)
    model = t.AutoModelForImageTextToText.from_config(CONFIGS[name]()).double()
    sharpen_(model, torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def image_prompt(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Fourteen tokens, four of which stand for the image that the seed draws; what a processor would return."""
    tokens = torch.randint(3, 80, (1, 14), generator=torch.Generator().manual_seed(0))
    tokens[0, 4:8] = IMAGE
    tokens[0, 3], tokens[0, 8] = {"gemma3": (88, 89)}.get(name, (92, 93))
    is_image, generator = (tokens == IMAGE).long(), torch.Generator().manual_seed(seed)
    found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        found |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": is_image}
    else:
        size = 28 if name == "gemma3" else 8
        pixels = torch.randn(1, 3, size, size, generator=generator)
        found |= {"token_type_ids": is_image} if name == "gemma3" else {}
    return found | {"pixel_values": pixels.double()}
