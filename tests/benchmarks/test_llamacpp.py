"""The comparison with llama.cpp, without llama.cpp: whatever differs is an error that says where."""

from __future__ import annotations

import pytest
import torch
from tiny import random_tokens, tiny_model

import heads
from benchmarks.outside.chain import run_chain
from benchmarks.outside.llamacpp.__main__ import Pair
from benchmarks.outside.llamacpp.comparing import check_texts, check_words, counts_of
from benchmarks.outside.llamacpp.pair import qwen3_of, taught_heads

K, NEW = 3, 10


@pytest.fixture(scope="module")
def chained():
    token_heads = heads.create("eagle", tiny_model("llama", attn="sdpa", dtype=torch.float32), num_heads=K).eval()
    prompt_1T = random_tokens(1, 5, seed=0)
    return token_heads, prompt_1T, run_chain(token_heads, prompt_1T, NEW, K)


def test_equal_texts_and_counts_are_a_row_and_other_counts_an_error(chained):
    token_heads, prompt_1T, chain = chained
    row = {"text": chain.text[:NEW], **counts_of(chain, K, NEW)}
    pair = Pair(token_heads=token_heads, prompts=[prompt_1T], new_tokens=NEW, dtype="f32")
    cells = pair.compare("tiny", {"rows": [row]}, {"rows": [row]})
    assert cells == ["1", "0", *map(str, (len(chain.drafts), row["drafted"], row["accepted"])), "yes"]
    for key in ("drafted", "accepted"):
        wrong = row | {key: row[key] + 1}
        with pytest.raises(ValueError, match=f"llama.cpp counts {wrong[key]} tokens {key}"):
            pair.compare("tiny", {"rows": [row]}, {"rows": [wrong]})


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


def test_scores_that_tie_in_the_files_dtype_alone(chained):
    """What float16 rounds away is a tie for float16 files, and a difference for float32 files."""
    _, prompt_1T, _ = chained

    class Near(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> object:
            return type("Output", (), {"logits": torch.tensor([1.0, 1.0 - 1e-4, 0.0]).expand(1, tokens.shape[1], 3)})

    texts = {"of ours": [0, 0], "with a draft": [0, 1]}
    assert not check_texts("prompt 1", Near(), prompt_1T, texts, torch.float16)
    with pytest.raises(ValueError, match="part at token 2"):
        check_texts("prompt 1", Near(), prompt_1T, texts)


def test_the_qwen3_pair_accepts_drafts_of_some_tokens():
    prompts = [random_tokens(1, 5, seed=seed) for seed in range(2)]
    model = qwen3_of(tiny_model("llama", attn="sdpa", dtype=torch.float32), "name")
    token_heads = taught_heads(model, prompts, NEW, steps=15)
    chain = run_chain(token_heads, prompts[0], NEW, K)
    assert sum(chain.accepted) >= 3
    assert len(token_heads.draft_tokens_S) < model.config.vocab_size


def test_other_tokens_are_an_error():
    assert check_words(["ab"], [[1, 2]], [[1, 2]]) == 2
    with pytest.raises(ValueError, match="from token 2 on"):
        check_words(["ab"], [[1, 3]], [[1, 2]])
