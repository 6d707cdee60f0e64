"""Noise and drafted tokens in training: what heads are given, where labels stay true, what is refused."""

import pytest
import torch
from test_model import a_batch, build
from torch.nn import functional as F  # noqa: N812

from heads.projection import Projection
from train.drafted_tokens import DraftedTokens
from train.loss_config import LossConfig
from train.noise import add_noise


def test_noise_is_uniform_and_as_large_as_the_state():
    states = torch.randn(1, 50, 400, generator=torch.Generator().manual_seed(0)) * 7
    noise = add_noise(states, 0.5, torch.Generator().manual_seed(1)) - states
    unit = noise / states.square().mean(dim=-1, keepdim=True).sqrt()
    assert 0.499 < unit.max() <= 0.5 + 1e-5
    assert -0.5 - 1e-5 <= unit.min() < -0.499
    assert unit.std() == pytest.approx(0.5 / 3**0.5, rel=0.02)  # 20,000 draws


def test_heads_read_noise_in_training_alone_and_targets_have_none():
    batch = a_batch()
    model = build("medusa", noise=0.3, loss=LossConfig(regression=1.0))
    clean = build("medusa", loss=LossConfig(regression=1.0))

    def seen(model):
        torch.manual_seed(5)
        (first, second) = model.objectives(*batch.values(), with_backbone=False)
        return first.hidden_RD, first.backbone_states(), second.backbone_states()

    noisy, still, without = seen(model.train()), seen(model.eval()), seen(clean.train())
    assert not torch.allclose(noisy[0], without[0])
    assert torch.equal(still[0], without[0])
    assert torch.equal(noisy[1], without[1])
    assert torch.equal(noisy[2], without[2])
    assert torch.equal(seen(model.train())[0], noisy[0])  # the global generator's draws


@pytest.mark.parametrize("family", ["grounded", "gru"])
def test_heads_read_what_the_backbone_and_the_head_before_propose(family):
    """All tokens drafted, row by row: y_1 of the backbone at t, y_2 of head 1 having read y_1; labels are true."""
    model, batch = build(family, drafted_tokens=1.0), a_batch()
    batch["loss_mask"] = torch.ones_like(batch["loss_mask"])  # every row of head 2 is one of head 1
    heads, tokens = model.token_heads, batch["input_ids"].flatten()
    states, _ = model.teacher_forcing(*batch.values())
    with torch.no_grad():
        final = states.taps["final"].flatten(0, 1)
        first = model.backbone.logits(final).argmax(dim=1)
        sums = []
        for k in (1, 2):
            rows = states.rows[k - 1]
            drafted = [first[rows]]
            if k == 2:
                hidden = heads.head(1, final[rows], first[rows][:, None])
                drafted.append(heads.projection(1)(hidden).argmax(dim=1))
            logits = heads.projection(k)(heads.head(k, final[rows], torch.stack(drafted, dim=1)))
            sums.append(F.cross_entropy(logits, tokens[rows + k + 1], reduction="sum").item())
        found = model(**batch)["loss_sums_K"].tolist()
        true = model(**batch, progress=0.0)["loss_sums_K"].tolist()
    assert found == pytest.approx(sums, rel=1e-6)  # float32 running sums
    assert true == pytest.approx(build(family)(**batch)["loss_sums_K"].tolist(), rel=1e-9)
    assert abs(true[1] - found[1]) > 1e-3


@pytest.mark.parametrize("family", ["grounded", "gru"])
def test_rows_whose_head_before_has_no_label_read_the_true_token_there(family):
    """With masked labels head 1 proposes at fewer rows than head 2 reads at; each depth of a row is drafted or true."""
    model, batch = build(family, drafted_tokens=1.0), a_batch()
    heads, tokens = model.token_heads, batch["input_ids"].flatten()
    states, _ = model.teacher_forcing(*batch.values())
    alone = ~torch.isin(states.rows[1], states.rows[0])
    assert 0 < alone.sum() < len(alone)
    with torch.no_grad():
        *_, second = model.objectives(*batch.values(), with_backbone=False, drafted_share=1.0)
        final = states.taps["final"].flatten(0, 1)
        proposed = model.backbone.logits(final).argmax(dim=1)
        first_R = torch.where(
            torch.isin(second.rows_R, states.rows[0]), proposed[second.rows_R], tokens[second.rows_R + 1]
        )
        hidden_RD = heads.head(1, final[second.rows_R], first_R[:, None])
        drafts_R = heads.projection(1)(hidden_RD).argmax(dim=1)
        second_R = torch.where(alone, tokens[second.rows_R + 2], drafts_R)
        wanted_RD = heads.head(2, final[second.rows_R], torch.stack([first_R, second_R], dim=1))
    torch.testing.assert_close(second.hidden_RD.detach(), wanted_RD, rtol=0, atol=1e-12)


def test_a_share_of_the_tokens_is_drafted():
    tokens = torch.arange(20_000).view(2, -1)
    drafted = DraftedTokens(tokens, 0.3, torch.Generator().manual_seed(0))
    rows = torch.arange(9_000)
    weight = torch.tensor([[0.0], [1.0]])  # token 1 is the best of all rows
    drafted.put(2, rows, Projection(weight=weight), torch.ones(len(rows), 1))
    changed = drafted[2] != tokens.flatten().roll(-2)
    assert changed[:9_000].float().mean() == pytest.approx(0.3, abs=0.02)  # 4 standard deviations of 9,000 draws
    assert not changed[9_000:].any()


def test_heads_that_read_no_drafted_tokens_are_refused():
    with pytest.raises(ValueError, match=r"drafted_tokens=0\.5 was given for heads that read no drafted tokens"):
        build("medusa", drafted_tokens=0.5)


def test_a_family_that_reads_the_true_tokens_elsewhere_is_refused():
    model = build("grounded", drafted_tokens=0.5)
    heads = model.token_heads

    def at_once(batch):
        for k, rows in enumerate(batch.rows, start=1):
            tokens = torch.stack([batch.tokens_BT.flatten()[rows + ahead] for ahead in range(1, k + 1)], dim=1)
            yield heads.head(k, batch.tap("final", rows), tokens)

    heads.teacher_forced = at_once
    with pytest.raises(ValueError, match="grounded heads, which read the true tokens all at once"):
        model(**a_batch())


def test_drafts_are_made_of_stored_states_too():
    model = build("grounded", drafted_tokens=1.0)
    batch = a_batch()
    with torch.no_grad():
        stored = model.hidden_states(batch["input_ids"], batch["document_ids"])
        live, read = model(**batch), model(**batch, hidden_states=stored)
    assert read["loss"].item() == pytest.approx(live["loss"].item(), rel=1e-9)
