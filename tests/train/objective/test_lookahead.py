"""A first layer that sees one token ahead: what reaches what, and how it is sampled."""

import pytest
import torch
from joint_model import TOLERANCE, a_batch, backbone_gradients
from tiny import random_tokens, tiny_model

from heads.backbone.model import Backbone
from train.objective.model import TrainedModel


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mistral_windowed", "gemma3"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_position_reads_the_next_token_if_it_sees_ahead_and_never_the_second_next(architecture, attn, share):
    backbone = Backbone(tiny_model(architecture, attn=attn))
    model = TrainedModel(backbone, None, label_shift=2, lookahead=share)
    length, first_of_second = 10, 6
    documents = (torch.arange(length) >= first_of_second).long()[None]
    tokens = random_tokens(1, length, seed=6)

    def final_states(tokens):
        with torch.no_grad():
            return model.backbone_states(tokens, torch.ones_like(tokens).bool(), documents).final_BTD[0]

    before = final_states(tokens)
    for changed_at in range(1, length):
        other = tokens.clone()
        other[0, changed_at] = 3 + (tokens[0, changed_at] - 2) % 20
        differs = (final_states(other) - before).abs().amax(dim=1) > 1e-9
        start = 0 if changed_at < first_of_second else first_of_second
        inside = torch.arange(length) < (first_of_second if changed_at < first_of_second else length)
        first_reader = max(start, changed_at - (1 if share else 0))
        reads = inside & (torch.arange(length) >= first_reader)
        assert not bool(differs[~reads].any()), f"x_{changed_at} reaches {differs.nonzero().flatten().tolist()}"
        assert bool(differs[first_reader]), f"x_{changed_at} does not reach {first_reader}"


def test_the_share_that_sees_ahead_is_drawn_anew_at_every_forward():
    model = TrainedModel(Backbone(tiny_model("llama")), None, label_shift=2, lookahead=0.5)
    torch.manual_seed(0)
    with torch.no_grad():
        sums = {model(**a_batch())["loss"].item() for _ in range(4)}
    assert len(sums) == 4


def test_recomputation_in_backward_sees_the_same_tokens():
    gradients = []
    for recomputed in (False, True):
        hf = tiny_model("llama")
        if recomputed:
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = TrainedModel(Backbone(hf), None, label_shift=2, lookahead=0.5).train()
        torch.manual_seed(0)
        model(**a_batch())["loss"].backward()
        gradients.append(backbone_gradients(model))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
