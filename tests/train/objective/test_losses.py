"""The chunked loss against the plain one, and both against arithmetic by hand."""

import math

import pytest
import torch
from head_losses import RECORDS, gradients, make, set_chunk, spied_chunks

from heads.backbone.projection import Projection
from train.objective.losses import chunked_cross_entropy, plain_cross_entropy, weighted_loss
from train.objective.targets import HeadRows


def test_by_hand():
    """Logits (0, ln 3): the label's probability is 3/4 and 1/4."""
    projection = Projection(weight=torch.tensor([[0.0], [math.log(3)]]))
    hidden = torch.ones(2, 1)
    for loss in (plain_cross_entropy, chunked_cross_entropy):
        assert loss(projection, hidden, torch.tensor([1, 0])).item() == pytest.approx(math.log(4 / 3) + math.log(4))


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
def test_chunks_equal_the_plain_loss(record, chunk_rows, monkeypatch):
    projection, hidden, labels = make(record)
    set_chunk(monkeypatch, chunk_rows, projection.weight.shape[0])
    plain, chunked = (loss(projection, hidden, labels) for loss in (plain_cross_entropy, chunked_cross_entropy))
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    for fast, reference in zip(
        gradients(chunked, projection, hidden), gradients(plain, projection, hidden), strict=True
    ):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)  # sums in another order


def test_a_frozen_projection_gets_no_gradient_and_the_hidden_states_do():
    projection, hidden, labels = make({})
    projection.weight.requires_grad_(False)
    chunked_cross_entropy(projection, hidden, labels).backward()
    assert projection.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_no_rows_give_zero_loss_and_zero_gradients():
    projection, hidden, labels = make({}, rows=0)
    loss = chunked_cross_entropy(projection, hidden, labels)
    loss.backward()
    assert loss.item() == 0
    assert projection.weight.grad.abs().sum() == 0


def test_half_precision_is_summed_in_float32():
    projection, hidden, labels = make({}, rows=4096, dtype=torch.float32)
    half = Projection(weight=projection.weight.detach().bfloat16())
    mean = chunked_cross_entropy(half, hidden.detach(), labels) / 4096
    exact = plain_cross_entropy(projection, hidden, labels) / 4096
    # bfloat16 inputs are off by 2^-9 each; the mean over 4096 rows keeps that, a bfloat16 sum would be off by far more.
    assert abs(mean.item() - exact.item()) < 5e-3 * exact.item()
    assert mean.dtype == torch.float32


def test_no_chunk_holds_more_logits_than_it_may(monkeypatch):
    projection, hidden, labels = make({}, rows=64)
    seen = spied_chunks(monkeypatch, 5)
    chunked_cross_entropy(projection, hidden, labels)
    assert [rows for rows, _ in seen] == [5] * 12 + [4]


def test_under_autocast_all_chunks_share_one_cast(monkeypatch):
    """A cast for each chunk would read the whole unembedding once more each time."""
    projection, hidden, labels = make({}, rows=40, dtype=torch.float32)
    seen = spied_chunks(monkeypatch, 4)
    with torch.autocast("cpu", torch.bfloat16):
        chunked = chunked_cross_entropy(projection, hidden, labels)
        plain = plain_cross_entropy(projection, hidden, labels)
    assert len(seen) == 10
    assert len({address for _, address in seen}) == 1
    # Both take bfloat16 products of the same numbers; only the order of float32 sums differs.
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0)
    exact = plain_cross_entropy(projection, hidden, labels)
    found = [gradients(loss, projection, hidden) for loss in (chunked, plain, exact)]
    for fast, reference, true in zip(*found, strict=True):
        # Both round to bfloat16, in another order: neither is far worse than the other.
        assert (fast - true).norm() <= 1.5 * (reference - true).norm()


@pytest.mark.parametrize("gated", [1.0, 0.25, 0.0])
@pytest.mark.parametrize("record", ["plain", "bias", "all"])
def test_a_shared_pass_equals_parts_one_by_one(record, gated, monkeypatch):
    """A backbone's own objective and two heads through one unembedding: one pass, full chunks, equal gradients."""
    projection, hidden, labels = make(RECORDS[record], rows=30)
    hiddens = [h.detach().requires_grad_() for h in hidden.split([14, 9, 7])]
    factors = [torch.tensor(f) for f in (0.5, 0.125, 2.0)]
    scales = [1.0, gated, gated]
    parts = [
        HeadRows(
            projection=projection,
            hidden_RD=h,
            labels_R=y,
            factor=factor,
            gates=[scale] * len(projection.parameters()),
            shared=True,
        )
        for h, y, factor, scale in zip(hiddens, labels.split([14, 9, 7]), factors, scales, strict=True)
    ]
    seen = spied_chunks(monkeypatch, 10)
    loss, sums = weighted_loss(parts)
    assert [rows for rows, _ in seen] == ([10, 10, 10] if gated else [10, 4, 10, 6])  # cut off, they go apart
    loss.backward()
    found = [*(h.grad for h in hiddens), *(p.grad for p in projection.parameters())]
    for tensor in (*hiddens, *projection.parameters()):
        tensor.grad = None
    plain = [plain_cross_entropy(projection, part.hidden_RD, part.labels_R) for part in parts]
    torch.testing.assert_close(sums.hard, torch.stack(plain).detach())
    expected = [torch.zeros_like(p) for p in projection.parameters()]
    for one, h, factor, scale in zip(plain, hiddens, factors, scales, strict=True):
        h.grad, *rest = torch.autograd.grad(one * factor, [h, *projection.parameters()])
        expected = [total + scale * gradient for total, gradient in zip(expected, rest, strict=True)]
    for fast, reference in zip(found, [*(h.grad for h in hiddens), *expected], strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)


def test_shared_parts_wait_and_own_ones_do_not(monkeypatch):
    """Sums come back in the order of the parts, whatever order they were done in."""
    shared, hidden, labels = make({})
    own = Projection(weight=torch.nn.Parameter(shared.weight.detach() * 2))
    parts = [
        HeadRows(projection=p, hidden_RD=hidden[:n], labels_R=labels[:n], shared=p is shared)
        for p, n in ((shared, 3), (own, 5), (shared, 11))
    ]
    _, sums = weighted_loss(iter(parts))
    plain = [plain_cross_entropy(part.projection, part.hidden_RD, part.labels_R) for part in parts]
    torch.testing.assert_close(sums.hard, torch.stack(plain).detach())


def test_float16_does_not_overflow_with_a_large_vocabulary():
    """Equal logits over 70,000 tokens: the softmax's denominator is beyond float16's largest number."""
    projection = Projection(weight=torch.zeros(70_000, 2, dtype=torch.float16).requires_grad_())
    hidden = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    loss = chunked_cross_entropy(projection, hidden, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(70_000), rel=1e-6)
    assert projection.weight.grad[0].tolist() == pytest.approx([-1.0, -1.0], abs=1e-3)


def test_gradients_are_handed_out_once():
    projection, hidden, labels = make({})
    loss = chunked_cross_entropy(projection, hidden, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was called twice"):
        loss.backward()


def test_a_label_whose_probability_is_below_the_smallest_number_keeps_its_loss():
    """-log p would be infinite: e^-200 is no float32."""
    hidden_RD, weight = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [0.0]])
    loss = chunked_cross_entropy(Projection(weight=weight), hidden_RD, torch.tensor([1]))
    assert loss.item() == 200.0
    loss.backward()
    assert hidden_RD.grad.item() == 1.0


@pytest.mark.parametrize("labels", [1e3, 1e6])
def test_small_factors_wait_for_the_loss_scale_in_float16(labels):
    """1 / labels times a probability is below float16's smallest number; the scaler's factor comes with backward."""
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(64, 16, generator=generator)
    weight = torch.randn(500, 16, generator=generator)
    labels_R = torch.randint(500, (64,), generator=generator)

    def gradients(dtype):
        hidden, unembedding = (t.to(dtype).requires_grad_() for t in (hidden_RD, weight))
        part = HeadRows(
            projection=Projection(weight=unembedding),
            hidden_RD=hidden,
            labels_R=labels_R,
            factor=torch.tensor(1 / labels),
        )
        (weighted_loss([part])[0] * 65536.0).backward()
        return hidden.grad.double(), unembedding.grad.double()

    for exact, found in zip(gradients(torch.float64), gradients(torch.float16), strict=True):
        # 11 bits of mantissa, in products over 500 terms
        assert float((found - exact).norm() / exact.norm()) < 5e-3


def test_a_norm_without_parameters():
    """As OLMo's: the gates are of weight alone."""
    norm = torch.nn.LayerNorm(4, elementwise_affine=False)
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    projection, labels_R = Projection(weight=weight, norm=norm), torch.tensor([1, 2])
    hidden_RD = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    found = chunked_cross_entropy(projection, hidden_RD, labels_R, gates=[0.5])
    torch.testing.assert_close(found, plain_cross_entropy(projection, hidden_RD, labels_R))
