"""MLP speculator heads: training's fast form, what is shared, and a state of another width than the backbone's."""

from __future__ import annotations

import pytest
import torch
from family_checks import backbone_of, check_greedy
from throwaway_families import make_heads
from tiny import random_tokens

import heads
from heads.interface.representation import PositionWiseHeads
from heads.interface.token_heads import TeacherForcing
from train.objective.losses import smooth_l1


@pytest.mark.parametrize("tied", [False, True])
def test_training_gives_states_and_gradients_of_the_plain_form(tied):
    """Rows differ a head, as where a mask supervises every other token."""
    options = {"inner_width": 20, "tie_weights": tied, "scale_input": tied}
    token_heads = make_heads("mlp_speculator", backbone_of("llama"), num_heads=3, **options)
    tokens_BT = random_tokens(2, 9, seed=8)
    f_BTD = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [torch.tensor([0, 3, 6, 9, 12]), torch.tensor([2, 4, 13]), torch.tensor([0, 1, 4, 12, 13])]
    batch = TeacherForcing(
        tokens_BT=tokens_BT, taps={"final": f_BTD}, positions_BT=torch.arange(9).expand(2, 9), mask=None, rows=rows
    )
    used = [p for name, p in token_heads.named_parameters() if not name.startswith("unembeddings")]
    found = []
    for states in (token_heads.teacher_forced(batch), PositionWiseHeads.teacher_forced(token_heads, batch)):
        hidden = torch.cat(list(states))
        loss = (hidden * torch.arange(hidden.numel(), dtype=torch.float64).view_as(hidden).cos()).sum()
        found.append([hidden, *torch.autograd.grad(loss, used)])
    for fast, plain in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-10)  # float64 sums in another order


def test_tied_heads_share_all_but_the_first_transition():
    backbone, width, vocab = backbone_of("llama"), 20, 29
    count = {
        tied: sum(
            p.numel()
            for p in heads.create(
                "mlp_speculator", backbone, num_heads=4, inner_width=width, tie_weights=tied
            ).parameters()
        )
        for tied in (False, True)
    }
    one = 2 * vocab * width + 2 * width
    assert count == {
        False: 4 * one + width * 32 + 3 * width * width,
        True: one + width * 32 + width * width,
    }


@pytest.mark.parametrize("name", ["llama", "cohere", "gpt_neox"])
def test_greedy_decoding_is_the_backbones_own(name):
    assert check_greedy(make_heads("mlp_speculator", backbone_of(name), inner_width=20)).tokens_per_pass > 1


def test_hidden_states_of_another_width_are_no_targets():
    with pytest.raises(ValueError, match="width 20, and the backbone's have 32"):
        smooth_l1(torch.zeros(3, 20), torch.zeros(3, 32))
