"""A draft model with kept caches, a looked-up chain and other rules: the text stays plain generation's, in float64."""

from __future__ import annotations

import collections

import pytest
import torch
from backbone_passes import reads
from draft_runs import NO_EOS, TOY, K, both, chi_square, joint, limit, noisy, shared
from tiny import left_padded, random_tokens, tiny_model
from torch import Tensor
from transformers import LogitsProcessor

import heads

REPEATING = [2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
"""With six tokens in all, greedy text soon goes round in a circle."""


@pytest.mark.parametrize("lookup", [0, 6])
@pytest.mark.parametrize("name", ["llama", "mistral_windowed"])
def test_each_turn_reads_only_what_is_new_in_both_models(name, lookup):
    decoding = heads.DraftModelDecoding(noisy(name), k=K, lookup=lookup, keep_caches=True)
    fresh = heads.DraftModelDecoding(noisy(name), k=K, lookup=lookup)
    text, reused = random_tokens(1, 9, seed=50), 0
    for turn in range(3):
        options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 12}
        decoding.check_model(shared(name))
        with reads(decoding._backbone) as seen, reads(decoding.draft) as draft_seen:
            plain, ours = both(shared(name), decoding, text, **options)
        assert torch.equal(ours.sequences, plain), turn
        assert seen[0] == text.shape[1] - reused == ours.stats.prompt_tokens
        # The draft model may lack the last tokens that the backbone has: a chain's last token is not read.
        assert text.shape[1] - reused <= draft_seen[0] <= text.shape[1] - reused + (K + 2 if reused else 0)
        again = both(shared(name), fresh, text, **options)[1]
        assert ours.stats.drafted == again.stats.drafted, "its cache is a fresh call's, for it drafts the same"
        reused = ours.sequences.shape[1] - 1
        text = torch.cat([ours.sequences, random_tokens(1, 4, seed=60 + turn)], dim=1)


def test_a_prompt_that_parts_from_the_text_is_read_from_there():
    decoding = heads.DraftModelDecoding(noisy("llama"), k=K, keep_caches=True)
    first = both(shared("llama"), decoding, random_tokens(1, 9, seed=50), max_new_tokens=12)[1].sequences
    for kept, unread in ((14, 5), (4, 7), (3, 1), (0, 6)):
        other = torch.where(first[:, kept : kept + 1] == 5, 6, 5)
        text = torch.cat([first[:, :kept], other, random_tokens(1, unread, seed=unread)], dim=1)
        plain, ours = both(shared("llama"), decoding, text, max_new_tokens=12)
        assert torch.equal(ours.sequences, plain)
        assert ours.stats.prompt_tokens == 1 + unread
        first = torch.cat([text[:, :kept], ours.sequences[:, kept:]], dim=1)
    decoding.forget()
    assert both(shared("llama"), decoding, first)[1].stats.prompt_tokens == first.shape[1]
    plain, ours = both(shared("qwen3"), decoding, first)
    assert torch.equal(ours.sequences, plain), "the caches of another model are not used"


def test_a_draft_model_in_another_dtype_reads_everything_again():
    """The backbone's cache goes with the draft model's, so that both hold the same tokens."""
    model, draft_model = tiny_model("llama", attn="sdpa"), tiny_model("llama", attn="sdpa", seed=1)
    decoding = heads.DraftModelDecoding(draft_model, k=K, keep_caches=True)
    text = random_tokens(1, 9, seed=50)
    for dtypes in ((torch.float64,) * 2, (torch.float64, torch.float32), (torch.float32,) * 2):
        model.to(dtypes[0])
        draft_model.to(dtypes[1])
        for prompt_tokens in (9, 1):
            plain, ours = both(model, decoding, text, max_new_tokens=12)
            assert torch.equal(ours.sequences, plain)
            assert ours.stats.prompt_tokens == prompt_tokens


def test_kept_caches_are_of_one_row():
    decoding = heads.DraftModelDecoding(noisy("llama"), keep_caches=True)
    with pytest.raises(ValueError, match="keep_caches=True was given for 2 rows"):
        both(shared("llama"), decoding, random_tokens(2, 5))


@pytest.mark.parametrize("name", ["llama", "codegen"])
def test_a_looked_up_chain_beside_the_drafts_leaves_the_text_as_it_is(name):
    """A ragged batch with padding, of which some rows repeat themselves; and one such row alone."""
    tokens, mask = left_padded([REPEATING, random_tokens(5, seed=3, vocab=TOY).tolist(), REPEATING[2:]])
    for rows in (slice(None), slice(0, 1)):
        decoding = heads.DraftModelDecoding(noisy(name, vocab=TOY), k=2, lookup=6)
        options = {"attention_mask": mask[rows], "max_new_tokens": 40}
        plain, ours = both(shared(name, TOY), decoding, tokens[rows], **options)
        assert torch.equal(ours.sequences, plain)
        assert len(ours.stats.accepted_per_depth) == 4 * 6
        assert sum(ours.stats.accepted_per_depth[2:]) > 0, "no copied token was accepted behind the drafts"


class Circle(LogitsProcessor):
    """The text goes on with 1, 2, 3, 4, 5, 1, …"""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, input_ids[0, -1:] % 5 + 1, 1e9)


def test_while_a_text_copies_the_draft_model_is_not_asked():
    """It knows nothing of the circle, so its drafts are wrong, and the chain doubles to four times its length."""
    text, options = torch.tensor([[1, 2, 3, 4, 5, 1, 2]]), {"logits_processor": [Circle()], "max_new_tokens": 121}
    decoding = heads.DraftModelDecoding(noisy("llama", vocab=TOY), k=2, lookup=6)
    with reads(decoding.draft) as seen:
        plain, ours = both(shared("llama", TOY), decoding, text, **options)
    assert torch.equal(ours.sequences, plain)
    assert ours.sequences[0, -5:].sort().values.tolist() == [1, 2, 3, 4, 5]
    assert len(seen) == 1 + 2, "the prompt, and one pass's two drafts beside the first chain"
    # One token from the prompt's pass, then chains of 6, 12, 24, 24 and 24 with one token each, and the rest.
    assert ours.stats.passes == 1 + 6


@pytest.mark.parametrize("rule", ["rejection", "exact"])
def test_sampled_text_beside_a_looked_up_chain_has_the_backbones_distribution(rule, monkeypatch):
    prompt, options = [5, 2, 5, 4, 5, 3, 5, 1, 5], {"temperature": 2.0, "top_k": 4}  # the chain is found for 1 to 4
    monkeypatch.setattr("draft_runs.TOY_PROMPT", prompt)
    model, generator = shared("llama", TOY), torch.Generator().manual_seed(3)
    decoding = heads.DraftModelDecoding(noisy("llama", 0.3, TOY), k=2, generator=generator, lookup=3, rule=rule)
    torch.manual_seed(5)
    out = model.generate(
        torch.tensor([prompt]).expand(600, -1),
        custom_generate=decoding,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **NO_EOS,
        **options,
    )
    found = collections.Counter(map(tuple, out.sequences[:, len(prompt) :].tolist()))
    statistic, degrees = chi_square(found, joint(model, options))
    assert statistic < limit(degrees)
    assert out.stats.accepted_per_depth[0] > 60


def test_the_exact_rule_makes_generates_draws():
    options = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 24}
    decoding = heads.DraftModelDecoding(noisy("llama", vocab=TOY), k=3, rule="exact", lookup=4)
    text = torch.tensor([REPEATING])
    torch.manual_seed(1)
    plain = shared("llama", TOY).generate(text, **NO_EOS, **options)
    torch.manual_seed(1)
    out = shared("llama", TOY).generate(
        text, custom_generate=decoding, return_dict_in_generate=True, **NO_EOS, **options
    )
    assert torch.equal(out.sequences, plain)
    assert out.stats.tokens_per_pass > 1.2


def test_a_lossy_rule_accepts_more_and_greedy_text_is_the_same():
    decoding = heads.DraftModelDecoding(noisy("llama"), k=3, rule=heads.TypicalRule(epsilon=0.0, delta=0.0))
    plain, ours = both(shared("llama"), decoding)
    assert torch.equal(ours.sequences, plain)
    out = both(shared("llama"), decoding, do_sample=True, temperature=2.0, max_new_tokens=21)[1]
    assert out.stats.accepted_per_depth == [5, 5, 5], "every draft has some probability"


@pytest.mark.parametrize(("options", "said"), [({"lookup": 65}, "lookup=65"), ({"rule": "best"}, "rule='best'")])
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=f"{said} was given; allowed are"):
        heads.DraftModelDecoding(shared("llama"), **options)
