"""The stores of 6-grams that are compared give the same answers, and a curve is continued as its power law says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.speed.ngram_stores.__main__ import compare, extrapolate, run_store
from benchmarks.speed.ngram_stores.measure import measure_store
from benchmarks.speed.ngram_stores.stores import ORDER, PACKAGES, build_dictionaries, build_headway, windows


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    lengths = np.array([80] * 30)
    tokens = np.minimum(*rng.integers(0, 120, (2, lengths.sum()))).astype(np.uint16)
    np.savez(tmp_path / "corpus.npz", tokens_T=tokens, lengths_L=lengths)
    return tmp_path / "corpus.npz"


def test_ours_answers_as_dictionaries_do(corpus, tmp_path):
    stores = {"headway": build_headway, "dictionaries": build_dictionaries}
    found = {name: measure_store(build, corpus, 1500, tmp_path / name) for name, build in stores.items()}
    for figures in found.values():
        assert figures["tokens"] == 1520  # whole documents
        assert figures["disk"] > 0
        assert figures["questions_per_second"] > 0
    assert found["headway"]["seen"] == found["dictionaries"]["seen"] > 0
    assert found["headway"]["total"] == pytest.approx(found["dictionaries"]["total"], rel=1e-12)


def test_columns_end_with_their_document():
    columns = windows([np.array([1, 2, 3], np.uint16), np.array([4], np.uint16)])
    rows = np.stack(list(columns.values()), axis=1)
    assert rows.shape == (4, ORDER)
    assert rows[:, :3].tolist() == [[1, 2, 3], [2, 3, -1], [3, -1, -1], [4, -1, -1]]


def test_other_answers_are_said():
    ours = {"cpu_seconds": 2.0, "disk": 10, "step_ms": 0.5, "seen": 7, "total": 3.0}
    assert "OTHER ANSWERS: 8 n-grams seen, ours 7" in compare("x", {**ours, "seen": 8}, ours)
    assert "probabilities' sum 2.00, ours 3.00" in compare("x", {**ours, "total": 2.0}, ours)


def test_a_curve_is_continued():
    curve = [{"tokens": n, "disk": 5 * n**0.8} for n in (1000, 2000, 4000)]
    assert extrapolate(curve, "disk", 200_000) == pytest.approx(5 * 200_000**0.8)


def test_a_store_whose_package_is_nowhere_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setitem(PACKAGES, "polars", ("no_such_package",))
    assert run_store("polars", 10, tmp_path / "corpus", sys.executable) is None
