"""Checks that draft model and backbone share a vocabulary, since token ids go from one to the other unchanged.

A model does not carry its tokenizer, but remembers the folder or hub name that it was loaded from. Where both
tokenizer.json files are on this machine, their tokens are compared; nothing is downloaded. If they are equal, the
numbers of embeddings may differ, since embeddings may be padded for faster kernels.
"""
# B row, N new slot, V the backbone's vocabulary, W the draft model's

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from heads.backbone.model import Backbone
from heads.decoding.proposers.plain_draft import PlainDraft


def check_same_tokens(backbone: Backbone, draft: Backbone | PlainDraft) -> None:
    """Check that each token id means the same to both models, as far as their tokenizers are found.

    Raises:
        ValueError: a token id stands for different text, or the vocabularies differ in size and tokenizers that are
            equal were not found.
    """
    known, drafted = read_tokens(backbone), read_tokens(draft)
    if backbone.vocab_size != draft.vocab_size and not (known and known == drafted):
        raise ValueError(
            f"The draft model has a vocabulary of {draft.vocab_size} tokens and the backbone one of "
            f"{backbone.vocab_size}, and that both have one tokenizer.json cannot be seen here; choose a draft model "
            f"that was trained with the backbone's tokenizer."
        )
    for token in sorted(known.keys() & drafted.keys()):
        if known[token] != drafted[token]:
            raise ValueError(
                f"Token {token} is {known[token]!r} to the backbone and {drafted[token]!r} to the draft model; choose "
                f"a draft model that was trained with the backbone's tokenizer."
            )


def as_known_to(draft: Backbone | PlainDraft, tokens_BN: Tensor) -> Tensor:
    """The tokens, with ids beyond the draft model's embeddings replaced by its last id.

    No tokenizer makes such ids; replacing them can change what is proposed, never what is emitted.
    """
    return tokens_BN.clamp(max=draft.vocab_size - 1)


def fit_vocabulary(logits_BW: Tensor, vocab_size: int) -> Tensor:
    """(B, V): the draft model's logits for the backbone's ids; ids that it lacks get -inf.

    >>> fit_vocabulary(torch.tensor([[1.0, 2.0, 3.0]]), 2), fit_vocabulary(torch.tensor([[1.0]]), 2)
    (tensor([[1., 2.]]), tensor([[1., -inf]]))
    """
    missing = vocab_size - logits_BW.shape[-1]
    return nn.functional.pad(logits_BW, (0, missing), value=-torch.inf) if missing else logits_BW


def read_tokens(backbone: Backbone | PlainDraft) -> dict[int, str]:
    """Text by token id, from the tokenizer.json that the model was loaded beside; empty where there is none."""
    path = find_tokenizer(str(getattr(backbone.config, "_name_or_path", "") or ""))
    return parse_tokens(json.loads(path.read_text(encoding="utf-8-sig"))) if path else {}


def find_tokenizer(name: str) -> Path | None:
    """The tokenizer.json in a folder or in the hub's local cache; None if there is none."""
    if (here := Path(name) / "tokenizer.json").is_file() or not name:
        return here if name else None
    try:
        found = cached_file(
            name,
            "tokenizer.json",
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # a name that the hub could not have
        return None
    return Path(found) if found else None


def parse_tokens(content: dict[str, Any]) -> dict[int, str]:
    """Text by token id, added tokens included.

    >>> parse_tokens({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]})
    {0: 'a', 1: 'b', 2: '<end>'}
    >>> parse_tokens({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}, "added_tokens": []})        # Unigram
    {0: 'a', 1: 'b'}
    """
    vocab = content["model"]["vocab"]
    tokens = (
        {id_: text for text, id_ in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(v for v, _ in vocab))
    )
    return tokens | {added["id"]: added["content"] for added in content.get("added_tokens") or []}
