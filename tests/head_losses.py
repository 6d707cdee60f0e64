"""What tests of the heads' losses share: made projections and rows, gradients to compare, chunks of a few rows."""

import torch
from torch import nn

from heads.backbone.projection import Projection
from train.objective import chunks

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


def set_chunk(monkeypatch, rows, vocab):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", {"cpu": rows * vocab})
    monkeypatch.setattr(chunks, "LEAST_ROWS", 1)


def spied_chunks(monkeypatch, chunk_rows, vocab=9):
    """(rows, address of the weight) of each chunk."""
    seen = []
    set_chunk(monkeypatch, chunk_rows, vocab)
    plain = chunks.Unembedding.logits

    def logits(self, hidden):
        seen.append((len(hidden), self.weight.data_ptr()))
        return plain(self, hidden)

    monkeypatch.setattr(chunks.Unembedding, "logits", logits)
    return seen


def head_rows(model, batch, *, with_backbone, **settings):
    """Each head's supervised rows in a batch, as training goes through them."""
    return model.head_rows(model.backbone_states(*batch.values(), **settings), with_backbone=with_backbone)
