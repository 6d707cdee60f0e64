"""Tokens are sampled by each row's own numbers; weights and settings that would spoil a text are told of."""

import pytest
import torch
from tiny import tiny_model

from heads.backbone.model import Backbone
from heads.decoding.tree_decoding import TreeDecoding
from heads.families import create
from train.regenerate.config import RegenerateConfig
from train.regenerate.writing import SampleByRow, Writer, sample, uniform_numbers


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.1, 0.45, 0.05, 0.4], dtype=torch.float64)
    uniforms = uniform_numbers((0, 1), 20_000)
    tokens = sample(probs.expand(len(uniforms), 4), uniforms, 1.0)
    shares = tokens.bincount(minlength=4) / len(tokens)
    assert torch.allclose(shares.double(), probs, atol=0.015)  # four standard deviations of a share of one half
    tokens = sample(probs.expand(len(uniforms), 4), uniforms, 0.8)  # 0.45 and 0.4 reach it
    shares = tokens.bincount(minlength=4) / len(tokens)
    assert torch.allclose(shares.double(), torch.tensor([0, 0.45, 0, 0.4], dtype=torch.float64) / 0.85, atol=0.015)
    assert sample(probs[None], torch.tensor([0.999]), 1e-9).item() == 1
    assert torch.equal(uniform_numbers((0, 1), 5), uniforms[:5])
    assert not torch.equal(uniform_numbers((0, 2), 5), uniforms[:5])


def test_a_backbone_that_overflows_is_told_of():
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.inf, 2.0]])
    processor = SampleByRow(torch.zeros(2, 1), prompt_length=4, temperature=0.7, top_p=0.9)
    with pytest.raises(ValueError, match=r"NaN; look for damaged weights, and for overflow: give --backbone\.dtype"):
        processor(torch.zeros(2, 4, dtype=torch.long), scores)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_damaged_weights_are_told_of_at_any_temperature(temperature):
    model = tiny_model("llama", dtype=torch.float32)
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    writer = Writer(model, RegenerateConfig(temperature=temperature, max_new_tokens=3), [1])
    with pytest.raises(ValueError, match="The backbone's probabilities are NaN"):
        writer.write([[3, 4, 5], [6, 7]], [(0,), (1,)])


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_in_any_row_of_any_batch_is_told_of(temperature, heads):
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32)
    decoding = TreeDecoding(create("grounded", Backbone(model), num_heads=2)) if heads else None
    model.get_input_embeddings().weight.data[7] = torch.nan
    writer = Writer(model, RegenerateConfig(temperature=temperature, max_new_tokens=3, batch_size=2), [1], decoding)
    writer.write([[3, 4, 5], [6, 8]], [(0,), (1,)])
    with pytest.raises(ValueError, match="The backbone's probabilities are NaN"):
        writer.write([[3, 4, 5], [6, 7]], [(2,), (3,)])


RECOMMENDED = {
    "repetition_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 3.0,
    "min_new_tokens": 20,
    "suppress_tokens": [5],
    "bad_words_ids": [[13]],
    "exponential_decay_length_penalty": (1, 3.0),
    "forced_eos_token_id": 1,
    "sequence_bias": [[[5], -50.0]],
    "guidance_scale": 2.0,
    "max_time": 0.0001,
    "num_beams": 4,
}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_what_the_folder_recommends_does_not_shape_the_text(name):
    prompts, keys = [[3, 4, 5], [6, 7]], [(0,), (1,)]
    texts = []
    for settings in ({}, {name: RECOMMENDED[name]}):
        model = tiny_model("llama", attn="sdpa", dtype=torch.float64)
        for setting in settings:
            setattr(model.generation_config, setting, settings[setting])
        own = model.generation_config
        texts.append(Writer(model, RegenerateConfig(temperature=0, max_new_tokens=24), [1]).write(prompts, keys))
        assert model.generation_config is own
    assert texts[0] == texts[1]
    assert {5, 13} <= set(texts[0][0])
