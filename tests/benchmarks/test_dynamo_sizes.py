"""Backbones of three sizes are trained by one recipe, and what the figures say is read off their points."""

import dataclasses
import json

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.paper.dynamo_sentences import Point, resampled_lines
from benchmarks.paper.dynamo_sizes import SIZES, Judged, crossing, finished_steps, last_loss, orderings, write_config


def point(speed, won, score):
    won_N = np.array([1.0] * won + [-1.0] * (10 - won))
    return Point(
        threshold=0.5, prompt_N=np.repeat([0, 1], 5), speed_N=np.full(10, speed), passes_N=np.full(10, speed),
        won_N=won_N,
        score_N=np.full(10, score), repeated=0.0,
    )  # fmt: skip


def one_size(size, score):
    points = [point(1.0, 7, score), point(1.5, 5, score), point(2.0, 3, score)]
    return Judged(size=size, backbone=1, overhead=0.1, perplexity=5.0, points=points, plain_score=0.0, drafted=3)


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
    assert crossing(rising[0], lambda p: p.speed_N) == pytest.approx(1.6, abs=0.2)  # between 5 and 3 wins of ten


def test_bands_resample_prompts_and_not_the_seeds_of_a_prompt():
    """All texts of the first prompt win and all of the second lose: a sample holds a prompt whole, or not at all."""
    points = [dataclasses.replace(point(speed, 5, 0.0), threshold=speed) for speed in (1.0, 2.0)]
    found = {round(rate, 3) for _, rate in resampled_lines(points, lambda p: p.speed_N).tolist()}
    assert found == {round(rate, 3) for rate in (10.5 / 0.5, 5.5 / 5.5, 0.5 / 10.5)}


def test_a_run_is_finished_by_its_last_evaluation(tmp_path):
    assert finished_steps(tmp_path) == 0
    lines = [{"step": 5, "loss": 1.0}, {"step": 6, "eval_backbone_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (finished_steps(tmp_path), last_loss(tmp_path)) == (6, 2.5)
