"""The timed ways of attention and precisions give one result, or the benchmark says how far they differ."""

import pytest
import torch
from rich.console import Console

from benchmarks.training.training_options import attention_table, difference_of, half_row
from benchmarks.training.training_speed import Workload
from train.objective import document_attention as by_document

SMALL = Workload(family="medusa", unembedding="shared", vocab=64, width=64, layers=2, heads=1, batch=1, length=256)


def test_every_number_of_documents_is_compared_with_plain_causal(monkeypatch):
    seen, usual = [], by_document.sdpa_by_documents

    def spy(module, query, key, value, mask, **settings):
        seen.append(getattr(mask, "documents", None))
        return usual(module, query, key, value, mask, **settings)

    monkeypatch.setattr(by_document, "sdpa_by_documents", spy)
    rows = attention_table(Console(quiet=True), 1, workload=SMALL)
    assert [row["documents"] for row in rows] == [1, 8, 32]
    for row in rows:
        assert set(row["milliseconds"]) == {"causal", "dense", "by document"}
        assert row["difference"] <= 1e-5
    assert [[256]] in seen  # causal
    assert [[32] * 8] in seen  # pieces
    assert None in seen  # a dense mask


def test_other_states_end_the_benchmark():
    states = torch.ones(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="other states than a dense mask"):
        difference_of(states * 1.001, states)
    assert difference_of(states, states) == 0


def test_a_step_in_half_precision_has_the_same_loss_but_for_rounding():
    row = half_row(SMALL, 1)
    assert row["bf16_loss"] == pytest.approx(row["float32_loss"], rel=1e-3)  # bfloat16 has 8 bits of mantissa
    assert row["bf16_loss"] != row["float32_loss"], "nothing ran in half precision"
