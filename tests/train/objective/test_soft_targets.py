"""Soft labels: the chunked loss against the plain one in value and gradients, by hand, what it holds in memory."""

import math
from dataclasses import replace

import pytest
import torch
from head_losses import RECORDS, gradients, make, set_chunk, spied_chunks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.backbone.projection import Projection
from train.objective.losses import plain_loss, weighted_loss
from train.objective.soft_targets import Distillation
from train.objective.targets import HeadRows
from train.plan.live_tensors import LiveTensors

ROWS, WIDTH, VOCAB = 11, 6, 9


def make_teacher(dtype=torch.float64, rows=ROWS, **settings):
    generator = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(size, generator=generator, dtype=dtype) for size in ((VOCAB, WIDTH), (VOCAB,)))
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
    projection = Projection(weight=weight, bias=bias, scale=0.8, soft_cap=6.0)
    return Distillation(states_ND=hidden, projection=projection, **settings)


def make_rows(record="plain", dtype=torch.float64, rows=ROWS, hard=1.0, **settings):
    projection, hidden, labels = make(RECORDS[record], dtype=dtype, rows=rows)
    teacher = make_teacher(dtype, rows, **settings)
    return HeadRows(projection=projection, hidden_RD=hidden, labels_R=labels, hard=hard, distillation=teacher)


def compare(rows, **tolerance):
    """Values and the gradients of all tensors."""
    plain, (fast, _) = plain_loss(rows), weighted_loss([rows])
    torch.testing.assert_close(fast, plain, **tolerance)
    pairs = [gradients(loss, rows.projection, rows.hidden_RD) for loss in (fast, plain)]
    for ours, reference in zip(*pairs, strict=True):
        assert reference.abs().max() > 0
        torch.testing.assert_close(ours, reference, **tolerance)


@pytest.mark.parametrize("hard", [0.0, 0.3])
@pytest.mark.parametrize("top_n", [None, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["cross_entropy", "kl"])
def test_chunks_equal_the_plain_loss(divergence, temperature, top_n, hard, monkeypatch):
    set_chunk(monkeypatch, 4, VOCAB)
    rows = make_rows(hard=hard, weight=0.7, divergence=divergence, temperature=temperature, top_n=top_n)
    compare(rows, rtol=1e-10, atol=1e-12)  # float64: sums in another order


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_it_goes_through_any_projection(record, temperature, monkeypatch):
    set_chunk(monkeypatch, 4, VOCAB)
    for top_n in (None, 3):
        compare(make_rows(record, temperature=temperature, top_n=top_n, divergence="kl"), rtol=1e-10, atol=1e-12)
    # 24 bits, in sums of some ten terms of differing sign
    compare(make_rows(record, torch.float32, temperature=temperature), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [plain_loss, lambda rows: weighted_loss([rows])[0]])
def test_by_hand(loss):
    """Teacher p = (1/4, 3/4), student q = (1/2, 1/2); at T = 2 logits ln 3 / 2, so p ~ (1, √3)."""
    one, weight = torch.ones(1, 1).double(), torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    teacher = Distillation(states_ND=one, projection=Projection(weight=weight))
    student = Projection(weight=torch.zeros_like(weight))
    rows = HeadRows(projection=student, hidden_RD=one, labels_R=torch.tensor([0]), hard=0.0, distillation=teacher)

    def value(**settings):
        return loss(replace(rows, distillation=replace(teacher, **settings))).item()

    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert value() == pytest.approx(math.log(2))
    assert value(divergence="kl") == pytest.approx(math.log(2) - entropy)
    assert value(divergence="kl", top_n=1) == pytest.approx(math.log(2))  # all on one token: no entropy
    p = 1 / (1 + math.sqrt(3))
    flat = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert value(divergence="kl", temperature=2.0, weight=0.5) == pytest.approx(0.5 * 4 * (math.log(2) - flat))
    assert loss(replace(rows, hard=2.0)).item() == pytest.approx(3 * math.log(2))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(temperature):
    rows = make_rows(hard=0.0, divergence="kl", temperature=temperature)
    same = replace(rows.distillation, states_ND=rows.hidden_RD.detach(), projection=rows.projection)
    loss, sums = weighted_loss([replace(rows, distillation=same)])
    assert abs(loss.item()) < 1e-12
    assert abs(sums.soft.item()) < 1e-12
    assert all(g.abs().max() < 1e-12 for g in gradients(loss, rows.projection, rows.hidden_RD))


def test_a_teacher_gets_no_gradient():
    rows = make_rows()
    weight = rows.projection.weight
    teacher_hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    own = Projection(weight=torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True))
    weighted_loss([replace(rows, distillation=Distillation(states_ND=teacher_hidden, projection=own))])[0].backward()
    assert teacher_hidden.grad is None
    assert own.weight.grad is None
    assert weight.grad.abs().sum() > 0


def test_sums_are_plain():
    rows = make_rows(hard=0.2, weight=3.0, temperature=2.0)
    _, sums = weighted_loss([replace(rows, factor=torch.tensor(0.1)), replace(rows, distillation=None, hard=0.5)])
    plain = [plain_loss(replace(rows, hard=1.0, distillation=None)), plain_loss(replace(rows, hard=0.0)) / 12]
    torch.testing.assert_close(sums.hard, torch.stack([plain[0], plain[0]]).detach())
    torch.testing.assert_close(sums.soft, torch.stack([plain[1].detach(), torch.zeros_like(plain[1])]))


def make_heads(gated=1.0, own=False, **settings):
    """A backbone's own labels, then three heads taught by one teacher of 12 states; head k lacks the first k."""
    projection, hidden, labels = make(RECORDS["bias"], rows=14 + 11 + 10 + 9)
    teacher, sizes = make_teacher(rows=12, **settings), (14, 11, 10, 9)
    hiddens = [h.detach().requires_grad_() for h in hidden.split(sizes)]
    projections = [replace(projection, weight=(projection.weight.detach() * k).requires_grad_()) for k in range(4)]
    return [
        HeadRows(
            projection=projections[k] if own and k else projection,
            hidden_RD=h,
            labels_R=y,
            factor=torch.tensor(factor),
            gates=[gated if k and not own else 1.0] * 2,
            shared=not (own and k),
            hard=0.3 if k else 2.0,
            distillation=replace(teacher, rows_R=torch.arange(k, 12)) if k else None,
        )
        for k, (h, y, factor) in enumerate(zip(hiddens, labels.split(sizes), (0.5, 0.125, 2.0, 0.7), strict=True))
    ]


def expected_gradients(heads):
    """By the plain loss, gated: of each head's hidden states, and of all projections' tensors by their identity."""
    of_hidden, of_tensor = [], {}
    for rows in heads:
        tensors = rows.projection.parameters()
        first, *rest = torch.autograd.grad(plain_loss(rows) * rows.factor, [rows.hidden_RD, *tensors])
        of_hidden.append(first)
        for tensor, scale, gradient in zip(tensors, rows.gates, rest, strict=True):
            of_tensor[tensor] = of_tensor.get(tensor, 0) + scale * gradient
    return of_hidden, of_tensor


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "divergence": "kl"}, {"top_n": 3}])
@pytest.mark.parametrize(("gated", "own"), [(1.0, True), (1.0, False), (0.25, False), (0.0, False)])
def test_heads_with_one_teacher_take_one_pass_of_it(gated, own, settings, monkeypatch):
    heads = make_heads(gated, own, **settings)
    seen = spied_chunks(monkeypatch, 8)
    loss, sums = weighted_loss(heads)
    # the backbone's own 14 rows; then the teacher's 11 states, which each of three heads is computed at
    assert [rows for rows, _ in seen] == [8, 6, 8, 8, 8, 8, 3, 3, 3, 3]
    loss.backward()
    plain = [plain_loss(rows) for rows in heads]
    torch.testing.assert_close(loss, sum(one * rows.factor for one, rows in zip(plain, heads, strict=True)))
    alone = [weighted_loss([rows])[1] for rows in heads]
    torch.testing.assert_close(sums.hard, torch.cat([one.hard for one in alone]), rtol=1e-10, atol=0)
    torch.testing.assert_close(sums.soft, torch.cat([one.soft for one in alone]), rtol=1e-10, atol=0)
    of_hidden, of_tensor = expected_gradients(heads)
    for rows, reference in zip(heads, of_hidden, strict=True):
        torch.testing.assert_close(rows.hidden_RD.grad, reference, rtol=1e-10, atol=1e-12)
    for tensor, reference in of_tensor.items():
        torch.testing.assert_close(tensor.grad, reference, rtol=1e-10, atol=1e-12)


def test_another_head_needs_no_further_logits(monkeypatch):
    """At 9 of its 1,000 tokens: what three heads hold at once is one head's, and their own (R, D) tensors."""

    def peak(heads):
        with LiveTensors() as live:
            weighted_loss(heads)[0].backward()
        return max(sum(moment.values()) for moment in live.peaks)

    set_chunk(monkeypatch, 8, 1000)
    weight = torch.randn(1000, WIDTH, dtype=torch.float64)
    heads = make_heads()[1:]
    teacher = replace(heads[0].distillation, projection=Projection(weight=weight))
    heads = [
        replace(rows, projection=Projection(weight=weight), gates=None, distillation=replace(teacher, rows_R=read))
        for rows, read in ((rows, rows.distillation.rows_R) for rows in heads)
    ]
    chunk = 8 * 1000 * 8
    assert 2 * chunk < peak(heads[:1]) < 3 * chunk
    assert peak(heads) < peak(heads[:1]) + chunk / 8


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("top_n", [None, 3])
def test_under_autocast_products_are_rounded_and_sums_are_not(temperature, top_n):
    rows = make_rows(dtype=torch.float32, rows=400, temperature=temperature, top_n=top_n)
    # without a bias, which the plain product adds before it rounds
    rows = replace(
        rows, distillation=replace(rows.distillation, projection=replace(rows.distillation.projection, bias=None))
    )
    exact = plain_loss(rows)
    with torch.autocast("cpu", torch.bfloat16):
        fast, plain = weighted_loss([rows])[0], plain_loss(rows)
    assert fast.dtype == torch.float32
    # The same bfloat16 products; near ties of the teacher's n best fall alike, as both read the same logits.
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=0)
    found = [gradients(loss, rows.projection, rows.hidden_RD) for loss in (fast, plain, exact)]
    for ours, reference, true in zip(*found, strict=True):
        assert (ours - true).norm() <= 1.5 * (reference - true).norm()


def test_half_precision_weights_share_one_buffer_with_their_teacher():
    """The same unembedding in bfloat16: the teacher's logits lie where the student's will."""
    rows = make_rows(dtype=torch.float32, rows=400)
    half = Projection(weight=rows.projection.weight.detach().bfloat16())
    rows = replace(rows, projection=half, distillation=replace(rows.distillation, projection=half))
    with torch.no_grad():
        # float32 hidden states are rounded to bfloat16 in both
        torch.testing.assert_close(weighted_loss([rows])[0], plain_loss(rows), rtol=1e-5, atol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "divergence": "kl"}, {"top_n": 3}])
def test_no_tensor_is_as_large_as_rows_times_vocabulary(settings, monkeypatch):
    rows = make_rows(rows=64, **settings)
    set_chunk(monkeypatch, 5, VOCAB)
    with Largest() as seen:
        weighted_loss([rows])[0].backward()
    assert seen.elements <= 64 * WIDTH  # hidden states; logits would be 64 · 9
    with Largest() as seen:
        plain_loss(rows)
    assert seen.elements == 64 * VOCAB


@pytest.mark.parametrize("record", ["plain", "norm"])
def test_regression_is_to_states_behind_the_norm(record):
    rows = make_rows(record)
    target = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True) * 2
    rows = replace(rows, target_RD=target, regression=0.4, hard=0.0, distillation=None)
    plain, (fast, sums) = plain_loss(rows), weighted_loss([rows])
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=0)
    normed = rows.projection.norm(rows.hidden_RD) if record == "norm" else rows.hidden_RD
    distance = (normed - target).abs()
    by_hand = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean(dim=1).sum()
    torch.testing.assert_close(sums.regression[0], by_hand.detach())
    torch.testing.assert_close(fast, 0.4 * by_hand)
    (fast * 0.5).backward()
    ours = rows.hidden_RD.grad.clone()
    rows.hidden_RD.grad = None
    (plain * 0.5).backward()
    torch.testing.assert_close(ours, rows.hidden_RD.grad, rtol=1e-10, atol=1e-12)


def test_a_teacher_with_a_norm_is_refused():
    with pytest.raises(ValueError, match="without_norm"):
        Distillation(
            states_ND=torch.ones(1, 2), projection=Projection(weight=torch.ones(3, 2), norm=torch.nn.LayerNorm(2))
        )
