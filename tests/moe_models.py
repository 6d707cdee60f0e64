"""Tiny random mixture-of-experts models."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

COMMON = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
COMMON |= {"bos_token_id": 2, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}

CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**COMMON, **HEADS, **EXPERTS, num_experts=4, head_dim=8),
    "mixtral": lambda: t.MixtralConfig(**COMMON, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **COMMON,
        **{**HEADS, "num_key_value_heads": 4},
        **ROUTED,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "glm4_moe": lambda: t.Glm4MoeConfig(**COMMON, **HEADS, **ROUTED, topk_group=1, head_dim=8),
}


def moe_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Experts are drawn wide enough that another choice of them changes the text."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()
