"""Tiny models with multi-token-prediction modules in their files, by the names that released checkpoints have.

Transformers writes no such tensors, so they are written here, from its own `MtpModel` where it has one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import EOS, LLAMA_LIKE, PAD, WITH_HEAD_DIM, sharpen_
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, MellumConfig, Qwen2Config, Qwen3Config
from transformers.modeling_layers import MtpModel

MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "num_mtp_layers": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, Any] = {
    "glm4_moe": lambda: Glm4MoeConfig(**WITH_HEAD_DIM, **MOE),
    "deepseek_v3": lambda: DeepseekV3Config(**{**LLAMA_LIKE, "num_key_value_heads": 4}, **MOE, **LATENT),
    "qwen_like": lambda: Qwen3Config(**WITH_HEAD_DIM, tie_word_embeddings=False),
    "mellum": lambda: MellumConfig(**WITH_HEAD_DIM, **SPARSE, **SLIDING, tie_word_embeddings=False),
    "mimo_like": lambda: Qwen2Config(**LLAMA_LIKE, tie_word_embeddings=False),
}
PARTS = {
    "glm4_moe": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "deepseek_v3": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen_like": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mellum": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo_like": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}
OURS = ("enorm", "hnorm", "eh_proj", "post_norm")


def model_with_modules(name: str, count: int = 1, seed: int = 0) -> tuple[Any, MtpModel]:
    """A backbone in float64 and its modules, all random."""
    config = CONFIGS[name]()
    config.num_mtp_layers = count
    config.mtp_layer_types = ["sliding_attention" if name == "mellum" else "full_attention"] * count
    torch.manual_seed(seed)
    options = {"experts_implementation": "eager"} if hasattr(config, "moe_intermediate_size") else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options).double()
    modules = MtpModel(model, count).double()
    generator = torch.Generator().manual_seed(seed)
    sharpen_(model, generator)
    shared = {id(parameter) for parameter in model.parameters()}
    with torch.no_grad():
        for parameter in (p for p in modules.parameters() if id(p) not in shared):
            scale = 2.0 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            parameter.copy_(noise if parameter.ndim > 1 else 1.0 + noise)
    for router in (m for m in (*model.modules(), *modules.modules()) if hasattr(m, "e_score_correction_bias")):
        router.e_score_correction_bias.copy_(torch.randn(4, generator=generator) * 0.1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    return model.eval(), modules.eval()


def foreign_tensors(name: str, model: Any, modules: MtpModel) -> dict[str, Tensor]:
    """The modules' tensors by the names of released checkpoints, one tensor an expert."""
    parts = dict(zip(OURS, PARTS[name], strict=True))
    found = {}
    for key, tensor in modules.state_dict().items():
        if not key.startswith("layers."):
            continue
        _, index, part, *rest = key.split(".")
        own, block = roots(name, int(index), model.config.num_hidden_layers)
        if part in parts:
            found[f"{own}{parts[part]}.weight"] = tensor
            continue
        inside = ".".join(rest)
        if inside.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for half, which in zip(both.chunk(2), ("gate", "up"), strict=True):
                    found[f"{block}mlp.experts.{expert}.{which}_proj.weight"] = half
        elif inside.endswith("experts.down_proj"):
            found |= {f"{block}mlp.experts.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            found[f"{block}{inside}"] = tensor
    if name in ("glm4_moe", "deepseek_v3"):
        own, _ = roots(name, 0, model.config.num_hidden_layers)
        found[f"{own}embed_tokens.weight"] = model.get_input_embeddings().weight
        found[f"{own}shared_head.head.weight"] = model.lm_head.weight
    return {key: tensor.detach().clone().contiguous() for key, tensor in found.items()}


def roots(name: str, index: int, num_layers: int) -> tuple[str, str]:
    if name in ("qwen_like", "mellum"):
        return "mtp.", f"mtp.layers.{index}."
    root = f"model.mtp_layers.{index}." if name == "mimo_like" else f"model.layers.{num_layers + index}."
    return root, root


def write_model(folder: Path, name: str, model: Any, modules: MtpModel, **sizes: Any) -> Path:
    """The model's folder, its modules among the other tensors; in shards with `max_shard_size`."""
    model.save_pretrained(folder, **sizes)
    last = sorted(folder.glob("*.safetensors"))[-1]
    extra = foreign_tensors(name, model, modules)
    save_file(load_file(last) | extra, last, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found = json.loads(index.read_text())
        found["weight_map"] |= dict.fromkeys(extra, last.name)
        index.write_text(json.dumps(found))
    return folder
