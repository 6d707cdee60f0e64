"""Read an EAGLE draft from a folder as heads: a Llama layer, its unembedding and a draft vocabulary.

Drafts with anything else are refused. The table of names is in heads/export/eagle_draft.py.

Source: SafeAILab/EAGLE eagle/model/cnets.py.
"""
# S scored token, V vocabulary, D model width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from heads.backbone.model import Backbone
from heads.export.eagle_draft import STEPS, names
from heads.export.folder import create_with, find_tensors, number_of, read_tensors
from heads.export.plain_logits import is_copy, refuse_other_logits, refuse_scaled_embedding
from heads.interface.draft_layer import rope_parameters_of
from heads.interface.token_heads import MAX_HEADS, TokenHeads

FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
DEFAULT_STEPS = 4
MAX_BASE = 1e30  # of rotary embeddings


def read_draft(
    folder: Path, backbone: Backbone, config: Mapping[str, Any], *, vocab: int | None = None, **fields: Any
) -> TokenHeads:
    """Eagle heads from a folder.

    Args:
        config: the layer's Llama config.
        vocab: how many tokens the draft scores; None if the folder does not say.
        fields: further fields of the heads' Config that the format gives.

    Raises:
        ValueError: a layer that is not a Llama layer of the backbone's width; tensors that are unknown, missing or of
            another shape; an embedding that is not the backbone's; or a RoPE that is neither the default nor the
            backbone's.
    """
    refuse_other_logits(backbone, "EAGLE")
    refuse_scaled_embedding(backbone, "EAGLE")
    if vocab is not None:
        number_of({"draft_vocab_size": vocab}, "draft_vocab_size", folder)
    shape = read_shape(config, backbone, folder)
    tensors = read_tensors(find_tensors(folder, FILES))
    drop_embedding(tensors, backbone, folder)
    drop_zero_bias(tensors, folder)
    tokens_S = take_draft_tokens(tensors, vocab, backbone, folder)
    layer = "layers.0" if any(name.startswith("layers.0.") for name in tensors) else "midlayer"
    native = names(layer).to_native(tensors, str(folder))
    fields["unembedding"] = "own" if "lm_head.weight" in native else "shared"
    if tokens_S is not None:
        native["draft_tokens_S"] = tokens_S
    fields["rope_theta"] = read_rope_theta(config, backbone, folder)
    try:
        return create_with("eagle", backbone, native, folder, draft_tokens=tokens_S, **shape, **fields)
    except StrictDataclassError as error:  # transformers' configs raise it, and it is no ValueError
        raise ValueError(f"{folder} has a layer that cannot be: {' '.join(str(error).split())[:200]}") from None


def read_shape(config: Mapping[str, Any], backbone: Backbone, folder: Path) -> dict[str, Any]:
    """Fields of the heads' Config.

    Raises:
        ValueError: a layer that eagle heads on this backbone cannot have.
    """
    wanted = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size, "num_hidden_layers": 1}
    wanted |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in wanted.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{folder} has {key} {config[key]!r}; eagle heads on {backbone.name} have {value!r}.")
    heads = number_of(config, "num_attention_heads", folder)
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float):
        raise ValueError(f"{folder} has rms_norm_eps {eps!r}; give a number such as 1e-6.")
    defaults = {"num_key_value_heads": heads, "head_dim": backbone.hidden_size // heads}
    given = {key: value for key, value in config.items() if value is not None}
    return {
        "intermediate_size": number_of(config, "intermediate_size", folder),
        "num_attention_heads": heads,
        **{key: number_of(defaults | given, key, folder) for key in defaults},
        "rms_norm_eps": eps,
    }


def read_rope_theta(config: Mapping[str, Any], backbone: Backbone, folder: Path) -> float | None:
    """The base of a default RoPE; None if the RoPE is of another kind, which must be the backbone's.

    A config that names no base has Llama's 10000, whatever the backbone's is.

    Raises:
        ValueError: a base that is no number, a RoPE on a part of each head, or one that the backbone does not have.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = given.get("rope_theta", config.get("rope_theta", 10000.0)) if isinstance(given, dict) else None
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < MAX_BASE:
        raise ValueError(f"{folder} has RoPE {given!r:.80} with base {base!r:.40}; give rope_theta as a number.")
    given = {"rope_type" if key == "type" else key: value for key, value in given.items()}
    if (share := given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1.0):
        raise ValueError(
            f"{folder} has partial_rotary_factor {share!r:.40}, and a Llama layer turns whole heads; allowed is 1.0."
        )
    given["rope_theta"] = base
    if given.get("rope_type", "default") == "default":
        return float(base)
    if given == rope_parameters_of(backbone, None):
        return None
    raise ValueError(
        f"{folder} has RoPE of the kind {given['rope_type']!r}, which is not that of {backbone.name}; allowed are the "
        f"default kind and the backbone's own."
    )


def drop_embedding(tensors: dict[str, Tensor], backbone: Backbone, folder: Path) -> None:
    """Remove a copy of the backbone's embedding from the tensors.

    Raises:
        ValueError: the draft's embedding is no copy.
    """
    found_VD = tensors.pop("embed_tokens.weight", None)
    if found_VD is None:
        return
    if not is_copy(found_VD, backbone.model.get_input_embeddings().weight):
        raise ValueError(
            f"{folder} has an embedding of its own, and eagle heads read that of the backbone {backbone.name}; give "
            f"the model that the draft was made for."
        )


def drop_zero_bias(tensors: dict[str, Tensor], folder: Path) -> None:
    """Remove fc's bias from the tensors.

    Raises:
        ValueError: it is not zero.
    """
    bias_D = tensors.pop("fc.bias", None)
    if bias_D is not None and bool(bias_D.any()):
        raise ValueError(f"{folder} has fc.bias, for which eagle heads have no place unless it is zero.")


def take_draft_tokens(tensors: dict[str, Tensor], vocab: int | None, backbone: Backbone, folder: Path) -> Tensor | None:
    """(S,) the scored tokens, ascending; None if all are scored. The unembedding's rows are sorted in the same order.

    Raises:
        ValueError: ids that repeat or that the backbone lacks; or d2t is missing, of another size, or contradicts t2d.
    """
    d2t_S, t2d_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t_S is not None and (d2t_S.ndim != 1 or not len(d2t_S)):
        raise ValueError(f"{folder} has d2t of shape {tuple(d2t_S.shape)}; allowed is one offset a scored token.")
    if vocab is None:
        vocab = backbone.vocab_size if d2t_S is None else len(d2t_S)
    if d2t_S is None:
        if vocab != backbone.vocab_size:
            raise ValueError(f"{folder} scores {vocab} of {backbone.vocab_size} tokens, and d2t is missing.")
        return None
    rows_SD = tensors.get("lm_head.weight")
    if d2t_S.shape != (vocab,) or rows_SD is None or len(rows_SD) != vocab:
        raise ValueError(f"{folder} has d2t of shape {tuple(d2t_S.shape)} and not one row of lm_head for each of it.")
    tokens_S, order_S = (d2t_S.long() + torch.arange(vocab)).sort()
    if bool((tokens_S.diff() == 0).any()) or int(tokens_S[0]) < 0 or int(tokens_S[-1]) >= backbone.vocab_size:
        raise ValueError(f"{folder} has d2t with ids twice, or that {backbone.name} does not have; copy it again.")
    if t2d_V is not None and not torch.equal(t2d_V.flatten().bool().nonzero()[:, 0], tokens_S):
        raise ValueError(f"{folder} has t2d that marks other tokens than d2t; copy the folder again.")
    tensors["lm_head.weight"] = rows_SD[order_S]
    return None if vocab == backbone.vocab_size else tokens_S


def classes_named(config: Mapping[str, Any]) -> list[str]:
    """The names in `architectures`.

    >>> classes_named({"architectures": ["LlamaForCausalLM"]}), classes_named({"architectures": 5})
    (['LlamaForCausalLM'], [])
    """
    found = config.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def listed(taps: Any, folder: Path) -> list[Any]:
    """
    Raises:
        ValueError: hidden states that are no list; its entries are checked by the heads' Config.
    """
    if not isinstance(taps, list):
        raise ValueError(f"{folder} has hidden states {taps!r:.80}; allowed is a list of their numbers.")
    return taps


def read_switches(config: Mapping[str, Any], names: Sequence[str], folder: Path) -> dict[str, bool]:
    """Flags of config.json, False where they are missing.

    Raises:
        ValueError: one that is neither true nor false.
    """
    found = {name: config.get(name, False) for name in names}
    if wrong := {name: value for name, value in found.items() if not isinstance(value, bool)}:
        raise ValueError(f"{folder} has {wrong}; allowed are true and false.")
    return found


def read_steps(config: Mapping[str, Any], folder: Path) -> int:
    """K, the number of heads."""
    return number_of({STEPS: DEFAULT_STEPS, **config}, STEPS, folder, most=MAX_HEADS)
