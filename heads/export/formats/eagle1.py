"""The first EAGLE: vLLM and SGLang want two different folders, so `--server` says for which one it is.

    server   architectures              fc
    vllm     LlamaForCausalLM           without bias: one in the file ends in an error
    sglang   LlamaForCausalLMEagle      with bias: without one in the file it stays random, so zeros are written

In both the layer reads fc([embedding ; final hidden state]) without an input norm, and the target's unembedding gives
the logits.

Source: SafeAILab/EAGLE eagle/model/cnets1.py; vLLM model_executor/models/llama_eagle.py; SGLang
srt/models/llama_eagle.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from heads.backbone.model import Backbone
from heads.export.eagle_draft import STEPS, check_eagle, draft_tensors, layer_config
from heads.export.folder import read_config, refuse_kind, try_config, write_folder
from heads.export.plain_logits import refuse_scaled_embedding
from heads.export.read_eagle_draft import classes_named, read_draft, read_steps
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "vLLM or SGLang (--server): the first EAGLE (read and written)"
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


@validated
@dataclass(kw_only=True)
class Config:
    """Which server the folder is for.

    Attributes:
        server: "vllm" or "sglang".
    """

    server: Literal["vllm", "sglang"] = "vllm"


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: other heads than eagle heads of version 1, or with a draft vocabulary.
    """
    check_eagle(token_heads, "eagle1", version=1)
    refuse_scaled_embedding(token_heads.backbone, "eagle1")
    if token_heads.draft_tokens_S is not None:
        raise ValueError("Heads with a draft vocabulary were given; the format eagle1 scores every token.")
    tensors = draft_tensors(token_heads, "eagle1", "layers.0")
    if config.server == "sglang":
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
    fields = {
        "architectures": [ARCHITECTURES[config.server]],
        **layer_config(token_heads),
        STEPS: token_heads.num_heads,
    }
    write_folder(folder, tensors, fields, "model.safetensors")


def recognises(folder: Path) -> bool:
    config = try_config(folder)
    known = set(classes_named(config)) & {*ARCHITECTURES.values(), "EagleLlamaForCausalLM"}
    return bool(known) and config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, or one whose draft is not what eagle heads are.
    """
    config = read_config(folder)
    if not recognises(folder):
        raise refuse_kind(folder, "eagle1", "config.json names no Llama class with one layer")
    return read_draft(folder, backbone, config, num_heads=read_steps(config, folder), version=1)
