"""The chunked loss against the plain one, and both against arithmetic by hand."""

import math

import pytest
import torch
from torch import nn

from heads.projection import Projection
from train import losses
from train.losses import chunked_cross_entropy, plain_cross_entropy

RECORDS = {
    "plain": {},
    "bias": {"bias": True},
    "scale and cap": {"scale": 0.7, "soft_cap": 3.0},
    "norm": {"norm": True},
    "all": {"bias": True, "scale": 1.3, "soft_cap": 5.0, "norm": True},
}


def make(record, *, rows=11, width=6, vocab=9, dtype=torch.float64):
    torch.manual_seed(0)
    parts = dict(record)
    weight = nn.Parameter(torch.randn(vocab, width, dtype=dtype))
    if parts.pop("bias", False):
        parts["bias"] = nn.Parameter(torch.randn(vocab, dtype=dtype))
    if parts.pop("norm", False):
        parts["norm"] = nn.LayerNorm(width, dtype=dtype)
        nn.init.normal_(parts["norm"].weight)
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    return Projection(weight=weight, **parts), hidden, torch.randint(vocab, (rows,))


def gradients(loss, projection, hidden):
    (loss * 0.5).backward()
    found = [hidden.grad, *(p.grad for p in projection.parameters())]
    for tensor in (hidden, *projection.parameters()):
        tensor.grad = None
    return found


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
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_rows * projection.weight.shape[0])
    plain, chunked = (loss(projection, hidden, labels) for loss in (plain_cross_entropy, chunked_cross_entropy))
    # The running sum is float32; the addends are float64.
    torch.testing.assert_close(chunked.double(), plain, rtol=1e-6, atol=1e-6)
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
    seen = []
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 5 * 9)
    original = losses.plain_cross_entropy
    monkeypatch.setattr(losses, "plain_cross_entropy", lambda p, h, y: (seen.append(len(h)), original(p, h, y))[1])
    chunked_cross_entropy(projection, hidden, labels)
    assert max(seen) == 5
    assert sum(seen) == 64


def test_under_autocast_all_chunks_share_one_cast(monkeypatch):
    """A new leaf for each chunk would leave its cast in autocast's cache: one copy of the unembedding a chunk."""
    projection, hidden, labels = make({}, rows=40, dtype=torch.float32)
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 4 * 9)
    seen = []
    original = losses.plain_cross_entropy
    monkeypatch.setattr(losses, "plain_cross_entropy", lambda p, h, y: (seen.append(p.weight), original(p, h, y))[1])
    with torch.autocast("cpu", torch.bfloat16):
        chunked = chunked_cross_entropy(projection, hidden, labels)
        plain = original(projection, hidden, labels)
    assert len(seen) == 10
    assert len({id(weight) for weight in seen}) == 1
    # Both take bfloat16 products of the same numbers; only the order of float32 sums differs.
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=0)
    for fast, reference in zip(
        gradients(chunked, projection, hidden), gradients(plain, projection, hidden), strict=True
    ):
        torch.testing.assert_close(fast, reference, rtol=2e-2, atol=2e-3)  # bfloat16 gradients, added in another order
