"""The comparison with llama.cpp, without llama.cpp: whatever differs is an error that says where."""

from __future__ import annotations

import pytest
import torch
from tiny import random_tokens, tiny_model

import heads
from benchmarks.outside.chain import run_chain
from benchmarks.outside.llamacpp.__main__ import compare
from benchmarks.outside.llamacpp.comparing import check_texts, check_words, counts_of

K, NEW = 3, 10


@pytest.fixture(scope="module")
def chained():
    token_heads = heads.create("eagle", tiny_model("llama", attn="sdpa", dtype=torch.float32), num_heads=K).eval()
    prompt_1T = random_tokens(1, 5, seed=0)
    return token_heads, prompt_1T, run_chain(token_heads, prompt_1T, NEW, K)


def test_equal_texts_and_counts_are_a_row_and_other_counts_an_error(chained):
    token_heads, prompt_1T, chain = chained
    row = {"text": chain.text[:NEW], **counts_of(chain, K, NEW)}
    cells = compare(token_heads, [prompt_1T], {"rows": [row]}, {"rows": [row]}, NEW)
    assert cells == ["1", "0", *map(str, (len(chain.drafts), row["drafted"], row["accepted"])), "yes"]
    for key in ("drafted", "accepted"):
        wrong = row | {key: row[key] + 1}
        with pytest.raises(ValueError, match=f"llama.cpp counts {wrong[key]} tokens {key}"):
            compare(token_heads, [prompt_1T], {"rows": [row]}, {"rows": [wrong]}, NEW)


def test_another_text_is_an_error_unless_the_scores_tie(chained):
    token_heads, prompt_1T, chain = chained
    model, text = token_heads.backbone.model, chain.text[:NEW]
    other = [*text[:4], (text[4] + 1) % model.config.vocab_size, *text[5:]]
    with pytest.raises(ValueError, match="part at token 5"):
        check_texts("prompt 1", model, prompt_1T, {"of ours": text, "with a draft": other})

    class Even(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> object:
            return type("Output", (), {"logits": torch.ones(1, tokens.shape[1], model.config.vocab_size)})

    assert not check_texts("prompt 1", Even(), prompt_1T, {"of ours": text, "with a draft": other})


def test_other_tokens_are_an_error():
    assert check_words(["ab"], [[1, 2]], [[1, 2]]) == 2
    with pytest.raises(ValueError, match="from token 2 on"):
        check_words(["ab"], [[1, 3]], [[1, 2]])
