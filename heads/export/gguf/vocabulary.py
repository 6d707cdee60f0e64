"""A byte-level BPE tokenizer as GGUF's metadata.

Before merging bytes llama.cpp splits text by a rule that it knows by name, and refuses unknown names. So a tokenizer
must split by one of these rules (`RULES`), which is found by what tokenizer.json says, not by the tokenizer's name.

Source: llama.cpp conversion/base.py (set_vocab_gpt2) and src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

GPT2 = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
NORMALIZERS = (None, "NFC")  # llama.cpp leaves NFC out, and most text is in that form
RULES = {LLAMA3_REGEX: "llama-bpe", QWEN2_REGEX: "qwen2"}


def splitting_rule(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the rule by which a tokenizer.json splits text.

    Raises:
        ValueError: a tokenizer of another kind, or a rule that is none of those known here.

    >>> splitting_rule({"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": {**GPT2, "trim_offsets": True}})
    'gpt-2'
    """
    model, splitter = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if model.get("type") != "BPE" or model.get("byte_fallback") or normalizer not in NORMALIZERS:
        raise ValueError(
            f"A tokenizer of kind {model.get('type')!r} with normalizer {normalizer!r} was given, or one with byte "
            f"fallback; allowed is byte-level BPE with {' or '.join(map(str, NORMALIZERS))}."
        )
    if all(splitter.get(name) == value for name, value in GPT2.items()):
        return "gpt-2"
    parts = splitter.get("pretokenizers") or [splitter]
    found = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    others = [part for part in parts if part.get("type") != "Split"]
    plain = all(part.get("type") == "ByteLevel" and not part.get("use_regex") for part in others)
    if len(found) != 1 or found[0] not in RULES or not plain:
        raise ValueError(
            f"The tokenizer splits text by {found or splitter.get('type')!r}, which is none of llama.cpp's rules known "
            f"here: {', '.join(['gpt-2', *RULES.values()])}."
        )
    return RULES[found[0]]


def vocabulary(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Tokens, their types, merges, rule and special ids of a fast tokenizer, by GGUF's names below `tokenizer.ggml.`.

    Args:
        vocab_size: rows of the embedding; ids without a token are filled.

    Raises:
        ValueError: a tokenizer that llama.cpp cannot hold.
    """
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    rule = splitting_rule(said)
    added = {entry["id"]: entry for entry in said.get("added_tokens") or []}
    names = {id: token for token, id in tokenizer.get_vocab().items()}
    tokens = [names.get(id, f"[PAD{id}]") for id in range(vocab_size)]
    types = [UNUSED if id not in names else kind_of(added.get(id)) for id in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]]
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return {
        "model": "gpt2",
        "pre": rule,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        **{f"{name}_token_id": id for name, id in special.items() if id is not None},
        "add_bos_token": begins,
        "add_space_prefix": False,
    }


def kind_of(added: dict[str, Any] | None) -> int:
    """
    >>> kind_of(None), kind_of({"special": True}), kind_of({"special": False})
    (1, 3, 4)
    """
    return NORMAL if added is None else CONTROL if added.get("special") else USER_DEFINED
