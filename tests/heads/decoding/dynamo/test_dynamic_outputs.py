"""What dynamic decoding streams and returns, and what it raises in one sentence."""

from __future__ import annotations

import itertools

import pytest
import torch
from dynamic_runs import (
    NO_EOS,
    PROMPT,
    decoding_of,
    orders_of,
    run,
)
from plain_joint import DenseTable
from streamers import DraftedPuts, Puts
from throwaway_families import fitted_heads, make_heads
from tiny import VOCAB, shared_model, tiny_model

import heads
from heads.backbone.model import Backbone
from heads.decoding.dynamo.decoding import DynamicDecoding


@pytest.mark.parametrize("kind", [Puts, DraftedPuts])
def test_a_streamer_gets_each_passes_tokens(kind):
    model, decoding = decoding_of(threshold=0.4)
    streamer = kind()
    out = heads.generate(
        model, decoding, inputs=PROMPT, streamer=streamer, max_new_tokens=24, return_dict_in_generate=True, **NO_EOS
    )
    assert streamer.puts[0] == PROMPT[0].tolist()
    assert list(itertools.chain(*streamer.puts)) == out.sequences[0].tolist()
    assert [len(put) for put in streamer.puts[1:]] == orders_of(out.stats)[0]
    assert streamer.ended == 1
    if kind is DraftedPuts:
        assert all(flags == [False] + [True] * (len(flags) - 1) for flags in streamer.flags)


def test_only_what_is_asked_for_is_returned():
    model, decoding = decoding_of()
    out = run(model, decoding)
    assert list(out.keys()) == ["sequences"]
    bare = run(model, decoding, return_dict_in_generate=False)
    assert torch.equal(bare, out.sequences)
    assert not bare.requires_grad


def test_grounded_heads_are_refused():
    with pytest.raises(ValueError, match=r"family 'grounded' are grounded .* use TreeDecoding, or heads of another"):
        DynamicDecoding(fitted_heads("grounded", "llama"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 0}, "top_k=0 was given; allowed are 1"),
        ({"threshold": 1.01}, "threshold=1.01 was given; allowed are 0"),
        ({"threshold": -1}, "threshold=-1 was given"),
        ({"transparency": -0.5}, "transparency=-0.5 was given"),
        ({"transparency": 0.5}, "transparency=0.5 was given without a co-occurrence table, and nothing is masked then"),
        ({"blur": 4}, "blur=4 was given; allowed are odd"),
        ({"blur": 3, "adaptive": None}, "blur=3 was given with adaptive=None, and nothing is blurred then"),
        ({"cooccurrence": DenseTable(VOCAB, order=3)}, "n-grams of 3 tokens but .* of 4; count it again with order=4"),
        ({"cooccurrence": DenseTable(VOCAB + 1, order=2)}, "of another tokenizer"),
        ({"cooccurrence": "/no/such/folder"}, "no/such/folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),  # objects would be named by address
)
def test_bad_settings_are_refused_at_once(options, said):
    with pytest.raises((ValueError, OSError), match=said):
        decoding_of(**options)


def test_more_heads_than_a_joint_can_hold_are_refused():
    backbone = Backbone(shared_model("llama", "sdpa"))
    DynamicDecoding(make_heads("medusa", backbone, num_heads=17, unembedding="shared"))
    token_heads = make_heads("medusa", backbone, num_heads=18, unembedding="shared")
    with pytest.raises(
        ValueError, match=r"of 19 tokens with two candidates each .* use at most 17 heads, there are 18"
    ):
        DynamicDecoding(token_heads)


def test_nan_logits_are_refused():
    model = tiny_model("llama", attn="sdpa")
    token_heads = make_heads("medusa", Backbone(model), num_heads=2)
    with torch.no_grad():
        next(token_heads.bodies[1].parameters()).fill_(float("nan"))
    with pytest.raises(
        ValueError, match="probabilities of head 2 for token 3 of the n-gram are NaN in row 0; look for"
    ):
        run(model, DynamicDecoding(token_heads))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output_scores": True}, "output_scores or output_logits was given"),
        ({"output_logits": True}, "output_scores or output_logits was given"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance"),
        ({"labels": PROMPT}, "generate was given labels"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding_side='left'"),
        ({"position_ids": torch.arange(1, 6)[None]}, "leave position_ids out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_equal_is_refused(options, said):
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match=said):
        run(model, decoding, **options)


def test_another_model_is_refused():
    _, decoding = decoding_of()
    with pytest.raises(ValueError, match="another model than the heads' backbone"):
        run(tiny_model("llama"), decoding)
