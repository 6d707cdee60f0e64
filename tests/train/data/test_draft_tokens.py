"""Training heads with a draft vocabulary: its loss by another route, what is counted and chosen, whole runs."""

from __future__ import annotations

import json

import datasets
import pytest
import torch
from head_losses import head_rows
from throwaway_families import make_heads
from tiny import VOCAB, random_tokens, tiny_model
from tiny_run import prepare, tensors, train, write_config
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

import heads
from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.backbone.model import Backbone
from train.config import read_config
from train.data import draft_tokens
from train.data.draft_tokens import count_tokens, settle_draft_vocabulary
from train.objective.model import TrainedModel
from train.objective.targets import scored_rows
from train.objective.weights import LossConfig
from train.plan.plan import make_plan

FEW = list(range(3, 20, 2))


def build(family="grounded", unembedding="own", **settings):
    backbone = Backbone(tiny_model("llama", attn="eager"))
    token_heads = make_heads(family, backbone, num_heads=2, unembedding=unembedding, draft_tokens=FEW)
    return TrainedModel(backbone, token_heads.train(), **settings)


def a_batch():
    generator = torch.Generator().manual_seed(2)
    return {
        "input_ids": random_tokens(6, 12, seed=2, vocab=20),
        "loss_mask": torch.rand(6, 12, generator=generator) > 0.3,
        "document_ids": (torch.arange(12) >= 7).long().expand(6, 12),
    }


def plain_loss(model, batch):
    """Each head's full-vocabulary row by row: tokens that are not scored are forbidden, labels among them left out."""
    total, counts = 0.0, []
    forbidden = torch.ones(VOCAB, dtype=torch.bool)
    forbidden[FEW] = False
    for rows in head_rows(model, batch, with_backbone=False):
        logits_RS = rows.projection(rows.hidden_RD)
        logits_RV = logits_RS.new_full((len(logits_RS), VOCAB), -torch.inf)
        logits_RV[:, FEW] = logits_RS
        losses = []
        for r, row in enumerate(rows.rows_R.tolist()):
            label = batch["input_ids"].flatten()[row + rows.shift]
            if not forbidden[label]:
                losses.append(F.cross_entropy(logits_RV[r], label))
        assert 3 < len(losses) < len(rows.rows_R)
        total = total + torch.stack(losses).mean()
        counts.append(len(losses))
    return total, counts


@pytest.mark.parametrize("unembedding", ["own", "shared"])
@pytest.mark.parametrize("family", ["grounded", "medusa", "eagle", "dynamo"])
def test_loss_and_gradients_are_those_of_a_plain_loop(family, unembedding):
    model, batch = build(family, unembedding), a_batch()
    out = model(**batch)
    out["loss"].backward()
    plain = build(family, unembedding)
    wanted, counts = plain_loss(plain, batch)
    wanted.backward()
    assert model.count_labels(*batch.values()).tolist() == counts
    # float64 but for the float32 running sum of the chunked loss.
    assert out["loss"].item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, p), q in zip(model.token_heads.named_parameters(), plain.token_heads.parameters(), strict=True):
        # The factor 1 / labels is float32, 6e-8 off, and gradients add up terms of some units that cancel.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    assert all(p.grad is None for p in model.model.parameters())


@pytest.mark.parametrize("top_n", [None, 3])
@pytest.mark.parametrize("trains_backbone", [False, True])
@pytest.mark.parametrize(("family", "unembedding"), [("grounded", "own"), ("grounded", "shared"), ("dynamo", "own")])
def test_a_teacher_is_restricted_to_the_scored_tokens(family, unembedding, trains_backbone, top_n):
    """Its whole distribution, of which the scored tokens are kept and made to sum to 1; states at scored rows alone."""
    if trains_backbone and unembedding == "shared":
        pytest.skip("refused: the rows would have to follow the backbone's")
    teaching = LossConfig(hard=0.5, soft=2.0, divergence="kl", temperature=1.5, top_n=top_n, regression=0.7)
    model, plain = (build(family, unembedding, loss=teaching, trains_backbone=trains_backbone) for _ in range(2))
    batch = a_batch()
    out = model(**batch)
    out["loss"].backward()
    wanted, seen = 0.0, []
    states = plain.backbone_states(*batch.values())
    final = states.final_BTD.flatten(0, 1)
    for rows in plain.head_rows(states, with_backbone=True):
        if rows.head == 0:
            if trains_backbone:
                labels = batch["input_ids"].flatten()[rows.rows_R + 1]
                wanted = F.cross_entropy(rows.projection(rows.hidden_RD), labels)
            continue
        sums = plain_teaching(rows, final.detach(), plain.backbone.logits, batch["input_ids"], teaching)
        seen.append(sums.tolist())
        wanted = wanted + (sums * torch.tensor([0.5, 2.0 * 1.5**2, 0.7])).sum()
    wanted.backward()
    counts = model.counts_of_logged(model.count_labels(*batch.values()))
    found = (out["logged_sums_M"] / counts)[trains_backbone:].view(3, 2).T
    torch.testing.assert_close(found.double(), torch.tensor(seen).double(), rtol=1e-5, atol=1e-6)
    assert out["loss"].item() == pytest.approx(wanted.item(), rel=1e-6)  # float32 running sums
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:  # norms and softmaxes of the backbone round to float32 inside
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


def plain_teaching(rows, final_ND, backbone_logits, tokens_BT, teaching):
    """(3,): a head's mean cross-entropy, divergence and distance, one row after another, over the whole vocabulary."""
    found = []
    logits_RS = rows.projection(rows.hidden_RD)
    norm = rows.projection.norm or (lambda states: states)
    for r, row in enumerate(rows.rows_R.tolist()):
        label = int(tokens_BT.flatten()[row + rows.shift])
        if label not in FEW:
            continue
        state = final_ND[row + rows.shift - 1]
        p_V = (backbone_logits(state[None]).detach()[0] / teaching.temperature).softmax(0)
        p_S = p_V[FEW]
        if teaching.top_n is not None:
            p_S = torch.where(p_S >= p_S.topk(teaching.top_n).values[-1], p_S, 0.0)
        p_S = p_S / p_S.sum()
        log_q_S = (logits_RS[r] / teaching.temperature).log_softmax(0)
        hard = F.cross_entropy(logits_RS[r], torch.tensor(FEW.index(label)))
        soft = (torch.xlogy(p_S, p_S) - p_S * log_q_S).sum()
        found.append(torch.stack([hard, soft, F.smooth_l1_loss(norm(rows.hidden_RD[r]), state)]))
    assert 3 < len(found) < len(rows.rows_R)
    return torch.stack(found).mean(dim=0)


def test_any_split_of_a_batch_gives_one_loss():
    model, batch = build(), a_batch()
    counts = model.count_labels(*batch.values())
    with torch.no_grad():
        whole = model(**batch)["loss"].item()
        parts = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(6)]
        assert sum(model(**part, counts_K=counts)["loss"].item() for part in parts) == pytest.approx(whole, rel=1e-6)


def test_a_batch_without_a_scored_label_has_no_loss():
    batch = a_batch() | {"input_ids": torch.full((6, 12), 4)}
    model = build()
    out = model(**batch)
    out["loss"].backward()
    assert out["loss"].item() == 0
    assert out["loss_sums_K"].tolist() == [0, 0]
    assert all(p.grad is None or not p.grad.any() for p in model.token_heads.parameters())


def test_a_trained_backbone_counts_all_of_its_own_labels():
    model, batch = build(trains_backbone=True), a_batch()
    full = TrainedModel(model.backbone, heads.create("medusa", model.backbone, num_heads=2), trains_backbone=True)
    own, *of_heads = model.count_labels(*batch.values()).tolist()
    every = full.count_labels(*batch.values()).tolist()
    assert own == every[0]
    assert all(few < more for few, more in zip(of_heads, every[1:], strict=True))


def test_labels_become_entries():
    few = DraftVocabulary(tokens_S=torch.tensor([2, 4, 9]), size=10)
    rows, entries = scored_rows(torch.tensor([9, 3, 0, 2, 4, 9]), few)
    assert rows.tolist() == [0, 3, 4, 5]
    assert entries.tolist() == [2, 0, 1, 2]


# --- choosing --------------------------------------------------------------------------------------------------------

BLOCKS = [
    {"input_ids": [5, 5, 7, 7], "loss_mask": [1, 1, 1, 0]},
    {"input_ids": [5, 8, 8, 7], "loss_mask": [0, 1, 1, 0]},
]


def test_supervised_tokens_are_counted_stored_streamed_or_listed(monkeypatch):
    wanted = {5: 2, 7: 1, 8: 2}
    stored = datasets.Dataset.from_list(BLOCKS)
    for blocks in (BLOCKS, stored, stored.with_format("numpy"), stored.to_iterable_dataset()):
        counts = count_tokens(blocks, 10)
        assert {token: int(n) for token, n in enumerate(counts) if n} == wanted
    monkeypatch.setattr(draft_tokens, "STREAMED_BLOCKS", 1)
    assert int(count_tokens(stored.to_iterable_dataset(), 10).sum()) == 3
    assert int(count_tokens(stored, 10).sum()) == 5


def test_the_rows_of_a_trained_unembedding_are_refused():
    model = build("medusa", "shared", trains_backbone=True)
    with pytest.raises(ValueError, match=r"which rates\.base trains.*give heads\.unembedding: own"):
        settle_draft_vocabulary(model, BLOCKS, chosen=True)
    own = build("medusa", "own", trains_backbone=True)
    assert settle_draft_vocabulary(own, BLOCKS, chosen=True)["draft_vocabulary"]["coverage"] == 3 / 5
    assert settle_draft_vocabulary(TrainedModel(own.backbone, None), BLOCKS, chosen=False) == {}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    return tmp_path


def test_a_run_chooses_records_and_is_continued(folder):
    """Six of the seven characters that the texts are made of."""
    fields = {"family": "medusa", "heads": {"num_heads": 2, "draft_vocabulary": 6}}
    run = train(write_config(folder, "few", **fields))
    description = json.loads((run / "last/heads.json").read_text())
    recorded = description["recipe"]["draft_vocabulary"]
    assert recorded["tokens"] == 6
    assert 0.5 < recorded["coverage"] < 1
    measured = description["recipe"]["measured"]
    assert recorded["coverage"] == pytest.approx(measured["eval_head1_coverage"], abs=0.15)  # a few held-out texts
    assert "eval_multi_token_loss" not in measured
    saved = tensors(run)["last/heads.safetensors"]
    assert saved["unembeddings.weights.0"].shape[0] == 6
    model = heads.load_backbone(heads.BackboneConfig(name_or_path=str(folder / "base")))
    token_heads = heads.load(run / "last", model)
    prompt = torch.tensor([saved["draft_tokens_S"].tolist()])
    out = model.generate(prompt, max_new_tokens=8, do_sample=False, custom_generate=heads.TreeDecoding(token_heads))
    assert torch.equal(out, model.generate(prompt, max_new_tokens=8, do_sample=False))

    again = train(write_config(folder, "again", family="medusa", heads=None, init_from=str(run / "last")))
    assert torch.equal(tensors(again)["last/heads.safetensors"]["draft_tokens_S"], saved["draft_tokens_S"])


def test_a_plan_counts_the_scored_rows(folder):
    plans = [
        make_plan(
            read_config(["--config", write_config(folder, name, family="medusa", heads=fields)]), device_type="cpu"
        )
        for name, fields in (
            ("full", {"num_heads": 2}),
            ("few", {"num_heads": 2, "draft_vocabulary": 6}),
            ("shared", {"num_heads": 2, "draft_vocabulary": 6, "unembedding": "shared"}),
        )
    ]
    sizes = [plan.sizes.all.trained for plan in plans]
    assert sizes[1] - sizes[2] == 2 * 6 * 32  # the tiny Llama's width
    assert sizes[0] > sizes[1]
