"""Bloom, MPT and GPT-Neo count distances in cache slots, so no tree runs on them; as drafts they are read plainly."""

from __future__ import annotations

import pytest
import torch
from draft_runs import PLAIN_DRAFTS, PROMPTS, both, plain_draft_of, shared
from tiny import SMALL, VOCAB, left_padded, random_tokens
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    MambaConfig,
    MptConfig,
    PreTrainedModel,
)

import heads
from heads.decoding.proposers.plain_draft import PlainDraft, RowReader


@pytest.mark.parametrize("name", PLAIN_DRAFTS)
def test_they_draft_and_the_text_is_plain_generations(name):
    """One row and a ragged batch with padding, of which rows accept different numbers."""
    decoding = heads.DraftModelDecoding(plain_draft_of(name), k=3)
    assert isinstance(decoding.draft, PlainDraft)
    plain, ours = both(shared("llama"), decoding, max_new_tokens=10)
    assert torch.equal(ours.sequences, plain)
    tokens, mask = left_padded(PROMPTS)
    plain, ours = both(shared("llama"), decoding, tokens, attention_mask=mask, max_new_tokens=10)
    assert torch.equal(ours.sequences, plain)


@pytest.mark.parametrize("name", PLAIN_DRAFTS)
@torch.no_grad()
def test_after_kept_and_dropped_tokens_the_cache_is_that_of_a_model_that_reads_everything_again(name):
    model = plain_draft_of(name)
    draft, text = PlainDraft(model, ValueError("no backbone")), random_tokens(1, 9, seed=4)
    padded, valid = left_padded([text[0, :5].tolist(), text[0, :3].tolist()])
    reader = RowReader(draft, padded, valid.bool())
    reader.read(random_tokens(2, 2, seed=5))
    reader.read(random_tokens(2, 1, seed=6))
    reader.keep([0, 0], [0, 0])
    news = torch.stack([text[0, 5:8], torch.cat([text.new_zeros(1), text[0, 3:5]])])
    logits_BV = reader.read(news, [0, 1])
    for logits_V, length in zip(logits_BV, (8, 5), strict=True):
        torch.testing.assert_close(logits_V, model(text[:, :length]).logits[0, -1])
    reader.keep([0, 1], [2, 2])
    reader.keep_rows(torch.tensor([1]))
    reader.keep_slots(4)
    torch.testing.assert_close(reader.read(text[:, 4:9])[0], model(text).logits[0, -1])


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_reads_in_both_directions_is_refused(is_decoder):
    config = BertConfig(**SMALL, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=is_decoder)
    model = BertLMHeadModel(config).double().eval()
    if is_decoder:  # the same weights, read from left to right
        plain, ours = both(shared("llama"), heads.DraftModelDecoding(model, k=3), max_new_tokens=10)
        assert torch.equal(ours.sequences, plain)
        return
    with pytest.raises(ValueError, match="BertLMHeadModel reads text in both directions"):
        heads.DraftModelDecoding(model)
    with pytest.raises(ValueError, match="This model cannot draft"):
        heads.DraftModelDecoding(BertModel(config))


def test_a_text_that_outgrows_a_draft_model_is_refused():
    torch.manual_seed(0)
    config = MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=16, expansion_ratio=2)
    decoding = heads.DraftModelDecoding(AutoModelForCausalLM.from_config(config).double().eval(), k=3)
    tokens = random_tokens(1, 6, seed=1)
    plain, ours = both(shared("llama"), decoding, tokens, max_new_tokens=11)  # all but the last are read
    assert torch.equal(ours.sequences, plain)
    with pytest.raises(ValueError, match=r"may grow to 18 tokens, .* reads 17, but it has 16 positions"):
        both(shared("llama"), decoding, tokens, max_new_tokens=12)


def test_a_recurrent_state_is_still_refused():
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="This model cannot draft: MambaForCausalLM keeps a recurrent state"):
        heads.DraftModelDecoding(model)
