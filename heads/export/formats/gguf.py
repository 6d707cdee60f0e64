"""GGUF for llama.cpp: `backbone.gguf`, and `draft.gguf` with eagle heads as an EAGLE-3 draft beside it.

    llama-server -m FOLDER/backbone.gguf -md FOLDER/draft.gguf --spec-type draft-eagle3

Both carry the tokenizer. Backbones are those of heads/export/gguf/tables.py.

Source: heads/export/gguf/.
"""
# S scored token

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from heads.backbone.loading import BackboneConfig, load_tokenizer
from heads.backbone.projection import unpacked
from heads.export.drafted_logits import ROWS, largest_difference, largest_logit
from heads.export.eagle_draft import check_eagle
from heads.export.folder import create_with
from heads.export.formats.eagle3 import SWITCHES
from heads.export.gguf.files import DTYPES, read_gguf, write_gguf
from heads.export.gguf.tables import (
    ARCHITECTURES,
    BACKBONE,
    DRAFT,
    PAIRED,
    layer_numbers,
    rope_base,
    rotated,
)
from heads.export.gguf.vocabulary import vocabulary
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "llama.cpp: backbone and eagle heads as an EAGLE-3 draft (written)"
FILES = ("backbone.gguf", "draft.gguf")
Contents = tuple[str, dict[str, Any], dict[str, Tensor]]
"""Architecture, metadata, tensors."""
ROUNDINGS = 8
"""float32 roundings of the largest logit: the file stores the norms' epsilon and the rotary base in float32."""


@validated
@dataclass(kw_only=True)
class Config:
    """Two GGUF files.

    Attributes:
        dtype: of matrices: f32, f16 or bf16.
        tokenizer: folder or hub name; none is the backbone's.
    """

    dtype: Literal["f32", "f16", "bf16"] = "bf16"
    tokenizer: str | None = None


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads, a backbone or a tokenizer that llama.cpp cannot hold.
    """
    for name, (architecture, metadata, tensors) in contents(token_heads, config).items():
        write_gguf(folder / name, architecture, metadata, tensors, config.dtype)


def compare(token_heads: TokenHeads, folder: Path, config: Config) -> str:
    """Read both files back, and compare every value with what was given and the draft's logits with the heads'.

    Raises:
        ValueError: something differs.
    """
    for name, (architecture, metadata, tensors) in contents(token_heads, config).items():
        said, found = read_gguf(folder / name)
        said.pop("general.architecture")
        wrong = [key for key in {**metadata, **said} if not same(metadata.get(key), said.get(key))]
        wrong += [key for key in {**tensors, **found} if not equal(tensors.get(key), found.get(key), config.dtype)]
        if wrong:
            raise ValueError(f"{name} ({architecture}) reads back otherwise: {', '.join(wrong[:6])}; please report it.")
    difference = largest_difference(
        as_stored(token_heads, DTYPES[config.dtype]), read_draft_back(token_heads, folder / FILES[1])
    )
    if not difference <= ROUNDINGS * torch.finfo(torch.float32).eps * largest_logit(token_heads):
        raise ValueError(
            f"The draft reads back with other logits, by up to {difference:.2g}; nothing was written. This is a defect "
            f"of the format's file, please report it."
        )
    return (
        f"read back: every tensor bit for bit as {config.dtype}, and the draft's logits within {difference:.1g} of the "
        f"heads' in {config.dtype} on {ROWS} random texts; make verify-llamacpp runs such files"
    )


def as_stored(token_heads: Any, dtype: torch.dtype) -> TokenHeads:
    """The heads with an unembedding of their own, and with matrices rounded to this dtype."""
    tensors = dict(token_heads.state_dict())
    tensors["lm_head.weight"] = unpacked(token_heads.projection(1).weight)
    stored = {name: tensor.to(dtype).to(tensor) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    fields = asdict(token_heads.config) | {"unembedding": "own"}
    fields.pop("draft_vocabulary")
    again = create_with(
        "eagle", token_heads.backbone, stored, FILES[1], draft_tokens=stored.get("draft_tokens_S"), **fields
    )
    return again.to(next(token_heads.parameters())).eval()


def read_draft_back(token_heads: TokenHeads, path: Path) -> TokenHeads:
    """Eagle heads from a draft's file, in which only their number K is missing."""
    said, found = read_gguf(path)
    number = {key.removeprefix("eagle3."): value for key, value in said.items()}
    attended = number["attention.head_count"], number["attention.head_count_kv"]
    tokens_S = found.pop("d2t", None)
    tensors = DRAFT.to_native(rotated(found, *attended, back=True), str(path))
    again = create_with(
        "eagle",
        token_heads.backbone,
        tensors if tokens_S is None else tensors | {"draft_tokens_S": tokens_S},
        path,
        draft_tokens=tokens_S,
        num_heads=token_heads.num_heads,
        taps=number["target_layers"],
        norm_before_residual=number["norm_before_residual"],
        intermediate_size=number["feed_forward_length"],
        num_attention_heads=attended[0],
        num_key_value_heads=attended[1],
        head_dim=number["attention.key_length"],
        rms_norm_eps=number["attention.layer_norm_rms_epsilon"],
        rope_theta=number["rope.freq_base"],
    )
    return again.to(next(token_heads.parameters())).eval()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return torch.tensor(one).item() == torch.tensor(other).item()  # stored in float32
    return bool(one == other)


def equal(one: Tensor | None, other: Tensor | None, dtype: str) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    wanted = one.to(DTYPES[dtype] if one.ndim > 1 else torch.float32) if one.is_floating_point() else one
    return torch.equal(wanted.cpu(), other)


def contents(token_heads: Any, config: Config) -> dict[str, Contents]:
    check_eagle(token_heads, "gguf", version=3)
    backbone, model = token_heads.backbone, token_heads.backbone.model
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{type(model).__name__} was given; the format gguf is written for {', '.join(ARCHITECTURES)}. llama.cpp's "
            f"own convert_hf_to_gguf.py writes other backbones."
        )
    used = [name for name in SWITCHES if name != "norm_before_residual" and getattr(token_heads.config, name)]
    if used or len(token_heads.tap_layers) != 3:
        raise ValueError(
            f"Heads with {', '.join(used) or f'{len(token_heads.tap_layers)} hidden states'} were given; llama.cpp's "
            f"EAGLE-3 reads three hidden states without EAGLE-3.1's switches."
        )
    refuse_other_layers(model.config)
    name = config.tokenizer or backbone.name
    words = {
        f"tokenizer.ggml.{key}": value
        for key, value in vocabulary(load_tokenizer(BackboneConfig(name_or_path=name)), backbone.vocab_size).items()
    }
    return {
        FILES[0]: backbone_contents(model, words, backbone.num_layers),
        FILES[1]: draft_contents(token_heads, words),
    }


def refuse_other_layers(config: Any) -> None:
    """
    Raises:
        ValueError: layers that llama.cpp's graphs of these architectures do not compute.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if config.hidden_act != "silu" or (window is not None and window < config.max_position_embeddings):
        raise ValueError(
            f"A backbone with hidden_act {config.hidden_act!r} and sliding_window {window} was given; llama.cpp "
            f"computes these architectures with silu and full attention."
        )


def backbone_contents(model: Any, words: dict[str, Any], layers: int) -> Contents:
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    found = BACKBONE.to_foreign(tensors, "gguf")
    if architecture in PAIRED:
        found = rotated(found, config.num_attention_heads, config.num_key_value_heads)
    numbers = layer_numbers(config, layers, config.max_position_embeddings)
    numbers["rope.freq_base"] = rope_base(config.rope_parameters, type(model).__name__)
    numbers["vocab_size"] = config.vocab_size
    return architecture, {f"{architecture}.{key}": value for key, value in numbers.items()} | words, found


def draft_contents(token_heads: Any, words: dict[str, Any]) -> Contents:
    shape, backbone = token_heads.shape, token_heads.backbone
    tensors = dict(token_heads.state_dict())
    tokens_S = tensors.pop("draft_tokens_S", None)
    tensors["lm_head.weight"] = unpacked(token_heads.projection(1).weight)
    found = rotated(DRAFT.to_foreign(tensors, "gguf"), shape.num_attention_heads, shape.num_key_value_heads)
    if tokens_S is not None:
        found["d2t"] = tokens_S  # the ids themselves, where EAGLE-3's files have offsets
    numbers = layer_numbers(shape, 1, backbone.config.max_position_embeddings)
    numbers["rope.freq_base"] = rope_base(token_heads.rope_parameters, "The draft")
    numbers["vocab_size"] = backbone.vocab_size
    numbers["target_layers"] = list(token_heads.tap_layers)
    numbers["target_hidden_size"] = backbone.hidden_size
    numbers["norm_before_residual"] = token_heads.config.norm_before_residual
    return "eagle3", {f"eagle3.{key}": value for key, value in numbers.items()} | words, found
