"""Text after an image: exactly plain generation's, with trees, chains and sampling; or refused in a sentence."""

import pytest
import torch
from image_models import CONFIGS, image_model, image_prompt

import heads
from heads.backbone.model import Backbone
from heads.decoding.request.images import IMAGE_INPUTS, read_with_images
from heads.families import create

TOKENS = 24


@pytest.fixture(scope="module")
def models():
    made = {}

    def find(name):
        made[name] = made.get(name) or image_model(name)
        return made[name]

    return find


def token_heads(model, family="grounded", **config):
    torch.manual_seed(3)
    return create(family, Backbone(model), num_heads=3, **config).double()


def plain(model, prompt, **more):
    return model.generate(**prompt, max_new_tokens=TOKENS, **({"do_sample": False} | more))


@pytest.mark.parametrize("lookup", [0, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_plain_generation_s(models, name, lookup):
    model, prompt = models(name), image_prompt(name)
    decoding = heads.TreeDecoding(token_heads(model), lookup=lookup)
    out = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False, custom_generate=decoding)
    assert torch.equal(out, plain(model, prompt))
    text = {**prompt, **{n: torch.zeros_like(prompt[n]) for n in prompt if "type_ids" in n}}
    text = {n: x for n, x in text.items() if n not in ("pixel_values", "image_grid_thw")}
    text["input_ids"] = text["input_ids"].clamp(max=80)  # without an image, on the same heads
    out = model.generate(**text, max_new_tokens=TOKENS, do_sample=False, custom_generate=decoding)
    assert torch.equal(out, plain(model, text))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_image_is_read(models, name):
    model = models(name)
    decoding = heads.TreeDecoding(token_heads(model), lookup=0)
    found = [
        model.generate(**image_prompt(name, seed), max_new_tokens=TOKENS, do_sample=False, custom_generate=decoding)
        for seed in (0, 1)
    ]
    assert not torch.equal(*found)
    assert torch.equal(found[1], plain(model, image_prompt(name, 1)))


@pytest.mark.parametrize("name", CONFIGS)
def test_sampled_text_is_plain_generation_s(models, name):
    model, prompt = models(name), image_prompt(name)
    decoding = heads.TreeDecoding(token_heads(model), lookup=4)
    texts = []
    for how in ({}, {"custom_generate": decoding}):
        torch.manual_seed(7)
        texts.append(plain(model, prompt, do_sample=True, temperature=0.8, top_k=20, **how))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_over_drafts_scores_as_plain_steps_do(models, name):
    """Positions after an image, and masks of nodes: two right tokens, and a wrong one beside the first."""
    model, prompt = models(name), image_prompt(name)
    backbone, length = Backbone(model), prompt["input_ids"].shape[1]
    steps = plain(model, prompt, output_logits=True, return_dict_in_generate=True)
    state, output = read_prompt(backbone, prompt)
    first, second = steps.sequences[0, length : length + 2].tolist()
    sees_NN = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    nodes_1N, depth_N = torch.tensor([[first, (second + 1) % 80, second]]), torch.tensor([0, 1, 1])
    found_NV = backbone.logits(backbone.verify(state, nodes_1N, depth_N, sees_NN).final_BND)[0]
    mine = [backbone.logits(output.final_BND)[0, -1], found_NV[0], found_NV[2]]
    for here, there in zip(mine, steps.logits, strict=False):
        assert torch.allclose(here.float(), there[0], atol=1e-5)  # generate returns float32


def read_prompt(backbone, prompt):
    """The prompt as `generate` would hand it over."""
    kept = {}

    def keep(model, input_ids, **given):
        kept.update({name: given[name] for name in IMAGE_INPUTS if given.get(name) is not None})
        return input_ids

    backbone.model.generate(**prompt, max_new_tokens=1, custom_generate=keep)
    with torch.no_grad():
        return read_with_images(backbone, prompt["input_ids"], kept, (), lambda output, plan: None)


@pytest.mark.parametrize("family", ["grounded", "dynamo"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_heads_read_images_or_refuse(models, name, family):
    model, prompt = models(name), image_prompt(name)
    layers = {"prefix_layers": 1} if family == "grounded" else {}
    own = token_heads(model, family, **layers)
    how = {"max_new_tokens": TOKENS, "do_sample": False, "custom_generate": heads.TreeDecoding(own)}
    if name.startswith("qwen"):
        with pytest.raises(ValueError, match="positions of several axes, which layers of heads do not follow"):
            model.generate(**prompt, **how)
        return
    assert torch.equal(model.generate(**prompt, **how), plain(model, prompt))


def test_what_is_not_read_is_a_sentence(models):
    model, prompt = models("llava"), image_prompt("llava")
    own = token_heads(model)
    with pytest.raises(ValueError, match="keep_caches=True was given for a prompt with images"):
        model.generate(**prompt, max_new_tokens=4, custom_generate=heads.TreeDecoding(own, keep_caches=True))
    two = {name: torch.cat([x, x]) for name, x in prompt.items()}
    with pytest.raises(ValueError, match="A prompt with images was given in 2 rows or with padding"):
        model.generate(**two, custom_generate=heads.TreeDecoding(own))
    with pytest.raises(ValueError, match="mm_encoder_outputs, which multi-token decoding does not hand"):
        model.generate(**prompt, custom_generate=heads.DynamicDecoding(token_heads(model, "medusa"), threshold=0.5))
