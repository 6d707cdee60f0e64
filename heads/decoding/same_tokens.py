"""Do two models mean the same by a token id? A draft model's tokens are read by the backbone as they stand.

Sizes are always compared. A model does not carry its tokenizer, but the folder or hub name that it was loaded from
does: where both tokenizer.json files are on this machine, their tokens are compared too, and nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from heads.backbone import Backbone


def check_same_tokens(backbone: Backbone, draft: Backbone) -> None:
    """
    Raises:
        ValueError: the vocabularies differ in size, or a token id stands for different text.
    """
    if backbone.vocab_size != draft.vocab_size:
        raise ValueError(
            f"The draft model has a vocabulary of {draft.vocab_size} tokens and the backbone one of "
            f"{backbone.vocab_size}; choose a draft model that was trained with the backbone's tokenizer."
        )
    known, drafted = read_tokens(backbone), read_tokens(draft)
    for token in sorted(known.keys() & drafted.keys()):
        if known[token] != drafted[token]:
            raise ValueError(
                f"Token {token} is {known[token]!r} to the backbone and {drafted[token]!r} to the draft model; choose "
                f"a draft model that was trained with the backbone's tokenizer."
            )


def read_tokens(backbone: Backbone) -> dict[int, str]:
    """Text by token id, from the tokenizer.json of what the model was loaded from; nothing where there is none."""
    path = find_tokenizer(str(getattr(backbone.config, "_name_or_path", "") or ""))
    return parse_tokens(json.loads(path.read_text(encoding="utf-8"))) if path else {}


def find_tokenizer(name: str) -> Path | None:
    """In a folder, or in the hub's cache; None where it is not on this machine, as when a folder has moved."""
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
    """
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
