"""Masks that are found on an accelerator are the table's own, to the last bit, and ask nothing of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dynamic_runs import decoding_of, run
from tiny import VOCAB

from heads.ngrams.counting import count_ngrams
from heads.ngrams.device import DeviceTable
from heads.ngrams.table import NgramTable


def counted(folder, vocab_size: int, order: int, longest: int = 30) -> NgramTable:
    """A table over a few tokens, the first and the last of the vocabulary among them."""
    rng = np.random.default_rng(0)
    ids = np.unique([0, vocab_size - 1, *rng.integers(0, vocab_size, 8)])
    documents = [rng.choice(ids, rng.integers(0, longest)).tolist() for _ in range(30)]
    return count_ngrams(documents, folder=folder / "table", order=order, vocab_size=vocab_size)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("vocab_size", [5, 131_072])
def test_masks_are_the_tables(tmp_path, vocab_size, device):
    """For candidates seen and never seen, repeated, and beyond the vocabulary, in a batch whose rows differ."""
    table = counted(tmp_path, vocab_size, order=4)
    generator = torch.Generator().manual_seed(1)
    seen = torch.from_numpy(np.flatnonzero(table.unigrams_V))
    for n in range(1, 5):
        ours, candidates = DeviceTable(table, n, device), []
        for size in (5, 6, 4, 7)[:n]:
            ids = seen[torch.randint(len(seen), (3, size), generator=generator)]
            ids[:, 1], ids[0, 0] = vocab_size + 7, 1
            candidates.append(ids)
        mask = ours.cooccurrence([ids.to(device) for ids in candidates]).cpu()
        assert torch.equal(mask, table.cooccurrence(candidates))
        assert mask.any()


@pytest.mark.cuda
def test_candidates_on_a_cpu_are_answered_there(tmp_path):
    """As with a backbone whose end alone is on the accelerator."""
    table, candidates = counted(tmp_path, 5, order=2), [torch.tensor([[0, 4]])] * 2
    mask = DeviceTable(table, 2, "cuda").cooccurrence(candidates)
    assert torch.equal(mask, table.cooccurrence(candidates))


def test_an_order_without_ngrams_masks_everything(tmp_path):
    table = counted(tmp_path, 5, order=3, longest=3)  # no document has three tokens
    candidates = [torch.tensor([[0, 4]])] * 3
    assert not DeviceTable(table, 3, "cpu").cooccurrence(candidates).any()


def test_no_shape_and_no_branch_depends_on_what_is_found(tmp_path):
    """A graph without breaks holds no call that would wait for the device."""
    table = DeviceTable(counted(tmp_path, 50, order=3), 3, "cpu")
    candidates = [torch.arange(12).view(2, 6)] * 3
    whole = torch.compile(table.cooccurrence, fullgraph=True, backend="eager")
    assert torch.equal(whole(candidates), table.cooccurrence(candidates))


def test_dynamic_decoding_writes_the_same_text_with_either(tmp_path):
    table = counted(tmp_path, VOCAB, order=4)
    texts = []
    for cooccurrence in (table, DeviceTable(table, 4, "cpu")):
        model, decoding = decoding_of(threshold=0.2, cooccurrence=cooccurrence)
        texts.append(run(model, decoding).sequences)
    assert torch.equal(*texts)
