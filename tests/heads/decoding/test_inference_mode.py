"""Inference mode changes no bit of a text, and nothing that a caller gets is bound to it.

The plain reference is the same decoder on a model with a hook, which runs under `torch.no_grad`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from draft_runs import plain_draft_of as draft_of
from matrices import covering
from throwaway_families import FAMILIES, make_heads
from tiny import PAD, random_tokens, tiny_model
from torch import nn

import heads
from heads.backbone.model import Backbone
from heads.backbone.support import fastest_mode

TREE = heads.Tree([[0], [0, 0], [0, 1], [1], [1, 0]])
ALL: dict[str, Any] = {
    "max_new_tokens": 12,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "repetition_penalty": 1.2,
    "return_dict_in_generate": True,
}


def say(decoding: heads.TreeDecoding, seed: int = 1, **options: Any) -> Any:
    tokens = random_tokens(1, 9, seed=seed)
    torch.manual_seed(0)
    asked = {"attention_mask": torch.ones_like(tokens), **ALL, **options}
    return decoding.token_heads.backbone.model.generate(tokens, custom_generate=decoding, **asked)


@covering(family=FAMILIES, do_sample=[False, True])
def test_every_score_is_the_same_bit_for_bit(family, do_sample):
    token_heads = make_heads(family, Backbone(tiny_model("llama", attn="sdpa")))
    decoding = heads.TreeDecoding(token_heads, TREE)
    asked = {"do_sample": do_sample, "output_scores": True, "output_logits": True}
    modes: list[bool] = []
    fast = say(decoding, **asked)
    with token_heads.backbone.model.register_forward_pre_hook(lambda *_: None):
        plain = say(decoding, **asked)
    watch = token_heads.backbone.layers[0].register_forward_hook(
        lambda *_: modes.append(torch.is_inference_mode_enabled())
    )
    say(decoding, **asked)
    watch.remove()
    assert not any(modes), "a hooked model runs under no_grad"
    assert torch.equal(fast.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for one, other in zip(getattr(fast, name), getattr(plain, name), strict=True):
            assert torch.equal(one, other)


def draft_model(model: Any) -> Any:
    """Its text grows beyond the first buffer of a row's prefix, which the draft model's processors read."""
    return heads.DraftModelDecoding(tiny_model("qwen3", seed=1), k=3)


def plain_draft(model: Any) -> Any:
    return heads.DraftModelDecoding(draft_of("bloom"), k=3, rule="exact")


def dynamic(model: Any) -> Any:
    return heads.DynamicDecoding(make_heads("dynamo", Backbone(model)), threshold=0.2)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("build", [draft_model, plain_draft, dynamic])
def test_other_decodings_run_in_it_and_write_the_same_text(build, do_sample, monkeypatch):
    model = tiny_model("llama", attn="sdpa")
    decoding, tokens, mlp = build(model), random_tokens(1, 9, seed=1), type(model.model.layers[0].mlp)
    modes: list[bool] = []
    forward = mlp.forward

    def watched(self: Any, hidden: Any) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return forward(self, hidden)

    def text() -> Any:
        torch.manual_seed(0)
        asked = {"attention_mask": torch.ones_like(tokens), **ALL, "max_new_tokens": 40, "do_sample": do_sample}
        return model.generate(tokens, custom_generate=decoding, **asked)

    decoding.check_model(model)  # which wraps it, with passes of its own
    monkeypatch.setattr(mlp, "forward", watched)  # a hook would end inference mode
    fast = text()
    assert modes
    assert all(modes)
    with model.register_forward_pre_hook(lambda *_: None):
        plain = text()
    assert not modes[-1]
    assert torch.equal(fast.sequences, plain.sequences)
    assert not fast.sequences.is_inference()
    cached = [x for layer in getattr(fast.past_key_values, "layers", []) for x in (layer.keys, layer.values)]
    assert not any(x.is_inference() for x in cached)


@pytest.mark.parametrize("draft", ["qwen3", "bloom"])
def test_kept_caches_of_a_draft_model_outlive_a_change_of_mode(draft):
    model = tiny_model("llama", attn="sdpa")
    given = draft_of(draft) if draft == "bloom" else tiny_model(draft, seed=1)
    decoding, text = heads.DraftModelDecoding(given, k=3, keep_caches=True), random_tokens(1, 9, seed=1)
    read = []
    for hooked in (False, False, True, False):
        asked = {"attention_mask": torch.ones_like(text), **ALL, "do_sample": False}
        hook = model.register_forward_pre_hook(lambda *_: None) if hooked else contextlib.nullcontext()
        with hook:
            ours = model.generate(text, custom_generate=decoding, **asked)
        assert torch.equal(ours.sequences, model.generate(text, **asked).sequences)
        read.append(ours.stats.prompt_tokens == text.shape[1])
        text = torch.cat([ours.sequences, random_tokens(1, 2, seed=2)], dim=1)
    assert read == [True, False, True, True], "everything is read again where the mode changes"


def test_what_is_returned_can_be_trained_on_and_written_to():
    token_heads = make_heads("grounded", Backbone(tiny_model("llama", attn="sdpa")))
    output = say(heads.TreeDecoding(token_heads, TREE), do_sample=False, output_scores=True, output_logits=True)
    cached = [x for layer in output.past_key_values.layers for x in (layer.keys, layer.values)]
    returned = [output.sequences, *output.scores, *output.logits, *cached]
    assert not any(x.is_inference() for x in returned)


def test_kept_caches_are_read_anew_where_the_mode_changes():
    token_heads = make_heads("grounded", Backbone(tiny_model("llama", attn="sdpa")))
    decoding = heads.TreeDecoding(token_heads, TREE, keep_caches=True)
    first = say(decoding, do_sample=False)
    with token_heads.register_forward_hook(lambda *_: None):
        second = say(decoding, do_sample=False)
    third = say(decoding, do_sample=False)
    assert first.sequences.equal(second.sequences)
    assert second.sequences.equal(third.sequences)


def test_weights_of_engines_and_hooked_modules_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert fastest_mode(model) is torch.inference_mode
    with model[1].register_forward_hook(lambda *_: None):
        assert fastest_mode(model) is torch.no_grad
    model[0].weight.ds_id = 3  # as ZeRO-3 marks what it gathers
    assert fastest_mode(model) is torch.no_grad
