"""Backbones of three sizes are trained by one recipe, and what the figures say is read off their points."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.paper.dynamo_seconds import by_seconds
from benchmarks.paper.dynamo_sizes import (
    SIZES,
    Judged,
    draw,
    finished_steps,
    last_loss,
    orderings,
    table_of,
    write_config,
)
from heads.evaluation.judged.win_rates import sum_up


def one_size(size, score):
    sums = {
        "wins": np.array([[3, 1], [5, 5], [7, 7]]),
        "losses": np.full((3, 2), 5),
        "scores": np.full((3, 2), score),
        "scored": np.ones((3, 2)),
        "tokens": np.array([[30, 30], [20, 20], [10, 10]]),
        "passes": np.full((3, 2), 10),
    }
    results = {"by_prompt": sums, "most": 3, "base_scores": [0.0]}
    results["overall"] = sum_up(*(sums[name] for name in ("wins", "losses", "tokens", "passes")), most=3)
    rates, scores = by_seconds(results, (np.full((3, 2), 2.0), np.array([[1.0, 1], [1.6, 1.6], [2, 2]])))
    return Judged(size=size, backbone=1, overhead=0.1, perplexity=5.0, results=results, rates=rates, scores=scores)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.folder)
def test_a_size_is_a_backbone_of_the_demo_s_kind(size, tmp_path):
    write_config(size, tmp_path)
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers) == (size.width, size.layers)
    assert config.num_attention_heads * config.head_dim == size.width
    assert len(tokenizer) == config.vocab_size


def test_orderings_and_speed_ups_are_read_off_the_points():
    rising = [one_size(size, score) for size, score in zip(SIZES, (1.0, 2.0, 3.0), strict=True)]
    assert "every ε_b: holds" in orderings(rising)[0]
    assert "does not hold here" in orderings(rising[::-1])[0]
    assert 1.0 < rising[0].results["overall"]["speed_up"] < 3.0
    assert rising[0].rates["speeds"] == [2.0, 1.25, 1.0]  # seconds, not tokens per pass
    assert "backbone" in str([column.header for column in table_of(rising).columns])


def test_the_picture_has_all_sizes(tmp_path):
    draw([one_size(size, score) for size, score in zip(SIZES, (1.0, 2.0, 3.0), strict=True)], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 0


def test_a_run_is_finished_by_its_last_evaluation(tmp_path):
    assert finished_steps(tmp_path) == 0
    lines = [{"step": 5, "loss": 1.0}, {"step": 6, "eval_backbone_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (finished_steps(tmp_path), last_loss(tmp_path)) == (6, 2.5)
