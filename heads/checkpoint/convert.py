"""Convert trained heads: `merge` folds their backbone's adapter in, `prune_vocabulary` cuts them to some tokens.

    W' = W + (alpha / rank) · B A        computed in the dtype of loading, stored in the requested dtype

`merge` copies the heads' tensors byte for byte, with their fitted tree. Before anything is written, the logits of the
merged backbone are compared with those of the adapted one, in the dtype of the sum and rounded to the stored dtype.
"""
# B batch, T position, V vocabulary

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.backbone.loading import BackboneConfig, Dtype, load_tokenizer
from heads.backbone.model import Backbone
from heads.backbone.support import adapted_layers
from heads.checkpoint.adapter import adapter_off, has_adapter
from heads.checkpoint.backbone import save_backbone
from heads.checkpoint.opening import default_device, find_trained, load_recorded, recorded_backbone
from heads.checkpoint.save_load import describe_backbone, load, read_tensors, write_whole
from heads.checkpoint.schema import DESCRIPTION, TENSORS, HeadsDescription, read_description
from heads.decoding.request.entry import check_token_heads
from heads.decoding.tuned_file import TUNED_TREE
from heads.inside import find_inside
from heads.interface.draft_vocabulary import check_draft_tokens
from heads.interface.token_heads import TokenHeads
from heads.quantization.packed_heads import refuse_packed_heads

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Allowed difference of logits, as a share of the largest: each layer rounds one product instead of two."""
MUCH_LOST = 0.1
"""Share of the adapter's effect on the distributions; if rounding loses more, a warning is logged."""


def merge(folder: str | Path, out: str | Path, *, dtype: Dtype = "auto") -> Path:
    """Write heads whose backbone has its adapter folded in; returns the backbone's folder in `out`.

    Args:
        folder: heads that were trained with a LoRA adapter on their backbone.
        out: a folder that does not exist, or is empty.
        dtype: dtype of the merged backbone on disk; "auto" is the one in the unmerged backbone's config.json. Products
            are added in float32, or in float64 if dtype is float64.

    Raises:
        ValueError: no adapter, a quantised backbone, an `out` that is not empty, or merged logits that differ.
        OSError: the disk is full or `out` cannot be written.
    """
    description, config = check(folder, out)
    adder: Dtype = "float64" if dtype == "float64" else "float32"
    model = load_recorded(replace(config, dtype=adder), folder, default_device())
    load(folder, model)  # raises on damaged heads or another adapter before anything is written
    before_BTV = probe(model)
    with adapter_off(model):
        frozen_BTV = probe(model)
    merge_adapter(model)
    check_same(before_BTV, probe(model), folder)
    stored = stored_dtype(config, dtype)
    round_weights(model, stored)
    check_stored(before_BTV, stored_BTV := probe(model), stored)
    warn_of_rounding(frozen_BTV, before_BTV, stored_BTV, stored)
    where = Path(out)
    where.mkdir(parents=True, exist_ok=True)
    trained = save_backbone(model, where, dtype=stored, tokenizer=load_tokenizer(config))
    changed = {"backbone": describe_backbone(Backbone(model)), "trained_backbone": trained, "merged_from": str(folder)}
    text = json.dumps(asdict(description) | changed, indent=2) + "\n"
    write_whole(where, {TENSORS: (Path(folder) / TENSORS).read_bytes(), DESCRIPTION: text.encode()})
    if (tree := find_inside(folder, TUNED_TREE)).is_file():
        shutil.copy(tree, where / TUNED_TREE)
    return where / str(trained["folder"])


def check(folder: str | Path, out: str | Path) -> tuple[HeadsDescription, BackboneConfig]:
    """Check the folders before anything is loaded; returns heads.json and how to load the backbone.

    Raises:
        ValueError: there is nothing to merge, or `out` is not empty.
    """
    description = read_description(folder)
    read_tensors(Path(folder) / TENSORS, description.sha256)
    trained = description.trained_backbone
    if trained is None or not trained.adapter:
        kind = "was not trained with them" if trained is None else "is a whole one already"
        raise ValueError(
            f"The heads in {folder} have no adapter to merge: their backbone {kind}; use them as they are."
        )
    find_trained(folder, trained.folder)
    config = recorded_backbone(folder, "float32")
    if config.quantization:
        raise ValueError(
            f"The backbone of {folder} is quantised ({config.quantization.get('quant_method', 'as recorded')}), and an "
            f"adapter cannot be folded into quantised weights; use heads and adapter as they are with "
            f"heads.load_with_backbone({str(folder)!r})."
        )
    refuse_existing(Path(out))
    return description, config


def refuse_existing(out: Path) -> None:
    """
    Raises:
        ValueError: a file, or a folder with something in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists already and is not empty; give a folder that does not exist.")


def stored_dtype(config: BackboneConfig, dtype: Dtype) -> torch.dtype:
    """The requested dtype, or the one that the unmerged backbone has on disk."""
    if dtype != "auto":
        found: torch.dtype = getattr(torch, dtype)
        return found
    on_disk = AutoConfig.from_pretrained(config.name_or_path, revision=config.revision).get_text_config().dtype
    return on_disk if isinstance(on_disk, torch.dtype) else torch.float32


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """(1, T, V): logits over a few tokens spread over the vocabulary."""
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens_1T = torch.linspace(0, vocab - 1, PROBE_TOKENS, device=model.device).long()[None]
    logits: Tensor = model(tokens_1T).logits.detach()
    return logits


@torch.no_grad()
def merge_adapter(model: Any) -> None:
    """In place: each adapted layer becomes a plain one again, with the product added to its weight.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    >>> from heads.checkpoint.adapter import LoraSettings, add_adapter
    >>> add_adapter(model, LoraSettings(rank=2)); merge_adapter(model)
    >>> has_adapter(model), any("lora_" in name for name in model.state_dict())
    (False, False)
    """
    for name, adapted in adapted_layers(model).items():
        adapted.merge(safe_merge=True)
        model.set_submodule(name, adapted.get_base_layer())
    model._hf_peft_config_loaded = False
    vars(model).pop("peft_config", None)
    assert not has_adapter(model)


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round weights in place to what `dtype` can hold; they are not cast, so the next probe sees the rounding alone."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def check_same(before_BTV: Tensor, after_BTV: Tensor, folder: str | Path) -> None:
    """
    Raises:
        ValueError: merging changed the logits, as it does where a tied weight was adapted in one of its places.
    """
    difference = largest_difference(before_BTV, after_BTV)
    if not difference <= TOLERANCE[before_BTV.dtype]:
        raise ValueError(
            f"The backbone of {folder} cannot be merged: its logits would change by {difference:.1e} of the largest, "
            f"as where an adapter sits on a tied weight; use heads and adapter as they are."
        )


def check_stored(before_BTV: Tensor, stored_BTV: Tensor, dtype: torch.dtype) -> None:
    """
    Raises:
        ValueError: rounding to the dtype on disk changed the logits, as it does where float16 cannot hold a weight.
    """
    difference = largest_difference(before_BTV, stored_BTV)
    if not difference <= max(TOLERANCE[dtype], TOLERANCE[before_BTV.dtype]):
        raise ValueError(
            f"The merged backbone cannot be stored in {name_of(dtype)}: its logits would change by {difference:.1e} of "
            f"the largest; give --dtype float32."
        )


def largest_difference(before_BTV: Tensor, after_BTV: Tensor) -> float:
    """The largest difference of two backbones' logits, as a share of the largest logit; NaN where one is NaN."""
    return float((before_BTV - after_BTV).abs().max() / before_BTV.abs().max())


def warn_of_rounding(frozen_BTV: Tensor, adapted_BTV: Tensor, stored_BTV: Tensor, dtype: torch.dtype) -> None:
    """Warn if rounding undoes much of what the adapter changed."""
    lost, effect = divergence(stored_BTV, adapted_BTV), divergence(frozen_BTV, adapted_BTV)
    if torch.finfo(dtype).eps > torch.finfo(adapted_BTV.dtype).eps and lost > MUCH_LOST * effect:
        logger.warning(
            "Rounded to %s, the merged backbone lies at a KL of %.1e from the adapted one, which the adapter had moved "
            "by %.1e: much of what was trained is lost. Give --dtype float32 to keep it, or use heads and adapter as "
            "they are.",
            name_of(dtype),
            lost,
            effect,
        )


def divergence(one_BTV: Tensor, other_BTV: Tensor) -> float:
    """KL(one ‖ other), the mean over positions.

    >>> round(divergence(torch.tensor([[[0.0, 100.0]]]), torch.zeros(1, 1, 2)), 6)   # certain of one of two: log 2
    0.693147
    """
    one_BTV, other_BTV = one_BTV.double().log_softmax(-1), other_BTV.double().log_softmax(-1)
    return float((one_BTV.exp() * (one_BTV - other_BTV)).sum(-1).mean())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prune_vocabulary(token_heads: TokenHeads, tokens: Tensor | Sequence[int]) -> TokenHeads:
    """New heads on the same backbone that score only `tokens`; the given heads are not changed.

        few = heads.prune_vocabulary(token_heads, heads.most_frequent_tokens(counts, 8192))
        heads.save(few, "checkpoints/runs/grounded-8k")

    The new heads do not inherit measurements: their default trees grow from typical accuracies until they are
    evaluated, or `headway tune-tree` fits one.

    Args:
        tokens: ids of the tokens to score.

    Raises:
        ValueError: invalid ids, or a token that the given heads do not score.
    """
    check_token_heads(token_heads)
    refuse_packed_heads(token_heads, "Cutting heads to some tokens")
    ids_S = check_draft_tokens(tokens, None, token_heads.backbone.vocab_size)
    rows_S = ids_S
    if (vocabulary := token_heads.draft_vocabulary) is not None:
        rows_S, scored_S = vocabulary.find(ids_S.to(vocabulary.tokens_S.device))
        if not bool(scored_S.all()):
            missing = int(ids_S[int(scored_S.int().argmin())])
            raise ValueError(f"These heads do not score token {missing}; give tokens of their draft vocabulary.")
    pruned = type(token_heads)(replace(token_heads.config, draft_vocabulary=len(ids_S)), token_heads.backbone)
    like = next(token_heads.parameters())
    pruned.to(device=like.device, dtype=like.dtype).choose_draft_tokens(ids_S)
    wanted = pruned.state_dict()
    for name, tensor in token_heads.state_dict().items():
        wanted[name].copy_(tensor if tensor.shape == wanted[name].shape else tensor[rows_S.to(tensor.device)])
    pruned.backbone_was_trained = token_heads.backbone_was_trained
    return pruned.train(token_heads.training)
