"""Speculative sampling is `generate`: greedy text equal token for token, sampled text equal in distribution.

A draft model is checked beside what it promises to be: a model that reads the whole text again before each token. Its
chains must be that model's, token for token, and its cache after a commit that of a fresh prefill. Models run in
float64, so any difference is an error. A random draft model is right once in 29 tokens; drafts that are accepted and
rejected at every depth come from the backbone itself with noise on its weights.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from draft_runs import IN_STEP, NO_EOS, PAIRS, PROMPT, PROMPTS, K, both, noisy, shared
from matrices import covering
from tiny import PAD, left_padded, random_tokens, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import LogitsProcessor

import heads
from heads.backbone import model as backbone_module
from heads.backbone.model import Backbone
from heads.decoding.proposers.draft_model import ModelDrafter
from heads.decoding.proposers.draft_reader import DraftReader
from heads.decoding.proposers.shared_vocabulary import read_tokens


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_greedy_text_is_generates_whatever_drafts(name, draft):
    for draft_model in (shared(draft), noisy(name)):
        plain, ours = both(shared(name), heads.DraftModelDecoding(draft_model, k=K))
        assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2, "the noisy copy is right too seldom: the equality shows too little"


@pytest.mark.parametrize("name", ["llama", "gemma3", "codegen"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_a_draft_model_that_is_the_backbone_is_always_right(name, k):
    """One prefill that emits one token, then k + 1 tokens from each pass."""
    plain, ours = both(shared(name), heads.DraftModelDecoding(shared(name), k=k), max_new_tokens=1 + 3 * (k + 1))
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.passes == 1 + 3
    assert ours.stats.accepted_per_depth == [3] * k


def test_drafts_are_rejected_and_accepted_at_every_depth():
    counts: collections.Counter[int] = collections.Counter()
    decoding = heads.DraftModelDecoding(noisy("llama"), k=K)
    for seed in range(6):
        plain, ours = both(shared("llama"), decoding, random_tokens(1, 4, seed=seed), max_new_tokens=40)
        assert torch.equal(ours.sequences, plain)
        per_pass = "".join("d" if drafted else "o" for drafted in ours.stats.drafted[0][1:]).split("o")
        counts.update(len(run) for run in per_pass[:-1])
    assert set(counts) == set(range(K + 1)), f"accepted {counts}"


@pytest.mark.parametrize("name", ["llama", "mistral_windowed", "codegen"])
def test_a_ragged_batch_with_padding(name):
    tokens, mask = left_padded(PROMPTS)
    plain, ours = both(
        shared(name), heads.DraftModelDecoding(noisy(name), k=K), tokens, attention_mask=mask, max_new_tokens=30
    )
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("name", ["llama", "mistral_windowed"])
def test_a_prompt_that_is_read_in_chunks(name, monkeypatch):
    """The draft model reads every chunk: were one left out, a draft that is the backbone would not always be right."""
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", 4)
    plain, ours = both(
        shared(name), heads.DraftModelDecoding(shared(name), k=2), random_tokens(1, 11, seed=3), max_new_tokens=22
    )
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.accepted_per_depth == [7, 7]
    tokens, mask = left_padded(PROMPTS)
    plain, ours = both(shared(name), heads.DraftModelDecoding(noisy(name), k=K), tokens, attention_mask=mask)
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("name", ["/nonexistent/dir/model", "some/thing/else"])
def test_a_folder_that_has_moved_leaves_tokens_unknown(name):
    backbone = Backbone(tiny_model("llama"))
    backbone.config.name_or_path = name
    assert read_tokens(backbone) == {}


def test_rows_that_end_early_leave():
    tokens, mask = left_padded(PROMPTS)
    greedy = shared("llama").generate(tokens, attention_mask=mask, max_new_tokens=30, do_sample=False, **NO_EOS)
    ends = {"eos_token_id": [int(greedy[0, 12]), int(greedy[1, 20])], "pad_token_id": PAD}
    plain, ours = both(
        shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K), tokens, attention_mask=mask, **ends
    )
    assert torch.equal(ours.sequences, plain)
    assert len({len(row) for row in ours.stats.drafted}) > 1, "all rows ended together"


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5, 6])
def test_short_texts_end_where_they_should(new_tokens):
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(shared("llama"), k=K), max_new_tokens=new_tokens)
    assert torch.equal(ours.sequences, plain)


def test_positions_that_the_draft_model_has_are_used_to_the_last():
    """A row near its end is drafted on while the others have further to go; learned positions end where they end."""
    tokens, mask = left_padded(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 30}
    draft_model = tiny_model("gpt2", attn="sdpa", n_positions=38)
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(draft_model, k=K), tokens, **options)
    assert torch.equal(ours.sequences, plain)
    too_short = tiny_model("gpt2", attn="sdpa", n_positions=37)
    with pytest.raises(ValueError, match="grow to 39 tokens, of which the draft model reads 38, but it has 37"):
        both(shared("llama"), heads.DraftModelDecoding(too_short, k=K), tokens, **options)


def test_a_repetition_penalty_is_drafted_with_too():
    """Without it the drafts would be those of another text: with the backbone as its draft model all are accepted."""
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(shared("llama"), k=K), repetition_penalty=1.8)
    assert torch.equal(ours.sequences, plain)
    assert not torch.equal(plain, shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS))
    assert ours.stats.accepted_per_depth[0] == ours.stats.row_passes - 1


class Counting(LogitsProcessor):
    """Forbids a token at every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, scores.argmax(dim=1), -torch.inf) if self.calls % 3 == 0 else scores


def test_a_processor_with_state_is_called_once_for_each_emitted_token():
    options = {"do_sample": False, "max_new_tokens": 20, **NO_EOS}
    plain = shared("llama").generate(PROMPT, logits_processor=LogitsProcessorList([Counting()]), **options)
    decoding, counting = heads.DraftModelDecoding(noisy("llama"), k=K), Counting()
    ours = shared("llama").generate(
        PROMPT, logits_processor=LogitsProcessorList([counting]), custom_generate=decoding, **options
    )
    assert torch.equal(ours, plain)
    assert counting.calls == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_model_in_another_dtype(dtype):
    draft_model = copy.deepcopy(shared("llama")).to(dtype)
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(draft_model, k=K))
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 2


def best_chain(model: Any, tokens: list[int], k: int) -> list[int]:
    """The plain reference: read the whole text again for each token."""
    text = list(tokens)
    with torch.no_grad():
        for _ in range(k):
            text.append(int(model(torch.tensor([text])).logits[0, -1].float().argmax()))
    return text[len(tokens) :]


def real_tokens(row: Any, prompt: list[int], num_prompt_slots: int) -> list[int]:
    """A row's tokens without its padding."""
    return prompt + row.tokens[num_prompt_slots:]


def check_cache(reader: DraftReader, model: Any, b: int, tokens: list[int]) -> None:
    """A row's kept slots hold what a fresh prefill of the same tokens gives, at the same positions.

    CodeGen attends in float32 whatever its weights are; another token or position would be off by tenths.
    """
    close = 1e-5 if "CodeGen" in type(model).__name__ else 1e-9
    held = reader.committed.valid_BS[b]
    assert int(held.sum()) == len(tokens) == int(reader.committed.next_position_B[b])
    assert reader.committed.positions_BS[b, held].tolist() == list(range(len(tokens)))
    everything = torch.ones(1, len(tokens), dtype=torch.bool)
    fresh, _ = Backbone(model, check_projection=False).prefill(torch.tensor([tokens]), everything)
    for ours, theirs in zip(reader.committed.cache.layers, fresh.cache.layers, strict=True):
        assert ours.length == reader.committed.valid_BS.shape[1]
        for ours_BHSD, theirs_BHSD in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            mine_HSD = ours_BHSD[b, :, : ours.length][:, held]
            torch.testing.assert_close(mine_HSD, theirs_BHSD[0, :, : len(tokens)], rtol=close, atol=close)


@covering(
    name=["llama", "gpt_neox", "mistral_windowed", "gemma3", "codegen"],
    rows=[(PROMPTS[:1], 2), (PROMPTS, 2), (IN_STEP, 1)],
    always=lambda name, rows: name == "mistral_windowed",
)
@torch.no_grad()
def test_chains_and_cache_are_those_of_a_model_that_reads_everything_again(name, rows, monkeypatch):
    """Before each pass: what was kept, what is left to read, and then the chain itself."""
    prompts, k = rows
    draft_model, plain_propose, checked = noisy(name), ModelDrafter.propose, collections.Counter[int]()
    tokens, mask = left_padded(prompts)

    def checking_propose(self, rows):
        for b, row in enumerate(rows):
            text = real_tokens(row, prompts[row.index], tokens.shape[1])
            unread = len(row.tokens) - self.num_read[b]
            check_cache(self.reader, draft_model, b, text[: len(text) - unread])
            checked[unread] += 1
        proposal = plain_propose(self, rows)
        for b, row in enumerate(rows):
            text = real_tokens(row, prompts[row.index], tokens.shape[1])
            assert proposal.tokens_BN[b].tolist() == [row.tokens[-1], *best_chain(draft_model, text, self.k)]
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", checking_propose)
    shared(name).generate(
        tokens,
        attention_mask=mask,
        custom_generate=heads.DraftModelDecoding(draft_model, k=k),
        max_new_tokens=30,
        do_sample=False,
        **NO_EOS,
    )
    assert set(checked) == {1, 2}, f"tokens left to read: {checked}; after a whole chain there are 2, else 1"


def test_a_solid_row_is_read_without_masks_and_a_ragged_batch_with(monkeypatch):
    masked = collections.Counter[bool]()
    plain_forward = Backbone.forward

    def counting_forward(self, tokens_BT, **inputs):
        if self.model is noisy("llama") and tokens_BT.shape[1] == 1:
            masked[inputs["attention_mask"] is not None] += 1
        return plain_forward(self, tokens_BT, **inputs)

    monkeypatch.setattr(Backbone, "forward", counting_forward)
    both(shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K))
    assert masked[False]
    assert not masked[True]
    tokens, mask = left_padded(PROMPTS)
    masked.clear()
    both(shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K), tokens, attention_mask=mask)
    assert masked[True]
