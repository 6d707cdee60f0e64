"""EAGLE-3: one folder that vLLM, SGLang and llama.cpp's converter read alike, and what was released for them.

    hidden states     [2, n // 2, n - 3] of n layers, left out of config.json: if they were given, vLLM would read k as
                      hidden_states[k] and SGLang as hidden_states[k + 1]
    draft_vocab_size  always present: SGLang reads it, llama.cpp knows the kind of folder by it
    lm_head           always present, even where the heads share the backbone's

A released folder that does give hidden states is read as vLLM reads it. EAGLE-3.1's switches are written by
`speculators` alone, since not all three servers have them.

Source: SafeAILab/EAGLE eagle/model/cnets.py; vLLM model_executor/models/llama_eagle3.py; SGLang
srt/models/llama_eagle3.py; llama.cpp conversion/llama.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.backbone.model import Backbone
from heads.export.eagle_draft import STEPS, check_eagle, draft_tensors, layer_config
from heads.export.folder import read_config, refuse_kind, try_config, write_folder
from heads.export.read_eagle_draft import classes_named, listed, read_draft, read_steps, read_switches
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "vLLM, SGLang and llama.cpp: EAGLE-3 (read and written); one folder for all three"
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
TAPS = "eagle_aux_hidden_state_layer_ids"


@validated
@dataclass(kw_only=True)
class Config:
    """The common folder has no options."""


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: other heads, fewer than 7 layers, other hidden states, or switches that not all servers have.
    """
    check_eagle(token_heads, "eagle3", version=3)
    refuse_uncommon(token_heads)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(token_heads),
        "draft_vocab_size": token_heads.num_scored,
        "norm_before_residual": False,
        STEPS: token_heads.num_heads,
    }
    write_folder(folder, draft_tensors(token_heads, "eagle3", "midlayer"), fields, "model.safetensors")


def refuse_uncommon(token_heads: Any) -> None:
    layers = token_heads.backbone.num_layers
    if layers < 7 or token_heads.tap_layers != default_taps(layers):
        raise ValueError(
            f"Heads that read the hidden states {token_heads.tap_layers} of {layers} layers were given; servers agree "
            f"on [2, n // 2, n - 3] of n ≥ 7 alone: use --to speculators, which names them."
        )
    for name in SWITCHES:
        if getattr(token_heads.config, name):
            raise ValueError(f"Heads with {name} were given; not all servers have it: use --to speculators.")


def default_taps(layers: int) -> list[int]:
    """
    >>> default_taps(32)
    [2, 16, 29]
    """
    return [2, layers // 2, layers - 3]


def recognises(folder: Path) -> bool:
    config = try_config(folder)
    named = any("Eagle3" in name for name in classes_named(config))
    return "speculators_model_type" not in config and (named or "draft_vocab_size" in config)


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, or one whose draft is not what eagle heads are.
    """
    config = read_config(folder)
    if not recognises(folder):
        raise refuse_kind(folder, "eagle3", "config.json has no draft_vocab_size and names no Eagle3 class")
    inner = config.get("eagle_config")
    said = {**config, **(inner if isinstance(inner, dict) else {})}
    if said.get("use_aux_hidden_state") is False or said.get("norm_before_fc"):
        raise ValueError(f"{folder} has norm_before_fc or no auxiliary hidden states; eagle heads have neither.")
    taps = said.get(TAPS)
    if taps is None:
        if backbone.num_layers < 7:
            raise ValueError(f"{folder} names no hidden states, and {backbone.name} has fewer than 7 layers.")
        taps = default_taps(backbone.num_layers)
    switches = read_switches(config, SWITCHES, folder)
    fields = {"num_heads": read_steps(config, folder), "taps": listed(taps, folder), **switches}
    return read_draft(folder, backbone, config, vocab=config.get("draft_vocab_size"), **fields)
