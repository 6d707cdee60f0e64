"""A model that is changed after it was wrapped decodes as it is now, or is refused in a sentence.

Adapters, hooks, replaced embeddings and weights edited in place: each changes the text of plain `generate`, so equal
texts mean that the change was followed. Heads draft from the changed model too, where they share parts of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from throwaway_families import make_heads
from tiny import PAD, random_tokens, tiny_model
from torch import Tensor, nn

import heads
from heads.backbone.model import Backbone

PROMPT = random_tokens(1, 6, seed=1)
ASKED: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": PAD}


@torch.no_grad()
def add_adapter(model: Any, *targets: str) -> None:
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def hook_output(model: Any) -> None:
    push_V = torch.randn(29, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 4
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + push_V)


def replace_output_forward(model: Any) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: -plain(hidden)


def replace_embeddings(model: Any) -> None:
    new = nn.Embedding(29, 32, dtype=torch.float64)
    with torch.no_grad():
        new.weight.copy_(model.get_input_embeddings().weight.roll(1, 0))
    model.set_input_embeddings(new)


def replace_unembedding(model: Any) -> None:
    new = nn.Linear(32, 29, bias=True, dtype=torch.float64)
    with torch.no_grad():
        new.weight.copy_(model.lm_head.weight.roll(1, 0))
    model.set_output_embeddings(new)


def edit_in_place(model: Any) -> None:
    """Through `.data`, which counts no version up."""
    for parameter in (
        model.lm_head.weight,
        model.get_input_embeddings().weight,
        model.model.layers[0].mlp.up_proj.weight,
    ):
        parameter.data.mul_(-1.0)


CHANGES = {
    "adapter with lm_head": lambda model: add_adapter(model, "lm_head", "q_proj"),
    "adapter with embed_tokens": lambda model: add_adapter(model, "embed_tokens", "v_proj"),
    "hook": hook_output,
    "forward": replace_output_forward,
    "embeddings": replace_embeddings,
    "unembedding": replace_unembedding,
    "weights in place": edit_in_place,
}
OUTPUT_ONLY = ("adapter with lm_head", "hook", "forward")


def text_of(model: Any, decoding: Any = None) -> Tensor:
    text: Tensor = model.generate(PROMPT, custom_generate=decoding, **ASKED)
    return text


@pytest.mark.parametrize(
    ("change", "name"),
    [*((change, "llama") for change in CHANGES), ("adapter with lm_head", "qwen3"), ("embeddings", "qwen3")],
)
def test_a_changed_model_decodes_as_it_is_now(change, name):
    """Its own unembedding in llama, one that is tied to the embeddings in qwen3."""
    model = tiny_model(name, attn="sdpa")
    token_heads = make_heads("grounded", Backbone(model), num_heads=3)
    decoding, before = heads.TreeDecoding(token_heads, 8), text_of(model)
    assert torch.equal(text_of(model, decoding), before)
    CHANGES[change](model)
    changed = text_of(model)
    assert not torch.equal(changed, before), "the change changes the text"
    assert torch.equal(text_of(model, decoding), changed)


@pytest.mark.parametrize("draft_tokens", [None, tuple(range(2, 20))], ids=["all", "some"])
@pytest.mark.parametrize("change", CHANGES)
def test_heads_that_share_the_unembedding_follow_it_or_are_refused(change, draft_tokens):
    model = tiny_model("llama", attn="sdpa")
    token_heads = make_heads(
        "medusa", Backbone(model), num_heads=2, unembedding="shared", draft_tokens=draft_tokens, seed=2
    )
    decoding = heads.TreeDecoding(token_heads, 8)
    text_of(model, decoding)
    CHANGES[change](model)
    if change in OUTPUT_ONLY:
        with pytest.raises(ValueError, match=r"heads that share the backbone's unembedding .* give heads with unembed"):
            text_of(model, decoding)
        return
    assert torch.equal(text_of(model, decoding), text_of(model))
    now = model.get_output_embeddings().weight
    assert torch.equal(token_heads.projection(1).weight, now if draft_tokens is None else now[list(draft_tokens)])


def test_hooks_that_change_nothing_and_adapters_that_were_taken_off_are_no_matter():
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("medusa", Backbone(model), num_heads=2, unembedding="shared"), 8)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits))
    assert torch.equal(text_of(model, decoding), text_of(model))
    add_adapter(model, "lm_head")
    model.disable_adapters()
    assert torch.equal(text_of(model, decoding), text_of(model))


def test_a_hook_on_the_model_itself_is_refused():
    """A pass runs the decoder and the output layer, never the model's own forward."""
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("medusa", Backbone(model), num_heads=2), 8)

    def negate(_: Any, __: Any, output: Any) -> Any:
        output.logits = -output.logits
        return output

    handle = model.register_forward_hook(negate)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a hook on the model or on its output layer may be the reason"):
            text_of(model, decoding)
    handle.remove()
    assert torch.equal(text_of(model, decoding), text_of(model))


def test_an_output_layer_with_an_adapter_is_refused_in_a_sentence_that_names_it():
    model = tiny_model("llama")
    add_adapter(model, "lm_head")
    with pytest.raises(ValueError, match="its output layer has an adapter: merge it"):
        Backbone(model)


@pytest.mark.parametrize("size", [24, 40])
def test_another_vocabulary_is_refused(size):
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("medusa", Backbone(model), num_heads=2), 8)
    model.resize_token_embeddings(size)
    with pytest.raises(ValueError, match=f"has {size} tokens, and had 29 .*; resize embeddings before heads.load"):
        text_of(model, decoding)


def test_heads_that_run_the_last_layer_refuse_an_adapter_on_it():
    pytest.importorskip("peft")
    model = tiny_model("llama", attn="sdpa")
    decoding = heads.TreeDecoding(make_heads("dynamo, lora", Backbone(model), num_heads=2), 8)
    add_adapter(model, "q_proj")
    with pytest.raises(
        ValueError, match=r"last layer, which .* heads with lora_rank run as their own, has got an adapt"
    ):
        text_of(model, decoding)


def test_a_loop_of_ones_own_follows_a_hook_too():
    model = tiny_model("llama", attn="sdpa")
    backbone = Backbone(model)
    hook_output(model)
    with torch.no_grad():
        _, output = backbone.read(PROMPT, torch.ones_like(PROMPT, dtype=torch.bool))
        expected = model(PROMPT).logits[:, -1]
    torch.testing.assert_close(backbone.logits(output.final_BND[:, -1]), expected, rtol=0, atol=1e-12)
