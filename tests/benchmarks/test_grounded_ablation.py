"""Rows of an ablation are what their names say, and statements about them are read off their figures."""

import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks.paper.grounded_ablation import (
    VARIANTS,
    GroundedRow,
    beside_medusa,
    build_parser,
    chosen,
    config_of,
    finished,
    settings,
    stored_row,
)
from benchmarks.paper.grounded_report import claims
from benchmarks.paper.trained_rows import read_overridden, train_row
from benchmarks.stale import UNCOMMITTED
from benchmarks.stored_rows import StoredRow

OPTIONS = ("--steps", "8")


def made(name, options=OPTIONS, seed=0):
    (variant,) = chosen([name])
    return config_of(variant, seed, build_parser().parse_args(options))


def row(top1, tokens_per_pass, backbone=0.6):
    entry = {"step": 8, "backbone_top1": backbone, "backbone_top5": backbone + 0.2}
    entry |= {f"head{k}_top1": value for k, value in enumerate(top1, start=1)}
    entry |= {f"head{k}_top5": value + 0.1 for k, value in enumerate(top1, start=1)}
    return SimpleNamespace(evaluations=[entry], tokens_per_pass=tokens_per_pass, on_one_tree=tokens_per_pass - 0.2)


@pytest.fixture
def medusa():
    return [row([0.40, 0.25, 0.15, 0.10], 1.9)]


def test_rows_differ_in_what_they_name_alone():
    medusa, grounded = made("medusa"), made("grounded")
    assert (medusa.family, grounded.family) == ("medusa", "grounded")
    assert (medusa.rates.heads, grounded.rates.heads) == (1e-2, 5e-3)
    medusa.family, medusa.rates = "grounded", grounded.rates
    assert medusa == grounded
    deeper = made("layers_3")
    assert deeper.heads == {"num_heads": 4, "num_hidden_layers": 3}
    deeper.heads = grounded.heads
    assert deeper == grounded


def test_a_row_is_kept_under_all_that_decides_it(tmp_path):
    def kept(name="grounded", flags=OPTIONS, seed=0):
        options = build_parser().parse_args(flags)
        return StoredRow(folder=tmp_path, name="row", settings=settings(made(name, flags, seed), options))

    kept().write({"tokens_per_pass": 2.0})
    assert re.fullmatch(rf"commit [0-9a-z]+({UNCOMMITTED})?, torch {re.escape(torch.__version__)}", kept().made())
    assert kept().read() == {"tokens_per_pass": 2.0}
    others = [kept(flags=("--steps", "9")), kept(seed=1), kept("layers_2"), kept(flags=(*OPTIONS, "--nodes", "16"))]
    assert [other.read() for other in others] == [None] * 4
    assert len({other.place for other in [kept(), *others]}) == 5


def test_an_unknown_row_or_key_is_a_sentence():
    with pytest.raises(ValueError, match=r"--rows has 'grounde'; allowed are .*Did you mean 'grounded'"):
        chosen(["grounde"])
    with pytest.raises(ValueError, match="heads_decay"):
        read_overridden("configs/demo/grounded.yaml", {"heads_decay": 0.5})


def test_the_target_is_reached_or_not_with_figures(medusa):
    lines = claims({"medusa": medusa, "grounded": [row([0.42, 0.30, 0.24, 0.22], 2.4)]})
    assert lines[0] == "grounded beats medusa at every head: reached (top-1 points, by head: +2.0 +5.0 +9.0 +12.0)"
    assert ["not reached" in line for line in lines] == [False] * 5
    lines = claims({"medusa": medusa, "grounded": [row([0.39, 0.30, 0.18, 0.15], 2.3)]})
    assert ["not reached" in line for line in lines] == [True] * 5


def test_families_are_held_on_one_tree_too(medusa):
    """Each row's own tree favours the row; the paper's heads share one."""
    grounded = [row([0.42, 0.30, 0.24, 0.22], 2.4)]
    grounded[0].on_one_tree = 1.8
    (line,) = [line for line in claims({"medusa": medusa, "grounded": grounded}) if "63 nodes" in line]
    assert line.endswith("all on Medusa's tree of 63 nodes, at least +0.43 tokens a pass: not reached (+0.10)")
    rows = {"medusa": medusa, "grounded": grounded}
    assert [beside_medusa(rows, name, "on_one_tree") for name in rows] == ["1.70", "1.80 +0.10"]
    assert beside_medusa({"grounded": grounded}, "grounded", "on_one_tree") == "1.80"


def test_a_call_that_was_stopped_finds_its_rows(tmp_path):
    """600 steps by default; rows of other steps are others."""
    (variant,) = chosen(["medusa"])
    flags = ["--out", str(tmp_path), "--seeds", "3"]
    options = build_parser().parse_args(flags)
    assert options.steps == 600
    made = GroundedRow(
        name="medusa", seed=1, parameters=5, seconds=1.0, tokens_per_pass=2.0, on_one_tree=1.9, evaluations=[{}]
    )
    stored_row(variant, 1, options).write(asdict(made))
    assert finished(variant, options) == [made]
    assert finished(variant, build_parser().parse_args([*flags, "--steps", "100"])) == []


def test_families_are_compared_under_the_same_labels(medusa):
    soft = {"medusa_soft": medusa, "soft": [row([0.42, 0.30, 0.24, 0.22], 2.4)]}
    (line,) = claims(soft)
    assert line == "grounded over medusa, both with soft labels, at least +0.43 tokens a pass: reached (+0.50)"
    assert not any("soft" in line for line in claims({"medusa": medusa, "soft": soft["soft"]}))


def test_too_few_blocks_are_refused(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("def main():\n    return 1\n" * 200)
    config = read_overridden(
        "configs/demo/grounded.yaml",
        {"data": {"train": [{"path": str(text)}], "eval_fraction": 0.0}, "output_dir": str(tmp_path / "run")},
    )
    with pytest.raises(ValueError, match=r"short.txt has \d+ blocks of \d+ tokens and 1,000 are needed"):
        train_row(config, blocks=1000)


def test_noise_needs_seeds():
    grounded = [row([0.4, 0.3, 0.20, 0.20], 2.0), row([0.4, 0.3, 0.24, 0.24], 2.0)]
    worse = [row([0.4, 0.3, 0.20, 0.20], 2.0)]
    (line,) = [line for line in claims({"grounded": grounded[:1], "gru": worse}) if line.startswith("gru")]
    assert "better with one seed (head 3 +0.0 points" in line
    (line,) = [line for line in claims({"grounded": grounded[1:], "gru": worse}) if line.startswith("gru")]
    assert "not settled by one seed" in line
    (line,) = [line for line in claims({"grounded": grounded, "gru": worse * 2}) if line.startswith("gru")]
    assert ": reached (head 3 -2.0 points, head 4 -2.0 points; noise 4.0, 4.0)" in line


def test_two_heads_have_no_late_ones():
    """Other statements are made; the one about heads 3 and 4 is left out."""
    grounded, gru = [row([0.4, 0.3], 2.0)], [row([0.4, 0.2], 2.0)]
    assert claims({"grounded": grounded, "gru": gru}) == []
    assert len(claims({"medusa": gru, "grounded": grounded, "gru": gru})) == 5


def test_every_row_is_named_once():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
