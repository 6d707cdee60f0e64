"""What `mtp` heads say of themselves, and that modules are trained: steps, starts, depths."""

from __future__ import annotations

import pytest
import torch
from family_checks import backbone_of, check_greedy, drafted, prefilled
from mtp_checkpoints import model_with_modules, write_model
from throwaway_families import fit, make_heads
from tiny import ARCHITECTURES, random_tokens

import heads
from heads.backbone.model import Backbone
from heads.export.exporting import export_heads, import_heads


@pytest.mark.parametrize("modules", ["one", "per_head"])
def test_parameters_are_those_of_as_many_modules(modules):
    backbone = backbone_of("llama")
    token_heads = heads.create("mtp", backbone, num_heads=3, modules=modules)
    width = backbone.hidden_size
    of_layer = sum(parameter.numel() for parameter in backbone.layers[-1].parameters())
    wanted = (of_layer + 2 * width * width + 3 * width) * (1 if modules == "one" else 3)
    assert sum(parameter.numel() for parameter in token_heads.parameters()) == wanted


@pytest.mark.parametrize("modules", ["one", "per_head"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_generates(name, modules):
    if name in ("llama", "codegen") or modules == "one":
        check_greedy(make_heads("mtp", backbone_of(name), modules=modules), steps=4)


def test_one_module_drafts_deeper_than_its_heads():
    """A tree of depth five for two heads: the steps beyond are the same module's."""
    token_heads = make_heads("mtp", backbone_of("llama"), num_heads=2)
    assert token_heads.max_depth > 5
    deeper = make_heads("mtp", backbone_of("llama"), num_heads=5)
    deeper.load_state_dict(token_heads.state_dict())
    following = random_tokens(1, 5, seed=3)
    prompt = [random_tokens(7, seed=4).tolist()]
    for one, other in zip(
        drafted(token_heads, prefilled(token_heads, prompt)[1], following),
        drafted(deeper, prefilled(deeper, prompt)[1], following),
        strict=True,
    ):
        assert torch.equal(one, other)
    model = token_heads.backbone.model
    prompts, settings = random_tokens(1, 6, seed=5), {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    decoding = heads.TreeDecoding(token_heads, tree=[[0] * depth for depth in range(1, 6)])
    found = model.generate(prompts, custom_generate=decoding, **settings)
    assert torch.equal(found, model.generate(prompts, **settings))


def test_modules_per_head_go_no_deeper():
    token_heads = heads.create("mtp", backbone_of("llama"), num_heads=2, modules="per_head")
    assert token_heads.max_depth == 2
    with pytest.raises(ValueError, match=r"depth|deep"):
        heads.TreeDecoding(token_heads, tree=[[0], [0, 0], [0, 0, 0]])


def test_released_modules_are_trained_further_and_written_back(tmp_path):
    """Import, fit to the model's own text, write back, import: fewer passes, and the same heads again."""
    model, modules = model_with_modules("glm4_moe")
    folder = write_model(tmp_path / "model", "glm4_moe", model, modules)
    token_heads = import_heads(folder, Backbone(model))
    prompts = torch.cat([random_tokens(1, 5, seed=seed) for seed in range(50, 54)])
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}

    def passes(of):
        out = model.generate(prompts[:1], custom_generate=heads.TreeDecoding(of), **settings)
        assert torch.equal(out.sequences, model.generate(prompts[:1], **settings).sequences)
        return out.stats.passes

    before = passes(token_heads)
    first = fit(token_heads, prompts, steps=1)
    assert fit(token_heads, prompts, steps=40) < 0.5 * first
    assert passes(token_heads) < before
    export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    again = import_heads(tmp_path / "out", model)
    assert passes(again) == passes(token_heads)


@pytest.mark.parametrize("start", ["copied", "random"])
def test_a_new_module_passes_the_state_and_no_token(start):
    backbone = backbone_of("qwen3")
    token_heads = heads.create("mtp", backbone, start=start)
    module, last = token_heads.layers[0], backbone.layers[-1]
    width = backbone.hidden_size
    assert module.eh_proj.weight[:, :width].abs().sum() == 0
    assert torch.equal(module.eh_proj.weight[:, width:], torch.eye(width, dtype=torch.float64))
    assert torch.equal(module.post_norm.weight, backbone.norm.weight)
    copied = torch.equal(module.mtp_block.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert copied == (start == "copied")
