"""Grounded heads: levels against `head` on whole paths, and every ablation of the paper's figures 5 to 7."""

from __future__ import annotations

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, backbone_of, check_greedy, drafted, prefilled, teacher_forced
from throwaway_families import make_heads
from tiny import random_tokens, shared_model, tiny_model

import heads
from heads.backbone.model import Backbone
from heads.families import build_config
from heads.interface.representation import PositionWiseHeads
from train.objective.model import TrainedModel


@pytest.mark.parametrize("normalize", [True, False])
def test_levels_give_what_the_head_gives_on_whole_paths(normalize):
    token_heads = heads.create("grounded", shared_model("llama"), num_heads=3, normalize_embeddings=normalize).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    state = torch.randn(2, 32, generator=generator, dtype=torch.float64)
    parents = [torch.tensor([0, 1]), torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1, 1])]
    fast, plain = token_heads.first_level(state), PositionWiseHeads.first_level(token_heads, state)
    for k, parents_M in enumerate(parents, start=1):
        tokens_M = random_tokens(len(parents_M), seed=k)
        hidden_MD, fast = token_heads.step(k, fast, tokens_M, parents_M)
        expected_MD, plain = PositionWiseHeads.step(token_heads, k, plain, tokens_M, parents_M)
        assert torch.equal(hidden_MD, expected_MD)  # the same operations on the same numbers


@pytest.mark.parametrize("family", ["grounded", "gru"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_offset_reads_hugging_faces_hidden_state(family, offset, name, raw):
    """Hydra counts hidden_states[-(offset + 1)]; the last entry has the norm already. Three layers: 3 is embeddings."""
    backbone = backbone_of(name)
    token_heads = make_heads(family, backbone, hidden_offset=offset, raw_hidden_states=raw)
    tokens = random_tokens(7, seed=31)
    _, state = prefilled(token_heads, [tokens.tolist()])
    with torch.no_grad():
        states = backbone.model(input_ids=tokens[None], output_hidden_states=True, use_cache=False).hidden_states
        wanted = states[-1 - offset][:, -1]
        wanted = backbone.norm(wanted) if offset and not raw else wanted
    torch.testing.assert_close(token_heads.first_level(state), wanted, rtol=0, atol=DEFAULT_TOLERANCE)


@pytest.mark.parametrize("family", ["grounded", "gru"])
@pytest.mark.parametrize(
    ("name", "raw"), [("llama", False), ("gemma3", False), ("mistral_windowed", False), ("llama", True)]
)
def test_teacher_forcing_at_an_offset_equals_drafting(family, name, raw):
    token_heads = make_heads(family, backbone_of(name), num_heads=2, hidden_offset=2, raw_hidden_states=raw)
    check_every_position(token_heads)


def check_every_position(token_heads):
    """Two packed documents; every position against a prefill of its document up to there."""
    tokens_BT = random_tokens(1, 13, seed=11)
    states = teacher_forced(token_heads, tokens_BT, torch.tensor([[0] * 5 + [1] * 8]))
    for k, head in enumerate(states):
        assert head
        for (b, t), wanted in head.items():
            document = tokens_BT[b, (5 if t >= 5 else 0) : t + 1].tolist()
            following = tokens_BT[b : b + 1, t + 1 : t + 2 + k]
            found = drafted(token_heads, prefilled(token_heads, [document])[1], following)
            assert (found[k][0] - wanted).abs().max() < DEFAULT_TOLERANCE


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_every_depth_starts_as_what_it_reads(layers, offset):
    """Figure 5. With an offset it starts as the backbone would if it ended there."""
    backbone = backbone_of("llama")
    token_heads = heads.create(
        "grounded", backbone, num_heads=2, num_hidden_layers=layers, hidden_offset=offset, unembedding="shared"
    ).double()
    assert [len(body.rest) for body in token_heads.bodies] == [layers - 1, layers - 1]
    tokens = random_tokens(6, seed=21)
    found = drafted(token_heads, prefilled(token_heads, [tokens.tolist()])[1], torch.tensor([[3, 4]]))
    with torch.no_grad():
        _, taps = backbone.forward(tokens[None], taps=[offset], use_cache=False)
        wanted = backbone.projection(taps[offset][:, -1])
        for k in (1, 2):
            torch.testing.assert_close(
                token_heads.projection(k)(found[k - 1]), wanted, rtol=0, atol=DEFAULT_TOLERANCE * 100
            )


@pytest.mark.parametrize("family", ["grounded", "gru"])
@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_what_flows_into_the_final_norm_passes_the_gate(family, scale):
    """Of a backbone that is trained: an inner tap's heads reach the norm, and its weights' gradient is scaled."""
    gradients = []
    for gradient_scale in (1.0, scale):
        model = tiny_model("llama")
        token_heads = make_heads(family, Backbone(model), num_heads=1, hidden_offset=1)
        trained = TrainedModel(token_heads.backbone, token_heads, trains_backbone=True, gradient_scale=gradient_scale)
        tokens = random_tokens(2, 9, seed=4)
        ones, zeros = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
        (found,) = trained.head_rows(trained.backbone_states(tokens, ones, zeros), with_backbone=False)
        found.hidden_RD.pow(2).sum().backward()
        norm = token_heads.backbone.norm.weight.grad
        gradients.append(torch.zeros(32).double() if norm is None else norm)
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0] * scale)


def test_a_frozen_norm_gets_no_gradient():
    model = tiny_model("llama")
    token_heads = make_heads("grounded", Backbone(model), num_heads=1, hidden_offset=1)
    trained = TrainedModel(token_heads.backbone, token_heads)
    tokens = random_tokens(2, 9, seed=4)
    trained(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens))["loss"].backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in token_heads.parameters())


@pytest.mark.parametrize("family", ["grounded", "gru"])
def test_heads_of_another_dtype_read_an_inner_tap(family):
    """Heads train in float32 on a bfloat16 backbone; a LayerNorm refuses inputs of another dtype than its weights."""
    backbone = Backbone(tiny_model("gpt2", attn="sdpa", dtype=torch.bfloat16))
    token_heads = heads.create(family, backbone, num_heads=1, hidden_offset=1).float()
    trained = TrainedModel(backbone, token_heads)
    tokens = random_tokens(2, 9, seed=4)
    out = trained(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens))
    assert torch.isfinite(out["loss"])


@pytest.mark.parametrize("more", [{}, {"raw_hidden_states": True}, {"raw_hidden_states": True, "prefix_layers": 1}])
@pytest.mark.parametrize("family", ["grounded", "gru"])
def test_greedy_decoding_at_an_offset_is_the_backbones_own(family, more):
    fields = {"hidden_offset": 1, "unembedding": "shared", **more}
    check_greedy(make_heads(family, backbone_of("llama"), num_heads=3, seed=1, **fields))


@pytest.mark.parametrize("family", ["grounded", "gru"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"hidden_offset": -1},
            "hidden_offset=-1 was given; allowed are integers of at least 0; at most the backbone's number of layers",
        ),
        ({"unembedding": "mine"}, "unembedding='mine' was given; allowed are 'own' and 'shared'"),
    ],
)
def test_fields_that_cannot_be_built_are_refused(family, config, said):
    with pytest.raises(ValueError, match=said):
        build_config(family, **config)


@pytest.mark.parametrize("family", ["grounded", "gru"])
def test_an_offset_ends_at_the_embeddings(family):
    assert heads.create(family, backbone_of("llama"), hidden_offset=3).hidden_taps == (3,)
    with pytest.raises(ValueError, match=r"hidden_offset=4 was given; .* has 3 layers: allowed are 0 to 3"):
        heads.create(family, backbone_of("llama"), hidden_offset=4)
