"""The speculators format of EAGLE-3: what vLLM serves with `vllm serve FOLDER`, the draft naming its target.

Hidden states are named as transformers counts them, and EAGLE-3.1's switches have keys, so all heads of version 3 have
a place. `norm_before_residual` is always written, since its default differs: true in vLLM, false in speculators.

Source: vllm-project/speculators src/speculators/{config.py,models/eagle3/}; vLLM
transformers_utils/configs/speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.backbone.model import Backbone
from heads.export.eagle_draft import STEPS, check_eagle, draft_tensors, layer_config
from heads.export.folder import read_config, refuse_kind, try_config, write_folder
from heads.export.formats.eagle3 import SWITCHES, TAPS, default_taps
from heads.export.read_eagle_draft import DEFAULT_STEPS, listed, read_draft, read_steps, read_switches
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "vLLM and speculators: EAGLE-3 and 3.1 (read and written)"
KIND = "speculators_model_type"


@validated
@dataclass(kw_only=True)
class Config:
    """What the draft says of its target.

    Attributes:
        verifier: name or folder of the model that a server loads with it; by default the backbone's.
    """

    verifier: str | None = None


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: other heads than eagle heads of version 3.
    """
    check_eagle(token_heads, "speculators", version=3)
    heads: Any = token_heads
    backbone = token_heads.backbone
    fields = {
        "architectures": ["Eagle3Speculator"],
        KIND: "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": token_heads.num_scored,
        TAPS: heads.tap_layers,
        **{name: getattr(heads.config, name) for name in SWITCHES},
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(token_heads),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": token_heads.num_heads,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": config.verifier or backbone.name,
                "architectures": [type(backbone.model).__name__],
            },
        },
    }
    write_folder(folder, draft_tensors(token_heads, "speculators", "layers.0"), fields, "model.safetensors")


def recognises(folder: Path) -> bool:
    return KIND in try_config(folder)


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, or one whose draft is not what eagle heads are.
    """
    config = read_config(folder)
    if config.get(KIND) != "eagle3":
        raise refuse_kind(folder, "speculators", f"config.json has {KIND} {config.get(KIND)!r} and not 'eagle3'")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise refuse_kind(folder, "speculators", "config.json has no transformer_layer_config")
    if config.get("norm_before_fc") or config.get("target_hidden_size") not in (None, backbone.hidden_size):
        raise ValueError(f"{folder} has norm_before_fc or a width of its own; eagle heads have neither.")
    taps = config.get(TAPS) or default_taps(backbone.num_layers)
    return read_draft(
        folder,
        backbone,
        layer,
        vocab=config.get("draft_vocab_size"),
        num_heads=read_steps({STEPS: proposed(config)}, folder),
        taps=listed(taps, folder),
        **read_switches(config, SWITCHES, folder),
    )


def proposed(config: dict[str, Any]) -> Any:
    """`speculative_tokens` of the first proposal method."""
    try:
        return config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return DEFAULT_STEPS
