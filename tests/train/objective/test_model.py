"""The one module that is trained: its loss by another route, packing, frozen backbone, splits of a batch."""

import pytest
import torch
from head_losses import head_rows
from tiny import tiny_model
from torch.nn import functional as F  # noqa: N812

from heads.backbone.model import Backbone
from heads.families import create
from train.loop.optimizer_groups import optimizer_groups
from train.objective.model import TrainedModel
from train.objective.targets import count_supervised
from train.objective.weights import LossConfig


def build(family="grounded", architecture="llama", **settings):
    backbone = Backbone(tiny_model(architecture, attn="eager"))
    token_heads = None if family is None else create(family, backbone, num_heads=2).double()
    if token_heads is not None:
        torch.manual_seed(1)
        for p in token_heads.parameters():
            torch.nn.init.normal_(p, std=0.3)
    return TrainedModel(backbone, token_heads, **settings)


def a_batch(rows=3, length=12, vocab=20):
    torch.manual_seed(2)
    tokens = torch.randint(3, vocab, (rows, length))
    mask = torch.rand(rows, length) > 0.3
    documents = (torch.arange(length) >= 7).long().expand(rows, length)
    return {"input_ids": tokens, "loss_mask": mask, "document_ids": documents}


def unit_rms(x):
    return x / (x.pow(2).mean() + torch.finfo(x.dtype).eps).sqrt()


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gemma2", "mistral_windowed"])
def test_loss_equals_a_loop_over_documents_and_positions(architecture):
    """Each document alone through the model's own forward, each label looked up by hand."""
    model = build("grounded", architecture)
    batch = a_batch()
    heads, hf = model.token_heads, model.model
    sums, counts = [0.0, 0.0], [0, 0]
    for tokens, mask, documents in zip(*batch.values(), strict=True):
        for document in (0, 1):
            inside = documents == document
            text, supervised = tokens[inside][None], mask[inside]
            final = hf.get_decoder()(input_ids=text).last_hidden_state[0]
            for k in (1, 2):
                for t in range(text.shape[1] - 1 - k):
                    if supervised[t + 1 + k]:
                        embeddings = [unit_rms(hf.get_input_embeddings()(text[0, t + j])) for j in range(1, k + 1)]
                        hidden = heads.bodies[k - 1](torch.cat([final[t], *embeddings])[None])
                        logits = heads.projection(k)(hidden)
                        sums[k - 1] += F.cross_entropy(logits, text[0, t + 1 + k][None]).item()
                        counts[k - 1] += 1
    with torch.no_grad():
        out = model(**batch)
    assert min(counts) > 5
    # float64 throughout but for the float32 running sum of the chunked loss.
    assert out["loss"].item() == pytest.approx(sum(s / c for s, c in zip(sums, counts, strict=True)), rel=1e-6)
    assert out["loss_sums_K"].tolist() == pytest.approx(sums, rel=1e-6)


def test_backbone_alone_equals_hugging_faces_own_loss():
    model = build(None)
    tokens = a_batch()["input_ids"]
    ones, one_document = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    ours = model(input_ids=tokens, loss_mask=ones, document_ids=one_document)["loss"]
    assert ours.item() == pytest.approx(model.model(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)
    ours.backward()
    assert all(p.grad is not None for p in model.model.parameters())


def test_attention_crosses_documents_only_when_asked():
    batch = a_batch(rows=1)
    losses = []
    for crossing in (False, True):
        model = build(attend_across_documents=crossing)
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, :3] = 5  # only the first document's context
        supervised_in_second = {"loss_mask": torch.arange(12)[None] > 8}
        with torch.no_grad():
            losses.append([model(**{**b, **supervised_in_second})["loss"].item() for b in (batch, changed)])
    assert losses[0][0] == losses[0][1]
    assert abs(losses[1][0] - losses[1][1]) > 1e-6


@pytest.mark.parametrize("family", ["medusa", "grounded"])
def test_any_split_of_a_batch_gives_one_loss_and_one_gradient(family):
    """Rows with unequal numbers of labels; per-row means would differ."""
    batch = a_batch()
    whole = build(family)
    whole(**batch)["loss"].backward()
    split = build(family)
    counts = count_supervised(batch["loss_mask"], batch["document_ids"], split.shifts)
    losses = []
    for row in range(3):
        part = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        loss = split(**part, counts_K=counts)["loss"]
        loss.backward()
        losses.append(loss.item())
    with torch.no_grad():
        assert sum(losses) == pytest.approx(whole(**batch)["loss"].item(), rel=1e-6)  # float32 running sums
    for a, b in zip(whole.token_heads.parameters(), split.token_heads.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


def test_a_frozen_backbone_stays_frozen_and_in_eval_mode():
    model = build().train()
    assert model.token_heads.training
    assert not model.model.training
    before = [p.clone() for p in model.model.parameters()]
    optimizer = torch.optim.AdamW(optimizer_groups(model, heads_rate=0.1, base_rate=None, weight_decay=0.1))
    model(**a_batch())["loss"].backward()
    optimizer.step()
    assert all(p.grad is None for p in model.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.model.parameters(), strict=True))


def test_decay_weights_later_heads_less():
    with torch.no_grad():
        full, decayed = build()(**a_batch()), build(head_decay=0.5)(**a_batch())
    counts = count_supervised(a_batch()["loss_mask"], a_batch()["document_ids"], [2, 3])
    means = (full["loss_sums_K"] / counts).tolist()
    assert decayed["loss"].item() == pytest.approx(means[0] + 0.5 * means[1], rel=1e-6)


def test_head_weights_stand_in_place_of_decay():
    with torch.no_grad():
        full, weighted = build()(**a_batch()), build(loss=LossConfig(head_weights=[3.0, 0.25]))(**a_batch())
    counts = count_supervised(a_batch()["loss_mask"], a_batch()["document_ids"], [2, 3])
    means = (full["loss_sums_K"] / counts).tolist()
    assert weighted["loss"].item() == pytest.approx(3 * means[0] + 0.25 * means[1], rel=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("family", ["grounded", "eagle", "mtp", "dynamo"])
def test_teachers_and_targets_lie_k_places_ahead(family, architecture):
    """Each document alone through the model's own forward, each head's loss position by position."""
    settings = LossConfig(hard=0.5, soft=2.0, divergence="kl", temperature=1.5, regression=0.7)
    model = build(family, architecture, loss=settings)
    batch = a_batch()
    found = heads_losses_by_hand(model, batch, settings)
    with torch.no_grad():
        out = model(**batch)
    assert model.loss_names == [f"head{k}_{kind}" for kind in ("loss", "soft", "regression") for k in (1, 2)]
    assert out["logged_sums_M"].tolist() == pytest.approx(
        [found[k][i] for i in range(3) for k in (0, 1)], rel=1e-6
    )  # float32 running sums
    counts = count_supervised(batch["loss_mask"], batch["document_ids"], [2, 3])
    assert model.counts_of_logged(counts).tolist() == counts.tolist() * 3
    weighted = [0.5 * hard + 2.0 * 1.5**2 * soft + 0.7 * distance for hard, soft, distance in found]
    total = sum(one / count for one, count in zip(weighted, counts.tolist(), strict=True))
    assert out["loss"].item() == pytest.approx(total, rel=1e-6)


def heads_losses_by_hand(model, batch, settings):
    """Of each head its sums of cross-entropies, of divergences, of distances."""
    hf, sums = model.model, [[0.0, 0.0, 0.0] for _ in range(2)]
    states = {
        head: (rows, hidden.detach())
        for head, rows, hidden in (
            (o.head, o.rows_R.tolist(), o.hidden_RD)
            for o in head_rows(model, batch, with_backbone=False)
        )
    }  # fmt: skip
    for row in range(3):
        for document in (0, 1):
            inside = (batch["document_ids"][row] == document).nonzero().flatten().tolist()
            text = batch["input_ids"][row, inside][None]
            final = hf.get_decoder()(input_ids=text).last_hidden_state[0].detach()
            teacher = hf(input_ids=text).logits[0].detach() / settings.temperature
            for k in (1, 2):
                projection = model.token_heads.projection(k)
                for t in range(len(inside) - 1 - k):
                    if not batch["loss_mask"][row, inside[t + 1 + k]]:
                        continue
                    rows, hidden_RD = states[k]
                    hidden = hidden_RD[rows.index(row * 12 + inside[t])]
                    logits = projection(hidden[None])[0].detach()
                    normed = hidden if projection.norm is None else projection.norm(hidden).detach()
                    p, log_q = teacher[t + k].softmax(0), (logits / settings.temperature).log_softmax(0)
                    sums[k - 1][0] += F.cross_entropy(logits, text[0, t + 1 + k]).item()
                    sums[k - 1][1] += (p * (p.log() - log_q)).sum().item()
                    sums[k - 1][2] += F.smooth_l1_loss(normed, final[t + k]).item()
    return sums


def test_a_trained_backbone_has_true_tokens_and_is_no_part_of_its_heads_teacher():
    """What heads learn from it gives its unembedding no gradient of its own as a teacher."""
    settings = {"trains_backbone": True, "gradient_scale": 0.0}
    grads = []
    for loss in (LossConfig(), LossConfig(hard=0.0, soft=1.0, regression=1.0)):
        model = build("medusa", loss=loss, **settings)
        model(**a_batch())["loss"].backward()
        grads.append([p.grad for p in model.model.parameters()])
    assert model.loss_names[0] == "backbone_loss"
    assert len(model.counts_of_logged(torch.tensor([9, 8, 7]))) == len(model.loss_names)
    for hard, soft in zip(*grads, strict=True):
        torch.testing.assert_close(hard, soft, rtol=1e-9, atol=1e-12)  # cut off from heads, it learns the same


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("family", ["grounded", "medusa", None])
def test_optimizer_groups_hold_every_trained_parameter_once(family, weight_decay):
    model = build(family)
    groups = optimizer_groups(model, heads_rate=1e-3, base_rate=1e-4, weight_decay=weight_decay)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert group["lr"] == (1e-4 if family is None else 1e-3)
        assert all((p.ndim >= 2) == group["name"].endswith("matrices") for p in group["params"])
        assert group["weight_decay"] == (weight_decay if group["name"].endswith("matrices") else 0.0)
