"""Tiny random causal LMs made from config objects, one for each architecture that Headway is tested on.

They are sharpened: matrices are drawn wide enough that layers change what they read and logits spread over several
units. With Hugging Face's own initialisation (0.02) every model repeats its last token and any two best logits are
nearly equal, so a test on greedy text would show nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BioGptConfig,
    CodeGenConfig,
    CohereConfig,
    CTRLConfig,
    DeepseekV2Config,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    XGLMConfig,
)

from heads.backbone.support import find_final_norm

ARCHITECTURES = ("llama", "gpt_neox", "qwen3", "mistral", "gemma", "phi3", "codegen")
EAGER_ONLY = {"codegen": "CodeGen has no sdpa attention in transformers"}
FLOAT32_ONLY = {
    "deepseek_v2": "DeepSeek-V2 rotates queries and keys in float32, whatever its weights are",
    "xglm": "XGLM's attention has the least float64 in a float32 place",
}
EOS, PAD = 1, 0
VOCAB = 29
Attention = Literal["eager", "sdpa"]

SMALL = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 768,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
LLAMA_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITH_HEAD_DIM = {**LLAMA_LIKE, "head_dim": 8}

TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_TOKENS = {"boi_token_index": 26, "eoi_token_index": 27, "image_token_index": 28}


def gemma4_text() -> Gemma4TextConfig:
    """Each layer reads an embedding of the token of its own."""
    return Gemma4TextConfig(
        **WITH_HEAD_DIM,
        global_head_dim=16,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )


CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False),
    "gpt_neox": lambda: GPTNeoXConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, rotary_pct=0.5
    ),
    "gpt_neox_serial": lambda: GPTNeoXConfig(
        **SMALL,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_parallel_residual=False,
    ),
    "qwen3": lambda: Qwen3Config(**WITH_HEAD_DIM, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**WITH_HEAD_DIM, sliding_window=None),
    "mistral_windowed": lambda: MistralConfig(**WITH_HEAD_DIM, sliding_window=8),
    "gemma": lambda: GemmaConfig(**WITH_HEAD_DIM),
    "phi3": lambda: Phi3Config(**LLAMA_LIKE, tie_word_embeddings=False),
    "phi3_windowed": lambda: Phi3Config(**LLAMA_LIKE, tie_word_embeddings=False, sliding_window=8),
    "codegen": lambda: CodeGenConfig(**SMALL, n_positions=768, n_embd=32, n_layer=3, n_head=4, rotary_dim=4),
    "gemma2": lambda: Gemma2Config(**WITH_HEAD_DIM, sliding_window=8, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **{**WITH_HEAD_DIM, "num_hidden_layers": 4},
        sliding_window=8,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen3_windowed": lambda: Qwen3Config(
        **WITH_HEAD_DIM,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "cohere": lambda: CohereConfig(**LLAMA_LIKE, logit_scale=0.25),
    "granite": lambda: GraniteConfig(
        **LLAMA_LIKE, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3
    ),
    "gpt2": lambda: GPT2Config(**SMALL, n_positions=768, n_embd=32, n_layer=3, n_head=4),
    "opt": lambda: OPTConfig(
        **SMALL, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "falcon": lambda: FalconConfig(**SMALL, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=False),
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**LLAMA_LIKE, "num_key_value_heads": 4},
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
    ),
    "biogpt": lambda: BioGptConfig(
        **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    ),
    "xglm": lambda: XGLMConfig(**SMALL, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4),
    "ctrl": lambda: CTRLConfig(**SMALL, n_positions=768, n_embd=32, dff=48, n_layer=3, n_head=4),
    "gemma4": gemma4_text,
    "gemma3_with_images": lambda: Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(), vision_config=TINY_VISION, mm_tokens_per_image=4, **IMAGE_TOKENS
    ),
    "gemma4_with_images": lambda: Gemma4Config(text_config=gemma4_text().to_dict(), vision_config=None),
}

HYBRID = {**LLAMA_LIKE, "num_hidden_layers": 4}
DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRID_CONFIGS: dict[str, Any] = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **HYBRID,
        **DELTA_RULE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**HYBRID, **DELTA_RULE, head_dim=16),
    "nemotron_h": lambda: NemotronHConfig(
        **HYBRID,
        head_dim=8,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **HYBRID,
        **MAMBA,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_expand=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **{**HYBRID, "num_hidden_layers": 3},
        **{**MAMBA, "mamba_n_heads": 4},
        mamba_d_ssm=32,
        head_dim=8,
        ssm_in_multiplier=0.7,
        lm_head_multiplier=0.5,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(**{**HYBRID, "num_key_value_heads": 4}),
    "lfm2": lambda: Lfm2Config(
        **HYBRID, layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "bamba": lambda: BambaConfig(**HYBRID, **MAMBA, attn_layer_indices=[1], mamba_expand=2),
    "kimi_linear": lambda: KimiLinearConfig(
        **{**HYBRID, "num_key_value_heads": 4},
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        linear_head_dim=8,
        linear_num_heads=4,
        moe_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "jamba": lambda: JambaConfig(
        **HYBRID,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
}
HYBRIDS = ("qwen3_next", "qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "olmo_hybrid", "lfm2")


def tiny_model(
    name: str,
    *,
    attn: Attention = "eager",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sharpen: bool = True,
    **overrides: Any,
) -> Any:
    """A tiny random model in eval mode; `overrides` change fields of its config."""
    config = (CONFIGS | HYBRID_CONFIGS)[name]()
    for field, value in overrides.items():
        setattr(config, field, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    if sharpen:
        sharpen_(model, torch.Generator().manual_seed(seed))
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model.eval()


@functools.cache
def shared_model(name: str, attn: Attention = "eager", dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The same model for every test that only reads it."""
    return tiny_model(name, attn=attn, dtype=dtype, seed=seed)


@torch.no_grad()
def sharpen_(model: Any, generator: torch.Generator) -> None:
    """Matrices at 2/√fan-in, noise on norms and biases, embeddings small beside what the layers add."""
    embedding, unembedding = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding is unembedding
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter is embedding:  # Gemma multiplies it by √width
            parameter.copy_(noise * (0.1 if "Gemma" in type(model).__name__ else 0.5))
        elif parameter is unembedding:
            parameter.copy_(noise * 3.0 / parameter.shape[1] ** 0.5)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * 2.0 / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(noise * 0.1)
    if tied:  # small embeddings give small logits; the final norm makes up for it
        norm = find_final_norm(model.get_decoder())
        norm.weight.add_(4.0 if "Gemma" in type(model).__name__ else 1.0)


def random_tokens(*shape: int, seed: int = 0, low: int = 3, vocab: int = VOCAB) -> Tensor:
    """Tokens without pad, eos and bos."""
    return torch.randint(low, vocab, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of a batch of prompts, padding on the left."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)
