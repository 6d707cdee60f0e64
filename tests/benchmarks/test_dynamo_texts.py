"""Texts of dynamic decoding are compared at equal tokens per pass, with intervals over the same prompts for all."""

import dataclasses
import io

import numpy as np
from dynamic_runs import decoding_of
from rich.console import Console
from tiny import random_tokens, tiny_model

from benchmarks.paper.dynamo_decoding import (
    VARIANTS,
    at_equal_speed,
    at_equal_threshold,
    build_parser,
    stored_texts,
)
from benchmarks.paper.dynamo_texts import (
    Texts,
    losses_at_speed,
    resamples,
    with_interval,
    write_texts,
)


def texts(tokens, passes, judged):
    return Texts(
        tokens_B=tokens,
        passes_B=passes,
        scored_B=tokens,
        judged_B=list(judged),
        own_B=[value / 2 for value in judged],
        repeated_B=[0.0] * len(tokens),
    )


def test_losses_are_read_between_thresholds_for_every_resample():
    """At 1 and 2 tokens a pass 1.0 and 3.0 a token: halfway 2.0, whatever prompts are drawn."""
    curve = [texts([10, 20], [10, 20], [10, 20]), texts([10, 20], [5, 10], [30, 60])]
    weights = resamples(2)
    assert weights[0].tolist() == [1, 1]
    np.testing.assert_allclose(losses_at_speed(curve, weights, "other model", 1.5), 2.0)
    np.testing.assert_allclose(losses_at_speed(curve, weights, "own model", 1.5), 1.0)
    assert np.isnan(losses_at_speed(curve, weights, "other model", 2.5)).all()


def test_a_difference_that_all_prompts_share_has_a_narrow_interval_though_each_loss_has_a_wide_one():
    rng = np.random.default_rng(0)
    losses = rng.uniform(10, 90, 20)
    one, other = texts([30] * 20, [20] * 20, losses), texts([30] * 20, [20] * 20, losses + 3)
    weights = resamples(20)
    alone, difference = (
        one.loss(weights, "other model"),
        other.loss(weights, "other model") - one.loss(weights, "other model"),
    )
    assert np.ptp(alone[1:]) > 0.5
    np.testing.assert_allclose(difference, 0.1)
    assert with_interval(difference, "+.3f") == "+0.100 [+0.100, +0.100]"


def test_texts_are_counted_up_to_their_ends_and_scored_by_both_models():
    model, decoding = decoding_of(threshold=0.3)
    judge, prompts = tiny_model("llama", seed=5).double(), random_tokens(3, 5, seed=4)
    model.generation_config.eos_token_id, before = [3, 4, 5, 6], model.generation_config.eos_token_id
    try:
        made = write_texts(model, lambda seed: decoding, judge, prompts, new_tokens=12, draws=2)
    finally:
        model.generation_config.eos_token_id = before
    assert all(len(getattr(made, field.name)) == 3 for field in dataclasses.fields(made))
    assert max(made.scored_B) <= 24
    assert all(tokens >= passes for tokens, passes in zip(made.tokens_B, made.passes_B, strict=True))
    assert all(judged != own for judged, own in zip(made.judged_B, made.own_B, strict=True))
    assert max(made.repeated_B) <= 1


def test_every_variant_is_another_decoder():
    settings = [dataclasses.replace(variant, name="") for variant in VARIANTS]
    assert len(set(settings)) == len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_scored_texts_are_found_again_under_what_they_depend_on(tmp_path):
    def stored(*flags, variant=VARIANTS[0], threshold=0.5):
        return stored_texts(variant, threshold, build_parser().parse_args(["--out", str(tmp_path), *flags]))

    (tmp_path / "ngrams.json").write_text("{}")
    table = ("--ngrams", str(tmp_path))
    stored(*table).write(dataclasses.asdict(texts([10, 20], [10, 20], [10, 20])))
    assert Texts(**stored(*table).read()) == texts([10, 20], [10, 20], [10, 20])
    others = [stored(*table, "--prompts", "3"), stored(*table, threshold=0.4), stored(*table, variant=VARIANTS[1])]
    assert [other.read() for other in others] == [None] * 3


def test_every_table_has_plain_sampling_and_intervals():
    plain = texts([10, 20], [10, 20], [31, 62])
    half = texts([10, 20], [5, 10], [21, 40])
    sweep = {name: {1.0: plain, 0.5: half} for name in ("CO", "other")}
    console = Console(width=200, file=io.StringIO())
    for table in (*at_equal_speed(sweep, [1.5], "other model"), at_equal_threshold(sweep, 0.5)):
        console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert sum(line[:2] == ["plain", "sampling"] for line in lines) == 3
    assert all("]" in line[-1] for line in lines if line and line[0] in ("plain", "CO", "other"))
