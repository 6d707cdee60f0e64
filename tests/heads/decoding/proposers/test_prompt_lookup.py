"""Looked-up chains beside the heads' tree: what is proposed, when heads are left out, that the text is `generate`'s."""

import functools
import random

import pytest
import torch
from matrices import wide
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import EOS, PAD, left_padded, random_tokens, tiny_model
from transformers.generation.logits_process import LogitsProcessor

import heads
from heads.backbone.model import Backbone
from heads.decoding.proposers import heads as heads_drafter
from heads.decoding.proposers.prompt_lookup import Lookup

LOOP = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def plain_proposal(tokens, length):
    """By search: the end of three or else two tokens, its last earlier place, copied from behind it with overlap."""
    for size in (3, 2):
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tokens) > size and tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for i in range(length):
                    text.append(text[start + size + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_what_a_search_finds(seed):
    generator = random.Random(seed)
    lookup, tokens, found = Lookup(5), [], 0
    for _ in range(200):
        tokens += [generator.randrange(4) for _ in range(generator.randrange(1, 4))]
        assert lookup.take(tokens, 5 if lookup.find(tokens) else 0) == plain_proposal(tokens, 5)
        found += bool(plain_proposal(tokens, 5))
    assert found > 100


def test_copying_is_a_text_that_goes_on_as_foretold():
    lookup, text = Lookup(3), [5, 6, 7, 5, 6]
    assert lookup.propose(text) == [7, 5, 6]
    assert not lookup.copying, "nothing was foretold before"
    text += [7, 5, 6, 7]
    assert lookup.propose(text) == [5, 6, 7, 5, 6, 7], "twice as long"
    assert lookup.copying
    assert lookup.propose([*text, 5, 6, 7, 9]) == []
    assert not lookup.copying, "the token behind the chain is another one"
    text += [5, 6, 7, 9, 5, 6]
    assert lookup.propose(text)
    assert not lookup.copying


def test_a_chain_doubles_up_to_four_times_its_length_while_the_text_goes_on_as_foretold():
    lookup, text, lengths = Lookup(3), [5, 6, 5, 6], []
    for _ in range(5):
        lengths.append(lookup.find(text))
        chain = lookup.take(text, lengths[-1])
        text = text + chain + [5 if chain[-1] == 6 else 6]
    assert lengths == [3, 6, 12, 12, 12]
    assert lookup.find([*text[:-1], 9]) == 0, "the last token is new"
    assert lookup.find([*text, 5 if text[-1] == 6 else 6]) == 3, "nothing was foretold since the break"


def test_rows_that_copy_share_the_shortest_chain():
    """One row began to copy earlier; its chain is cut to the other's and doubles from there."""
    first, second = Lookup(2), Lookup(2)
    text = [5, 6, 5, 6]
    chain = first.propose(text)
    text = text + chain + [5]
    assert first.find(text) == 4
    chain = first.take(text, 2)
    assert (chain, second.propose(text)) == ([6, 5], [6, 5])
    text = text + chain + [6]
    assert (first.find(text), second.find(text)) == (4, 4)


def run(family, tokens, token_heads=None, **options):
    token_heads = token_heads or fitted_heads(family, "llama")
    model = token_heads.backbone.model
    settings = {
        "max_new_tokens": 40,
        "return_dict_in_generate": True,
        "pad_token_id": PAD,
        "do_sample": False,
        **options,
    }
    plain = plain_generate(model, tokens, seed=0, **settings)
    torch.manual_seed(0)
    return plain, model.generate(tokens, custom_generate=heads.TreeDecoding(token_heads, 6, lookup=7), **settings)


@functools.cache
def repeating(family):
    """Heads on a model that repeats itself."""
    return make_heads(family, Backbone(tiny_model("llama", attn="sdpa", sharpen=False)), num_heads=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_generates_where_it_repeats_and_where_it_does_not(family):
    """Sharpened models wander, and chains are mostly wrong; with transformers' own weights a model repeats itself."""
    deep = 0
    for token_heads in (None, repeating(family)):
        for tokens in (LOOP, random_tokens(1, 6, seed=3), random_tokens(1, 9, seed=4)):
            plain, ours = run(family, tokens, token_heads, eos_token_id=None)
            assert torch.equal(plain.sequences, ours.sequences)
            assert ours.stats.tokens == 40
            deep += sum(ours.stats.accepted_per_depth[3:])
    assert deep, "nothing deeper than the three heads was accepted: the chains were never followed"


def test_a_padded_batch_in_which_some_rows_have_nothing_to_look_up():
    tokens, mask = left_padded([[5, 6, 7, 5, 6], [9, 3, 4, 10, 11, 12, 13]])
    plain, ours = run("grounded", tokens, attention_mask=mask, eos_token_id=None)
    assert torch.equal(plain.sequences, ours.sequences)


def test_sampled_text_has_the_same_draws():
    plain, ours = run("grounded", LOOP, do_sample=True, temperature=0.7, top_k=10, eos_token_id=None)
    assert torch.equal(plain.sequences, ours.sequences)


def test_processors_see_the_same_prefixes():
    plain, ours = run("grounded", LOOP, repetition_penalty=1.3, no_repeat_ngram_size=4, eos_token_id=None)
    assert torch.equal(plain.sequences, ours.sequences)


class Interrupts(LogitsProcessor):
    """Every thirtieth token must not be the one that would have come: a copy breaks off."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 30:
            return scores
        return scores.scatter(1, scores.argmax(dim=1, keepdim=True), -float("inf"))


@pytest.fixture
def drafts(monkeypatch):
    """Grows by one whenever the heads are asked."""
    asked = []
    draft = heads_drafter.draft
    monkeypatch.setattr(heads_drafter, "draft", lambda *arguments: asked.append(None) or draft(*arguments))
    return asked


# Whether heads are asked is not theirs to decide; with a state of their own they miss what was copied meanwhile.
@pytest.mark.parametrize("family", [f if f in ("medusa", "grounded", "eagle", "kv") else wide(f) for f in FAMILIES])
def test_while_a_text_copies_itself_the_heads_are_not_asked(family, drafts):
    options = {"eos_token_id": None, "max_new_tokens": 120}
    plain, ours = run(family, LOOP, repeating(family), logits_processor=[Interrupts()], **options)
    assert torch.equal(plain.sequences, ours.sequences)
    left_out = ours.stats.passes - 1 - len(drafts)
    assert left_out > 4, "hardly any pass without the heads"
    assert len(drafts) > 4, "after a break the heads are asked again"


@pytest.mark.parametrize("eos", [None, EOS])
def test_a_batch_leaves_the_heads_out_while_all_its_rows_copy_or_have_ended(eos, drafts):
    """With an end token the second row has nothing but it."""
    tokens, mask = left_padded([LOOP[0].tolist(), [9, 3, 4, 10, 11, 12, 13]])
    options = {"attention_mask": mask, "max_new_tokens": 120, "eos_token_id": eos}
    plain, ours = run("grounded", tokens, repeating("grounded"), **options)
    assert torch.equal(plain.sequences, ours.sequences)
    assert 0 < len(drafts) < ours.stats.passes - 1


def test_a_chain_shorter_than_the_tree_leaves_the_heads_in(drafts):
    token_heads = repeating("grounded")
    decoding = heads.TreeDecoding(token_heads, [[0], [0, 0]], lookup=2)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    plain = token_heads.backbone.model.generate(LOOP, **options)
    ours = token_heads.backbone.model.generate(LOOP, custom_generate=decoding, return_dict_in_generate=True, **options)
    assert torch.equal(plain, ours.sequences)
    assert len(drafts) == ours.stats.passes - 1


@pytest.mark.parametrize("length", [-1, 65])
def test_a_length_that_cannot_be_is_refused(length):
    with pytest.raises(ValueError, match=f"lookup={length} was given"):
        heads.TreeDecoding(fitted_heads("grounded", "llama"), lookup=length)
