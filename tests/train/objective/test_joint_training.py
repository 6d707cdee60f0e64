"""Backbone and heads trained together: the gradient gate by another route, and what training heads leaves alone."""

import pytest
import torch
from joint_model import COUNT, SCALE, TOLERANCE, a_batch, apart, backbone_gradients, build, joint
from tiny import tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.loop.optimizer_groups import optimizer_groups
from train.loop.overhead import measure_heads_overhead
from train.objective.losses import weighted_loss
from train.objective.model import TrainedModel

# llama and gpt_neox have an unembedding of their own, qwen3 has it tied to its embedding.
CASES = [
    ("llama", "dynamo", {}),
    ("gpt_neox", "dynamo", {}),
    ("qwen3", "dynamo", {}),
    ("llama", "dynamo", {"tap": "last"}),
    ("llama", "dynamo", {"unembedding": "own", "layers_per_head": 2}),
    ("llama", "dynamo", {"lora_rank": 2}),
    ("gpt_neox", "dynamo", {"lora_rank": 2}),
    ("llama", "grounded", {"unembedding": "shared"}),
    ("qwen3", "grounded", {"unembedding": "shared"}),
    ("qwen3", "medusa", {}),
]


@pytest.mark.parametrize(("architecture", "family", "config"), CASES)
def test_a_gradient_is_the_first_tokens_plus_the_scaled_rest(architecture, family, config):
    """g = g_1 + (LR_MB / LR_B) · (g_2 + g_3), for every parameter of the backbone, whichever way gradients flow."""
    first, *others = apart(architecture, family, **config)
    assert any(g.abs().max() > 0.1 for g in others[0].values())
    for scale in (SCALE, 0.0, 1.0):
        found = joint(scale, architecture, family, **config)
        for name, gradient in found.items():
            wanted = first[name] + scale * sum(g[name] for g in others)
            torch.testing.assert_close(gradient, wanted, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def last_layer(name, model="llama"):
    return ".layers.2." in name if model == "llama" else ".layers.3." in name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_which_parts_of_the_backbone_learn_from_heads(architecture):
    """The last layer belongs to the first token alone; stem, norm and unembedding learn from all."""
    _, *others = apart(architecture, "dynamo")
    for name, gradient in others[0].items():
        assert bool(gradient.any()) != last_layer(name, architecture), name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_at_scale_0_the_backbone_is_trained_as_if_alone(architecture):
    alone = build(architecture, None)
    alone(**a_batch(), counts_K=torch.full((1,), COUNT))["loss"].backward()
    wanted = backbone_gradients(alone)
    for name, gradient in joint(0.0, architecture, "dynamo").items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_steps_at_scale_0_leave_the_backbone_as_training_alone_does(architecture):
    models = [build(architecture, "dynamo", gradient_scale=0.0), build(architecture, None)]
    for model in models:
        groups = optimizer_groups(model, heads_rate=1e-2, base_rate=1e-3, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups)
        for _ in range(3):
            model(**a_batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    start = build(architecture, None).model.state_dict()
    trained, alone = (model.model.state_dict() for model in models)
    assert any(not torch.equal(start[name], tensor) for name, tensor in alone.items())
    for name, tensor in alone.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}, {"start": "copied", "layers_per_head": 2}])
def test_gradient_checkpointing_changes_no_gradient(config):
    """Layers of heads are copies of the backbone's and recompute themselves in backward too."""
    wanted = joint(SCALE, "llama", "dynamo", **config)
    model = build("llama", "dynamo", gradient_scale=SCALE, heads=config)
    fresh = tiny_model("llama", attn="eager")
    fresh.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    token_heads = create("dynamo", Backbone(fresh), num_heads=2, **config).double()
    token_heads.load_state_dict(model.token_heads.state_dict())
    recomputed = TrainedModel(token_heads.backbone, token_heads, trains_backbone=True, gradient_scale=SCALE).train()
    recomputed(**a_batch(), counts_K=torch.full((3,), COUNT))["loss"].backward()
    for name, gradient in backbone_gradients(recomputed).items():
        torch.testing.assert_close(gradient, wanted[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_measuring_what_heads_add_leaves_nothing_behind():
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    measure_heads_overhead(model, a_batch(), repeats=1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_what_heads_add_is_timed_in_one_call_of_the_loss(monkeypatch):
    """As a training step calls it, with all heads at once: those that share an unembedding make one pass.

    By a clock on which the backbone's loss takes 4 seconds, each head 1 more, and the first step of each kind far more.
    """
    now, calls = [0.0], []

    def timed_loss(rows, chunk_elements=None):
        rows = list(rows)
        calls.append([one.head for one in rows])
        now[0] += 3.0 + len(rows) + (100.0 * len(rows) if len(calls) <= 2 else 0.0)
        return weighted_loss(rows, chunk_elements)

    monkeypatch.setattr("train.loop.overhead.weighted_loss", timed_loss)
    monkeypatch.setattr("train.loop.overhead.read_clock", lambda device: now[0])
    assert measure_heads_overhead(build().train(), a_batch(), repeats=2) == (6 - 4) / 4
    assert calls == [[0], [0, 1, 2]] * 3
