"""Reused caches change what is read and never the text: every turn equals a fresh call's and plain generate's.

Models run in float64 with sdpa, where rounding is far below the gaps between the two best logits, so no difference is
excused. That caches are used at all is counted: by the tokens that the backbone was given, not by our own statistics.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backbone_passes import reads
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import PAD, left_padded, random_tokens, tiny_model
from torch import Tensor

import heads
from heads.backbone.model import Backbone

NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
ANY_DEPTH = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
NAMES = ["llama", "codegen", "mistral_windowed", "gemma3"]


def say(decoding: Any, tokens: Tensor, **options: Any) -> Any:
    model = decoding.token_heads.backbone.model
    # A greedy text holds any token; without a mask generate would take a pad token for padding.
    asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, "return_dict_in_generate": True}
    return model.generate(tokens, custom_generate=decoding, **{**asked, **NO_EOS, **options})


def plainly(decoding: Any, tokens: Tensor, **options: Any) -> Tensor:
    asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, **NO_EOS, **options}
    text: Tensor = plain_generate(decoding.token_heads.backbone.model, tokens, **asked)
    return text


@covering(family=FAMILIES, name=NAMES, lookup=[10, 0], repeats=2)
def test_each_turn_reads_only_what_is_new(family, name, lookup):
    token_heads = fitted_heads(family, name)
    decoding = heads.TreeDecoding(token_heads, ANY_DEPTH, lookup=lookup, keep_caches=True)
    fresh = heads.TreeDecoding(token_heads, ANY_DEPTH, lookup=lookup)
    text = random_tokens(1, 9, seed=50)
    reused = 0
    for turn in range(3):
        with reads(token_heads.backbone) as seen:
            out = say(decoding, text)
        assert torch.equal(out.sequences, plainly(decoding, text)), turn
        assert seen[0] == text.shape[1] - reused == out.stats.prompt_tokens
        # The same drafts are accepted as in a call that has read everything itself: heads' states were rolled back too.
        assert out.stats.drafted == say(fresh, text).stats.drafted
        # The last token is always read anew: where it was drafted, its node may have lain behind the text's end.
        reused = out.sequences.shape[1] - 1
        text = torch.cat([out.sequences, random_tokens(1, 4, seed=60 + turn)], dim=1)


@covering(family=FAMILIES, name=["llama", "mistral_windowed"])
def test_a_prompt_that_parts_from_the_text_is_read_from_there(family, name):
    """An answer tokenised anew, an edited question, a shorter text, another text altogether."""
    token_heads = fitted_heads(family, name)
    decoding = heads.TreeDecoding(token_heads, ANY_DEPTH, keep_caches=True)
    first = say(decoding, random_tokens(1, 9, seed=50)).sequences
    for shared, unread in ((14, 5), (11, 3), (4, 7), (3, 1), (0, 6)):
        other = torch.where(first[:, shared : shared + 1] == 5, 6, 5)
        text = torch.cat([first[:, :shared], other, random_tokens(1, unread, seed=unread)], dim=1)
        with reads(token_heads.backbone) as seen:
            out = say(decoding, text)
        assert seen[0] == 1 + unread
        assert torch.equal(out.sequences, plainly(decoding, text)), shared
        first = torch.cat([text[:, :shared], out.sequences[:, shared:]], dim=1)


def test_the_prompts_last_token_is_read_anew():
    """The same prompt again, and one that ends inside the text: one token is read, for its logits."""
    decoding = heads.TreeDecoding(fitted_heads("dynamo", "llama"), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 9, seed=51)
    long = say(decoding, text).sequences
    for prompt in (text, text, long[:, :5], long[:, :1]):
        with reads(decoding.token_heads.backbone) as seen:
            out = say(decoding, prompt)
        assert seen[0] == 1
        assert torch.equal(out.sequences, plainly(decoding, prompt))


def test_rows_that_end_by_a_drafted_end_token_leave_whole_caches():
    decoding = heads.TreeDecoding(fitted_heads("grounded", "qwen3"), ANY_DEPTH, keep_caches=True, lookup=0)
    text, ended_drafted = random_tokens(1, 5, seed=50), 0
    free = say(decoding, text)
    for eos in dict.fromkeys(free.sequences[0, 6:].tolist()):
        decoding.forget()
        out = say(decoding, text, eos_token_id=eos)
        ended_drafted += out.stats.drafted[0][-1]
        longer = torch.cat([out.sequences, random_tokens(1, 3, seed=52)], dim=1)
        assert torch.equal(say(decoding, longer).sequences, plainly(decoding, longer))
    assert ended_drafted, "no text ended with a drafted token"


def test_sampling_with_kept_caches_makes_generates_draws():
    decoding = heads.TreeDecoding(fitted_heads("dynamo", "qwen3"), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 6, seed=53)
    for turn in range(2):
        torch.manual_seed(turn)
        plain = plainly(decoding, text, do_sample=True, top_k=0)
        torch.manual_seed(turn)
        out = say(decoding, text, do_sample=True, top_k=0).sequences
        assert torch.equal(out, plain)
        text = torch.cat([out, random_tokens(1, 2, seed=54)], dim=1)


class Stops:
    """A streamer whose user presses Ctrl-C after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


def test_a_call_that_was_stopped_leaves_nothing_behind():
    decoding = heads.TreeDecoding(fitted_heads("kv", "llama"), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 9, seed=55)
    longer = torch.cat([say(decoding, text).sequences, random_tokens(1, 3, seed=56)], dim=1)
    model = decoding.token_heads.backbone.model
    asked = {"inputs": longer, "attention_mask": torch.ones_like(longer), "max_new_tokens": 12, **NO_EOS}
    with pytest.raises(KeyboardInterrupt):
        heads.generate(model, decoding, streamer=Stops(3), **asked)
    out = say(decoding, longer)
    assert out.stats.prompt_tokens == longer.shape[1]
    assert torch.equal(out.sequences, plainly(decoding, longer))


def test_forgetting_reads_everything_again():
    decoding = heads.TreeDecoding(fitted_heads("grounded", "llama"), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 9, seed=57)
    assert [say(decoding, text).stats.prompt_tokens for _ in range(2)] == [9, 1]
    decoding.forget()
    assert say(decoding, text).stats.prompt_tokens == 9
    fresh = heads.TreeDecoding(fitted_heads("grounded", "llama"), ANY_DEPTH)
    fresh.forget()  # nothing is kept, nothing happens
    assert [say(fresh, text).stats.prompt_tokens for _ in range(2)] == [9, 9]


@torch.no_grad()
def test_caches_of_other_weights_are_forgotten():
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model)), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 9, seed=57)
    assert [say(decoding, text).stats.prompt_tokens for _ in range(2)] == [9, 1]
    model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
    out = say(decoding, text)
    assert out.stats.prompt_tokens == 9
    assert torch.equal(
        out.sequences, model.generate(text, max_new_tokens=12, **NO_EOS, attention_mask=torch.ones_like(text))
    )
    assert say(decoding, text).stats.prompt_tokens == 1


@pytest.mark.parametrize("family", ["dynamo", "mtp", "eagle"])
def test_caches_of_other_heads_are_forgotten(family):
    """Heads that are trained between two turns draft from their own rows, as in a fresh call."""
    model = tiny_model("llama", attn="sdpa")
    token_heads = make_heads(family, Backbone(model))
    decoding = heads.TreeDecoding(token_heads, ANY_DEPTH, lookup=0, keep_caches=True)
    text = random_tokens(1, 9, seed=57)
    longer = torch.cat([say(decoding, text).sequences, random_tokens(1, 3, seed=58)], dim=1)
    assert say(decoding, longer).stats.prompt_tokens == 4
    token_heads.load_state_dict(make_heads(family, Backbone(model), seed=1).state_dict())
    out = say(decoding, longer)
    assert out.stats.prompt_tokens == longer.shape[1]
    assert out.stats.drafted == say(heads.TreeDecoding(token_heads, ANY_DEPTH, lookup=0), longer).stats.drafted


def negate_output(module, inputs, output):
    return -output


CHANGES = {
    "a hook on an MLP": lambda model: model.model.layers[1].mlp.register_forward_hook(negate_output),
    "a hook on the embeddings": lambda model: model.model.embed_tokens.register_forward_hook(negate_output),
    "another activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    "an edited buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_caches_of_a_changed_model_are_forgotten(change):
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("medusa", Backbone(model)), ANY_DEPTH, keep_caches=True)
    text = random_tokens(1, 9, seed=57)
    say(decoding, text)
    CHANGES[change](model)
    out = say(decoding, text)
    assert out.stats.prompt_tokens == 9
    asked = {"max_new_tokens": 12, **NO_EOS, "attention_mask": torch.ones_like(text)}
    assert torch.equal(out.sequences, model.generate(text, **asked))


@pytest.mark.parametrize("lookup", [0, 6])
def test_a_model_in_another_dtype_reads_everything_again(lookup):
    """There and back, as where a conversation goes on on another device in less precision."""
    model = tiny_model("llama", attn="sdpa")
    token_heads = make_heads("grounded", Backbone(model))
    decoding = heads.TreeDecoding(token_heads, ANY_DEPTH, lookup=lookup, keep_caches=True)
    text = random_tokens(1, 9, seed=57)
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        token_heads.to(dtype)
        for prompt_tokens in (9, 1):
            out = say(decoding, text)
            assert out.stats.prompt_tokens == prompt_tokens
            asked = {"max_new_tokens": 12, **NO_EOS, "attention_mask": torch.ones_like(text)}
            assert torch.equal(out.sequences, model.generate(text, **asked))


def test_several_rows_and_padding_are_refused():
    decoding = heads.TreeDecoding(fitted_heads("grounded", "llama"), ANY_DEPTH, keep_caches=True)
    with pytest.raises(ValueError, match=r"keep_caches=True was given for 2 rows; caches are kept for one row"):
        say(decoding, random_tokens(2, 5))
    tokens, mask = left_padded([[5, 6, 7], [8]])
    with pytest.raises(ValueError, match="for 1 rows with padding"):
        say(decoding, tokens[1:], attention_mask=mask[1:])
