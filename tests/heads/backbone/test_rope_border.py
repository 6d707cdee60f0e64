"""Rotary embeddings that change with the text's length: the text of `generate` on either side, a sentence across."""

import pytest
import torch
from throwaway_families import make_heads
from tiny import EOS, LLAMA_LIKE, PAD, random_tokens, sharpen_
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

import heads
from heads.backbone import model as backbone_module
from heads.backbone.compiling import graph
from heads.backbone.model import Backbone

BORDER = 24
PLAIN = {"eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
TREE = [[0], [0, 0], [0, 0, 0], [1]]


def build(kind):
    if kind == "longrope":
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
        config = Phi3Config(
            **{**LLAMA_LIKE, "max_position_embeddings": 256},
            original_max_position_embeddings=BORDER,
            tie_word_embeddings=False,
            rope_parameters=rope,
        )
    else:
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        config = LlamaConfig(
            **{**LLAMA_LIKE, "max_position_embeddings": BORDER}, tie_word_embeddings=False, rope_parameters=rope
        )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    sharpen_(model, torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    return model.eval()


@pytest.fixture(params=["longrope", "dynamic"])
def token_heads(request):
    return make_heads("grounded", Backbone(build(request.param)), num_heads=3)


@pytest.fixture
def longrope_heads():
    return make_heads("grounded", Backbone(build("longrope")), num_heads=3)


def same_text(decoding, prompt_BT, **settings):
    model = decoding.token_heads.backbone.model
    settings = {**PLAIN, **settings}
    return torch.equal(
        model.generate(prompt_BT, **settings), model.generate(prompt_BT, custom_generate=decoding, **settings)
    )


@pytest.mark.parametrize("seed", range(3))
def test_texts_up_to_the_border_are_those_of_generate(token_heads, seed):
    decoding = heads.TreeDecoding(token_heads, TREE, lookup=2)
    assert same_text(decoding, random_tokens(1, 5, seed=seed), max_new_tokens=BORDER + 1 - 5)


@pytest.mark.parametrize("compile", [False, True])
def test_one_token_more_is_refused(token_heads, compile):
    decoding = heads.TreeDecoding(token_heads, TREE, compile=compile)
    prompt_BT = random_tokens(1, 5, seed=0)
    with pytest.raises(ValueError, match=rf"change at {BORDER} tokens, and a text of 5 to {BORDER + 2} was asked for"):
        token_heads.backbone.model.generate(prompt_BT, custom_generate=decoding, max_new_tokens=BORDER + 2 - 5, **PLAIN)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prefill", [8, 1024])
def test_texts_beyond_a_border_of_longrope_are_those_of_generate(longrope_heads, monkeypatch, rows, prefill):
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", prefill)
    decoding = heads.TreeDecoding(longrope_heads, TREE, lookup=2)
    for seed in range(3):
        assert same_text(decoding, random_tokens(rows, BORDER + 1, seed=seed), max_new_tokens=20)
        assert same_text(decoding, random_tokens(rows, 40, seed=seed), max_new_tokens=20)


def test_padding_beyond_a_border_is_refused(longrope_heads):
    prompt_BT = random_tokens(2, 40, seed=0)
    mask_BT = torch.ones_like(prompt_BT)
    mask_BT[0, :20] = 0
    with pytest.raises(ValueError, match="or prompts of more than 24 without padding"):
        longrope_heads.backbone.model.generate(
            prompt_BT,
            attention_mask=mask_BT,
            custom_generate=heads.TreeDecoding(longrope_heads),
            max_new_tokens=4,
            **PLAIN,
        )


def test_kept_caches_of_the_other_side_are_not_used(longrope_heads):
    decoding = heads.TreeDecoding(longrope_heads, TREE, keep_caches=True)
    text_BT = random_tokens(1, 60, seed=0)
    for length, new in ((10, 8), (40, 8), (12, 8), (14, 8)):
        assert same_text(decoding, text_BT[:, :length], max_new_tokens=new), length


def test_a_draft_model_decodes_under_the_same_rule(longrope_heads):
    model = longrope_heads.backbone.model
    decoding = heads.DraftModelDecoding(model)
    prompt_BT = random_tokens(1, 40, seed=0)
    plain = model.generate(prompt_BT, max_new_tokens=12, **PLAIN)
    assert torch.equal(plain, model.generate(prompt_BT, custom_generate=decoding, max_new_tokens=12, **PLAIN))
    with pytest.raises(ValueError, match="rotary embeddings"):
        model.generate(prompt_BT[:, :20], custom_generate=decoding, max_new_tokens=12, **PLAIN)


def test_passes_that_torch_makes_no_graph_of_are_refused(monkeypatch):
    """Dynamic RoPE asks its positions how long the text is."""
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    token_heads = make_heads("grounded", Backbone(build("dynamic")), num_heads=3)
    decoding = heads.TreeDecoding(token_heads, TREE, compile=True)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"torch makes no graph of passes of LlamaForCausalLM \(.*; give compile=Fal"
        ):
            token_heads.backbone.model.generate(
                random_tokens(1, 5, seed=0), custom_generate=decoding, max_new_tokens=8, **PLAIN
            )


def test_others_have_no_border():
    config = LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=False)
    assert Backbone(AutoModelForCausalLM.from_config(config)).rope_border is None
