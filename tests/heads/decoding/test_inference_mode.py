"""Inference mode changes no bit of a text, and nothing that a caller gets is bound to it.

The plain reference is the same decoder on a model with a hook, which runs under `torch.no_grad`.
"""

from __future__ import annotations

from typing import Any

import torch
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
