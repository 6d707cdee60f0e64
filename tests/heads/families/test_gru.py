"""Recurrent heads: the cell against PyTorch's, training against the plain form, and drafts deeper than head K."""

from __future__ import annotations

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, backbone_of, check_greedy, drafted, prefilled
from throwaway_families import make_heads
from tiny import random_tokens

import heads
from heads.families.gru import RESET_BIAS, UPDATE_BIAS, advance
from heads.interface.representation import RepresentationHeads
from heads.interface.token_heads import MAX_HEADS, TeacherForcing

CHAIN_OF_8 = [[0] * depth for depth in range(1, 9)]


def test_a_step_at_hand_is_pytorchs():
    cell = torch.nn.GRUCell(6, 6).double()
    inputs, hidden = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    found = advance(cell, torch.nn.functional.linear(inputs, cell.weight_ih, cell.bias_ih), hidden)
    torch.testing.assert_close(found, cell(inputs, hidden), rtol=0, atol=1e-14)  # float64, another order of sums


def test_training_gives_states_and_gradients_of_the_plain_form():
    """Rows differ a head and none is another's subset, as where a mask supervises every other token."""
    token_heads = make_heads("gru", backbone_of("llama"), num_heads=3)
    tokens_BT = random_tokens(2, 9, seed=8)
    f_BTD = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [torch.tensor([0, 3, 6, 9, 12]), torch.tensor([2, 4, 13]), torch.tensor([0, 1, 4, 12, 13])]
    batch = TeacherForcing(
        tokens_BT=tokens_BT, taps={"final": f_BTD}, positions_BT=torch.arange(9).expand(2, 9), mask=None, rows=rows
    )
    found = []
    for states in (token_heads.teacher_forced(batch), RepresentationHeads.heads_on(token_heads, f_BTD, batch)):
        hidden = torch.cat(list(states))
        loss = (hidden * torch.arange(hidden.numel(), dtype=torch.float64).view_as(hidden).cos()).sum()
        found.append([hidden, *torch.autograd.grad(loss, list(token_heads.cell.parameters()))])
    for fast, plain in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-10)  # float64 sums in another order


@pytest.mark.parametrize("name", ["llama", "codegen", "gemma"])
def test_untrained_heads_hand_the_backbones_state_on(name):
    """Squashed towards ±1 with each head, and the same for all tokens."""
    token_heads = heads.create("gru", backbone_of(name), num_heads=3).double()
    _, state = prefilled(token_heads, [random_tokens(6, seed=21).tolist()])
    r, z = torch.sigmoid(torch.tensor([RESET_BIAS, UPDATE_BIAS], dtype=torch.float64))
    wanted = state
    for hidden in drafted(token_heads, state, torch.tensor([[3, 4, 5]])):
        wanted = z * wanted + (1 - z) * torch.tanh(r * wanted)
        torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-12)
        assert torch.equal(hidden.sign(), state.sign())


@pytest.mark.parametrize(("unembedding", "deepest"), [("own", 4), ("shared", MAX_HEADS)])
def test_a_shared_unembedding_has_no_last_head(unembedding, deepest):
    token_heads = make_heads("gru", backbone_of("llama"), num_heads=4, unembedding=unembedding)
    assert token_heads.max_depth == deepest
    assert heads.TreeDecoding(token_heads).tree.depth <= 4, "deeper only where it is asked for"
    assert heads.TreeDecoding(token_heads, heads.DynamicTree(nodes=8)).tree.depth == 4
    if deepest > 4:
        assert heads.TreeDecoding(token_heads, CHAIN_OF_8).tree.depth == 8
        too_deep, said = [[0] * depth for depth in range(1, 34)], "33 deep but there are 4 heads that draft 32 deep"
    else:
        too_deep, said = CHAIN_OF_8, "8 deep but there are 4 heads; give paths of at most 4 ranks"
    with pytest.raises(ValueError, match=said):
        heads.TreeDecoding(token_heads, too_deep)


@pytest.mark.parametrize("tree", [CHAIN_OF_8, heads.DynamicTree(nodes=12, depth=8, width=2)])
def test_four_heads_draft_a_chain_of_eight(tree):
    token_heads = make_heads("gru", backbone_of("llama"), num_heads=4, seed=1, unembedding="shared")
    stats = check_greedy(token_heads, steps=60, tree=tree)
    assert len(stats.accepted_per_depth) == 8
    assert stats.accepted_per_depth[4] > 0, "nothing was accepted behind the last trained head"


def test_every_further_depth_is_one_more_step_of_the_cell():
    token_heads = make_heads("gru", backbone_of("llama"), num_heads=2, unembedding="shared")
    _, state = prefilled(token_heads, [random_tokens(6, seed=21).tolist()])
    path = random_tokens(1, 6, seed=22)
    with torch.no_grad():
        wanted = token_heads.head(6, state, path)
    torch.testing.assert_close(drafted(token_heads, state, path)[5], wanted, rtol=0, atol=DEFAULT_TOLERANCE)


def test_parameters_are_one_cells_whatever_the_number_of_heads():
    for num_heads in (1, 4):
        token_heads = heads.create("gru", backbone_of("llama"), num_heads=num_heads, unembedding="shared")
        assert sum(p.numel() for p in token_heads.parameters()) == 2 * 3 * 32 * (32 + 1)
