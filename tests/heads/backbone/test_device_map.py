"""Backbones that accelerate has spread: heads live where the backbone ends, caches where their layers are.

Two kinds of device in one process are needed to see a wrong one, so the tests that show most need an accelerator; on a
CPU alone it is shown that hooked modules work, that heads' own layers carry no hooks, and that offloading is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from throwaway_families import FAMILIES, make_heads
from tiny import PAD, left_padded, random_tokens, tiny_model

import heads
from heads.backbone.model import Backbone

NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
TREE = heads.Tree([[0], [0, 0], [0, 1], [1]])
ENDS = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]


def device_map(first: Any, second: Any, *, split_end: bool = False) -> dict[str, Any]:
    """Embeddings and a layer on one device, two layers, norm and unembedding on the other."""
    ends = dict(zip(ENDS, (first, first, second, first if split_end else second), strict=True))
    return ends | {"model.layers.0": first, "model.layers.1": second, "model.layers.2": second}


def same_text(model: Any, family: str, token_heads: Any, device: Any) -> None:
    tokens, mask = left_padded([random_tokens(n, seed=n).tolist() for n in (3, 9)])
    asked = {"attention_mask": mask.to(device), "max_new_tokens": 12, **NO_EOS}
    plain = model.generate(tokens.to(device), **asked)
    ours = model.generate(tokens.to(device), custom_generate=heads.TreeDecoding(token_heads, TREE), **asked)
    assert torch.equal(ours, plain)
    sampled = {"repetition_penalty": 1.3, **asked}
    plain = model.generate(tokens.to(device), **sampled)
    ours = model.generate(tokens.to(device), custom_generate=heads.TreeDecoding(token_heads, TREE), **sampled)
    assert torch.equal(ours, plain)
    sampled = {**asked, "do_sample": True, "top_k": 1}  # whatever is drawn
    plain = model.generate(tokens.to(device), **asked)
    rejection = heads.TreeDecoding(token_heads, TREE, rule="rejection")
    assert torch.equal(model.generate(tokens.to(device), custom_generate=rejection, **sampled), plain)
    if not token_heads.grounded:
        whole = make_heads(family, Backbone(tiny_model("llama", attn="sdpa")))
        asked |= {"repetition_penalty": 1.1}
        ours = model.generate(tokens.to(device), custom_generate=heads.DynamicDecoding(token_heads, 0.3), **asked)
        asked["attention_mask"] = mask
        lossy = heads.DynamicDecoding(whole, 0.3)
        assert torch.equal(ours.cpu(), whole.backbone.model.generate(tokens, custom_generate=lossy, **asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backbone_with_hooks_on_its_modules(family):
    model = tiny_model("llama", attn="sdpa")
    dispatch_model(model, device_map("cpu", "cpu"), force_hooks=True)
    assert hasattr(model.model.layers[1], "_hf_hook")
    token_heads = make_heads(family, Backbone(model))
    same_text(model, family, token_heads, "cpu")


def test_heads_own_layers_carry_no_hooks():
    """A copied hook would take the layer's tensors to the device of the layer it was copied from."""
    model = tiny_model("llama", attn="sdpa")
    dispatch_model(model, device_map("cpu", "cpu"), force_hooks=True)
    token_heads = make_heads("dynamo", Backbone(model))
    assert not [name for name, module in token_heads.named_modules() if hasattr(module, "_hf_hook")]


def test_weights_offloaded_to_disk_are_refused(tmp_path):
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32)
    dispatch_model(model, device_map("cpu", "cpu") | {"model.layers.1": "disk"}, offload_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"offloads model\.layers\.1 to disk"):
        Backbone(model)


def spread(first: Any, second: Any, family: str, *, split_end: bool) -> None:
    model = tiny_model("llama", attn="sdpa")
    dispatch_model(model, device_map(first, second, split_end=split_end), main_device=first)
    backbone = Backbone(model)
    assert backbone.heads_device == model.lm_head.weight.device
    token_heads = make_heads(family, backbone).to(backbone.heads_device)
    tokens = random_tokens(1, 6).to(first)
    with torch.no_grad():
        state, _ = backbone.read(tokens, torch.ones_like(tokens).bool(), chunk=4)
    found = [layer.keys.device for layer in state.cache.layers]
    assert found == [next(layer.parameters()).device for layer in backbone.layers]
    assert len(set(found)) == 2
    same_text(model, family, token_heads, first)


@pytest.mark.cuda
@pytest.mark.parametrize("split_end", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_backbone_over_a_cpu_and_an_accelerator(family, split_end):
    spread("cpu", "cuda:0", family, split_end=split_end)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two accelerators in this machine")
@pytest.mark.parametrize("split_end", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_backbone_over_two_accelerators(family, split_end):
    spread("cuda:0", "cuda:1", family, split_end=split_end)
