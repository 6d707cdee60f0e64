"""The loop in docs/decode.md is run as it stands there: its text is generate's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads
from tiny import PAD, left_padded, random_tokens

import heads

PAGE = Path(__file__).resolve().parents[3] / "docs/decode.md"


def example() -> tuple[str, Any]:
    """The page's Python code, and the function that it defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "def decode(" in block)
    names: dict[str, Any] = {"torch": torch, "heads": heads}
    exec(compile(code, str(PAGE), "exec"), names)
    return code, names["decode"]


@covering(family=FAMILIES, name=["llama", "mistral_windowed"])
def test_the_pages_loop_writes_generates_text(family, name):
    token_heads = fitted_heads(family, name)
    _, decode = example()
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 12, 7)])
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    plain = plain_generate(token_heads.backbone.model, tokens, attention_mask=mask, **asked)
    tree = heads.Tree([[0], [0, 0], [0, 1], [1]])
    assert decode(token_heads, tokens, mask.bool(), tree, 20) == plain[:, 12:].tolist()


def test_the_loop_is_short():
    code, _ = example()
    assert len(code.splitlines()) <= 30


def test_the_loop_makes_fewer_passes_than_tokens():
    token_heads = fitted_heads("grounded", "llama")
    _, decode = example()
    prompt, passes = random_tokens(1, 5, seed=50), 0
    verify = token_heads.backbone.verify

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return verify(*arguments)

    token_heads.backbone.verify = counted  # type: ignore[method-assign]
    try:
        decode(token_heads, prompt, torch.ones_like(prompt).bool(), heads.Tree([[0], [0, 0], [1]]), 20)
    finally:
        del token_heads.backbone.verify
    assert 0 < passes < 15
