"""Backbones of three sizes are trained by one recipe, and what the figures say is read off their points."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from benchmarks.paper import dynamo_sizes
from benchmarks.paper.dynamo_seconds import by_seconds
from benchmarks.paper.dynamo_sizes import (
    SIZES,
    Judged,
    compare_scores,
    draw,
    finished_steps,
    last_loss,
    orderings,
    table_of,
    write_config,
)
from heads.evaluation.judged.win_rates import sum_up


def one_size(size, score):
    """At three ε_b and four prompts, whose scores differ more from each other than those of two sizes.

    Args:
        score: of all prompts, or of each.
    """
    sums = {
        "wins": np.array([[3, 1, 3, 1], [5, 5, 5, 5], [7, 7, 7, 7]]),
        "losses": np.full((3, 4), 5),
        "scores": np.broadcast_to(np.array([0.0, 20.0, 40.0, 60.0]) + score, (3, 4)),
        "scored": np.ones((3, 4)),
        "tokens": np.array([[30] * 4, [20] * 4, [10] * 4]),
        "passes": np.full((3, 4), 10),
    }
    results = {"by_prompt": sums, "most": 3, "base_scores": [0.0]}
    results["overall"] = sum_up(*(sums[name] for name in ("wins", "losses", "tokens", "passes")), most=3)
    rates, scores = by_seconds(results, (np.full((3, 4), 2.0), np.array([[1.0] * 4, [1.6] * 4, [2.0] * 4])))
    return Judged(
        size=size,
        backbone=1000 * size.width,
        overhead=1 / size.layers,
        perplexity=5.0,
        results=results,
        rates=rates,
        scores=scores,
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.folder)
def test_a_size_is_a_backbone_of_the_demo_s_kind(size, tmp_path):
    write_config(size, tmp_path)
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers) == (size.width, size.layers)
    assert config.num_attention_heads * config.head_dim == size.width
    assert len(tokenizer) == config.vocab_size


def test_orderings_and_speed_ups_are_read_off_the_points():
    rising = [one_size(size, score) for size, score in zip(SIZES, (1.0, 2.0, 3.0), strict=True)]
    assert all(line.endswith(": holds, +1.00 (+1.00 to +1.00) over 4 prompts") for line in orderings(rising)[:2])
    assert all(": does not hold, -1.00" in line for line in orderings(rising[::-1])[:2])
    assert 1.0 < rising[0].results["overall"]["speed_up"] < 3.0
    assert rising[0].rates["speeds"] == [2.0, 1.25, 1.0]  # seconds, not tokens per pass
    cells = [list(column.cells) for column in table_of(rising).columns]
    assert cells[0] == ["64 wide, 3 layers", "96 wide, 4 layers", "128 wide, 6 layers"]
    assert cells[1:3] == [["64,000", "96,000", "128,000"], ["33%", "25%", "17%"]]
    assert cells[5] == ["31.00", "32.00", "33.00"]


def test_prompts_that_disagree_settle_no_ordering():
    """Mean 3, deviation 2.16, four prompts: 3.18 × 2.16 / 2 = 3.44 to either side."""
    small, large = one_size(SIZES[0], 0.0), one_size(SIZES[1], np.array([1.0, 2.0, 3.0, 6.0]))
    assert compare_scores(small, large) == (
        "texts of 96 wide, 4 layers score better than those of 64 wide, 3 layers, mean of all ε_b: "
        "not settled by these texts, +3.00 (-0.44 to +6.44) over 4 prompts"
    )


def test_prompts_without_a_score_are_left_out():
    small, large = one_size(SIZES[0], 0.0), one_size(SIZES[1], 1.0)
    large.results["by_prompt"]["scored"][:, 0] = 0
    assert compare_scores(small, large).endswith(": holds, +1.00 (+1.00 to +1.00) over 3 prompts")
    large.results["by_prompt"]["scored"][:, 1] = 0
    assert compare_scores(small, large).endswith("not settled by these texts, which have scores for 2 prompts")


def test_the_picture_has_all_sizes(monkeypatch):
    figures = []
    monkeypatch.setattr(dynamo_sizes, "save_figure", lambda figure, path: figures.append(figure))
    found = [one_size(size, score) for size, score in zip(SIZES, (1.0, 2.0, 3.0), strict=True)]
    draw(found, "a.png")
    rates, scores, sizes, overheads = figures[0].axes
    for axes in (rates, scores):
        assert {size.name for size in SIZES} <= set(axes.get_legend_handles_labels()[1])
    measured, free = sizes.get_lines()
    assert list(measured.get_xdata()) == [0.064, 0.096, 0.128]
    assert list(measured.get_ydata()) == [one.rates["speed_up"] for one in found]
    assert list(free.get_ydata()) == [one.results["overall"]["speed_up"] for one in found]
    assert list(overheads.get_lines()[0].get_xdata()) == pytest.approx([100 / 3, 25, 100 / 6])


def test_the_picture_says_where_no_size_has_a_speed_up(monkeypatch):
    figures = []
    monkeypatch.setattr(dynamo_sizes, "save_figure", lambda figure, path: figures.append(figure))
    found = [one_size(size, 1.0) for size in SIZES]
    for one in found:
        one.rates["speed_up"] = one.results["overall"]["speed_up"] = None
    draw(found, "a.png")
    for axes in figures[0].axes[2:]:
        assert [text.get_text() for text in axes.texts] == ["none: the win rate falls with speed at no size"]
        assert list(axes.get_xticks()) == []


def test_a_run_is_finished_by_its_last_evaluation(tmp_path):
    assert finished_steps(tmp_path) == 0
    lines = [{"step": 5, "loss": 1.0}, {"step": 6, "eval_backbone_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (finished_steps(tmp_path), last_loss(tmp_path)) == (6, 2.5)
