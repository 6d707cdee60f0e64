"""Ablations and the other baseline stand beside the thresholds ε_b that they were made at, with their own seeds."""

from argparse import Namespace

import pytest

from benchmarks.paper.dynamo_sentences import check_step, few_of, main, show_ablations, show_baselines
from benchmarks.shared import wide_console
from heads.evaluation.judged.completion import thresholds_by


@pytest.mark.parametrize("step", [0.02, 0.05, 0.1, 0.25, 0.5])
def test_steps_whose_few_thresholds_are_among_all(step):
    check_step(step)
    few = few_of(Namespace(seeds=10, step=step))
    assert set(thresholds_by(few["step"])) <= set(thresholds_by(step))
    assert few["draws"] == 2


@pytest.mark.parametrize("step", [0.04, 0.2, 1.0])
def test_other_steps_are_refused_before_any_work(step):
    with pytest.raises(ValueError, match=f"--step {step:g} was given"):
        main(["--heads", "nowhere", "--step", str(step)])


def results_of(base, draws, step):
    """Each threshold's rate is the threshold itself."""
    thresholds = thresholds_by(step)
    nothing = [None] * len(thresholds)
    overall = {"rates": thresholds, "rate_intervals": nothing, "speeds": thresholds, "speed_intervals": nothing}
    overall |= {"same_quality": None}
    counts = {name: [0] * len(thresholds) for name in ("wins", "ties", "losses")}
    return {
        "base": base,
        "draws": draws,
        "thresholds": thresholds,
        "overall": overall,
        "counts": counts,
        "by_score": {"means": thresholds},
        "repeated": thresholds,
        "base_scores": [0.0],
    }


def test_a_row_has_the_figures_of_its_own_threshold(capsys):
    show_baselines(wide_console(), results_of("before", 10, 0.02), results_of("own", 2, 0.1))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[0].startswith(("0.", "1."))]
    assert rows == [[f"{e:.2f}"] * 3 for e in thresholds_by(0.1)]


def test_tables_say_how_many_texts_a_prompt_has(capsys):
    show_baselines(wide_console(), results_of("before", 10, 0.02), results_of("own", 2, 0.1))
    assert "texts of each prompt: 10" in (printed := capsys.readouterr().out)
    assert "texts of each prompt: 2" in printed
    show_ablations(wide_console(), {"CO": results_of("before", 3, 0.1)})
    printed = capsys.readouterr().out
    assert "texts of each prompt: 3" in printed
    assert " 50%" in printed, "the row of ε_b = 0.5"
