"""A prefix layer (Hydra++) below grounded and recurrent heads: its start, its cache, its gradients, greedy text.

That training and drafting agree with one is in tests/heads/families/test_families.py, under the names of `PREFIXED`.
"""

from __future__ import annotations

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, TOLERANCE, backbone_of, check_greedy, drafted, prefilled
from matrices import covering
from throwaway_families import VARIANTS, fitted_heads, make_heads
from tiny import (
    CONFIGS,
    FLOAT32_ONLY,
    HYBRID_CONFIGS,
    PAD,
    TINY_VISION,
    left_padded,
    random_tokens,
    shared_model,
    tiny_model,
)
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

import heads
from heads.backbone.model import Backbone
from heads.families import build_config
from heads.interface import layers
from train.objective.model import TrainedModel

PREFIXED = [name for name, (_, options) in VARIANTS.items() if "prefix_layers" in options]
every_variant = pytest.mark.parametrize("variant", PREFIXED)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "ctrl" and not name.startswith("gemma4")])
def test_a_prefix_layer_starts_as_the_identity(name, offset):
    """Bit by bit, on every architecture but those that are refused."""
    backbone = Backbone(shared_model(name, dtype=torch.float32 if name in FLOAT32_ONLY else torch.float64))
    token_heads = heads.create("grounded", backbone, num_heads=1, prefix_layers=1, hidden_offset=offset).eval()
    plain = heads.create("grounded", backbone, num_heads=1, hidden_offset=offset)
    text = [random_tokens(6, seed=21).tolist()]
    found, wanted = (h.first_level(prefilled(h, text)[1]) for h in (token_heads, plain))
    assert torch.equal(found, wanted)
    assert sum(p.count_nonzero() for p in token_heads.prefix.parameters()) > 0, "the layer is not all zeros"


def test_new_layers_of_an_image_text_model_are_drawn_by_its_text_model():
    """Its own config says nothing of how experts are drawn."""
    text = {
        **HYBRID_CONFIGS["qwen3_5"]().to_dict(),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    text |= {"shared_expert_intermediate_size": 16, "model_type": "qwen3_5_moe_text"}
    config = Qwen3_5MoeConfig(text_config=text, vision_config={**TINY_VISION, "depth": 1, "num_heads": 2})
    model = Qwen3_5MoeForConditionalGeneration(config).eval()
    token_heads, tokens_BT = heads.create("dynamo", model, num_heads=2), random_tokens(1, 5)
    assert not hasattr(config, "initializer_range")
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    plain = model.generate(tokens_BT, **asked)
    assert torch.equal(model.generate(tokens_BT, custom_generate=heads.TreeDecoding(token_heads), **asked), plain)


def test_a_layer_that_does_not_become_the_identity_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "RESIDUAL_WRITERS", frozenset(["o_proj"]))
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer does not become the identity by zeroing o_proj"):
        heads.create("grounded", backbone_of("llama"), prefix_layers=1)


def test_a_prefix_layer_runs_over_the_whole_context():
    """Behind its start it reads tokens that f alone does not show: the first token moves the newest f."""
    backbone = backbone_of("llama")
    token_heads = make_heads("grounded", backbone, prefix_layers=1, hidden_offset=3)  # embeddings: f is the last token
    plain = make_heads("grounded", backbone, hidden_offset=3)
    texts = [[3, 4, 5, 6], [7, 4, 5, 6]]
    for kind, same in ((plain, True), (token_heads, False)):
        newest = kind.first_level(prefilled(kind, texts)[1])
        assert torch.equal(newest[0], newest[1]) == same


@every_variant
def test_all_of_it_is_trained(variant):
    """From its start: what is zero gets the first gradient, the rest the next one."""
    family, options = VARIANTS[variant]
    token_heads = heads.create(family, Backbone(tiny_model("llama")), num_heads=2, **options)
    model = TrainedModel(token_heads.backbone, token_heads).train()
    tokens = random_tokens(2, 9, seed=4)
    batch = tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    optimizer = torch.optim.SGD(token_heads.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(*batch)["loss"].backward()
        reached = {name for name, p in token_heads.prefix.named_parameters() if p.grad.abs().max() > 0}
        writers = {"0.self_attn.o_proj.weight", "0.mlp.down_proj.weight"}
        assert reached == (writers if step == 0 else set(dict(token_heads.prefix.named_parameters())))
        optimizer.step()
    assert all(p.grad is None for p in model.model.parameters())


@covering(variant=PREFIXED, name=["llama", "gpt_neox", "mistral_windowed", "gemma3"])
def test_greedy_decoding_is_the_backbones_own(variant, name):
    stats = check_greedy(make_heads(variant, backbone_of(name), seed=1))
    assert stats.tokens_per_pass > 1


@every_variant
def test_a_conversation_goes_on_from_kept_caches(variant):
    """The second call rolls back to what its prompt shares with the text so far."""
    token_heads = fitted_heads(variant, "mistral_windowed")
    model = token_heads.backbone.model
    decoding = heads.TreeDecoding(token_heads, lookup=0, keep_caches=True)
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    text = random_tokens(1, 6, seed=50)
    for more in (random_tokens(1, 4, seed=60), random_tokens(1, 3, seed=61)):
        mask = torch.ones_like(text)
        wanted = model.generate(text, attention_mask=mask, **settings)
        assert torch.equal(model.generate(text, attention_mask=mask, custom_generate=decoding, **settings), wanted)
        text = torch.cat([wanted[:, :-5], more], dim=1)


@every_variant
def test_rows_that_end_let_go_of_their_slots(variant):
    token_heads = make_heads(variant, backbone_of("llama"))
    texts = [random_tokens(7, seed=12).tolist(), random_tokens(4, seed=13).tolist(), random_tokens(9, seed=14).tolist()]
    state, heads_state = prefilled(token_heads, texts)
    rows_R = torch.tensor([1])
    state, heads_state = state.keep_rows(rows_R), token_heads.keep_rows(heads_state, rows_R)
    assert len(state.cache.layers) == token_heads.backbone.num_layers + 1
    assert all(layer.keys.shape[0] == 1 and layer.get_seq_length() == 4 for layer in state.cache.layers)
    alone, alone_heads = prefilled(token_heads, texts[1:2])
    torch.testing.assert_close(heads_state, alone_heads, rtol=0, atol=DEFAULT_TOLERANCE)
    for mine, theirs in zip(state.cache.layers, alone.cache.layers, strict=True):
        for found, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(found[:, :, :4], wanted[:, :, :4], rtol=0, atol=DEFAULT_TOLERANCE)


@every_variant
@pytest.mark.parametrize("name", ["gpt_neox", "codegen"])
def test_it_loads_back(variant, name, tmp_path):
    model = tiny_model(name, dtype=torch.float32)
    token_heads = make_heads(variant, Backbone(model))
    heads.save(token_heads, tmp_path)
    loaded = heads.load(tmp_path, model)
    assert loaded.config == token_heads.config
    tokens, following = [random_tokens(6, seed=3).tolist()], torch.tensor([[3, 4, 5]])
    for one, other in zip(
        *(drafted(h, prefilled(h, tokens)[1], following) for h in (token_heads, loaded)), strict=True
    ):
        assert torch.equal(one, other)


def test_padding_on_the_left_is_no_part_of_the_context():
    token_heads = make_heads("grounded, prefix", backbone_of("codegen"))
    texts = [random_tokens(7, seed=12).tolist(), random_tokens(3, seed=13).tolist()]
    _, mask = left_padded(texts)
    assert not mask.all()
    both = token_heads.first_level(prefilled(token_heads, texts)[1])
    for row, text in enumerate(texts):
        alone = token_heads.first_level(prefilled(token_heads, [text])[1])[0]
        assert (both[row] - alone).abs().max() < TOLERANCE["codegen"]


@pytest.mark.parametrize("given", [-1, 2])
def test_more_than_one_prefix_layer_is_refused(given):
    with pytest.raises(ValueError, match=f"prefix_layers={given} was given; allowed are 0 and 1"):
        build_config("grounded", prefix_layers=given)
