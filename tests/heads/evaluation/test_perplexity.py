"""Perplexities against plain loops over positions, with plain forwards of the backbone and step-by-step drafting."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from matplotlib.figure import Figure
from throwaway_families import FAMILIES, make_heads
from tiny import VOCAB, random_tokens, shared_model, tiny_model
from torch import Tensor
from typer.testing import CliRunner

from heads.backbone.model import Backbone, CommitPlan
from heads.checkpoint import save_load
from heads.cli.main import app
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.dynamo.settings import JointConfig
from heads.evaluation.lossy.dynamic_perplexity import (
    DecisionSettings,
    DynamicPerplexity,
    measure_dynamic,
    predict_batch,
    walk_blocks,
)
from heads.evaluation.perplexity import Estimate, measure_perplexity
from heads.evaluation.perplexity_report import draw_dynamic, draw_validation_loss
from heads.evaluation.predictions import Block
from heads.families import create
from heads.interface.token_heads import TokenHeads
from heads.ngrams.counting import count_ngrams

NUM_HEADS = 2
LENGTHS = (14, 9, 4, 11)
BLOCKS = [Block(random_tokens(length, seed=30 + i), text=i // 2) for i, length in enumerate(LENGTHS)]
UNGROUNDED = [family for family in FAMILIES if family in ("medusa", "dynamo", "kv")]
THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 1.0)


def heads_of(family: str, name: str = "llama") -> TokenHeads:
    return make_heads(family, Backbone(shared_model(name, "sdpa", torch.float64)), num_heads=NUM_HEADS)


@torch.no_grad()
def logits_behind(token_heads: TokenHeads, text: list[int], following: list[int]) -> list[Tensor]:
    """Logits (V,) of x_{t+1} from a plain forward of x_{1:t}, of x_{t+2}, … by drafting along true tokens."""
    backbone, tokens_1T = token_heads.backbone, torch.tensor([text])
    found = [backbone.model(tokens_1T).logits[0, -1]]
    valid_1T = torch.ones_like(tokens_1T, dtype=torch.bool)
    _, output = backbone.prefill(tokens_1T, valid_1T, token_heads.taps)
    plan = CommitPlan.whole(valid_1T)
    level = token_heads.first_level(token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan))
    for k, token in enumerate(following[: token_heads.num_heads], start=1):
        hidden_1D, level = token_heads.step(k, level, torch.tensor([token]), torch.tensor([0]))
        found.append(token_heads.projection(k)(hidden_1D)[0])
    return found


@functools.cache
def all_log_p(token_heads: TokenHeads, tokens: tuple[int, ...], t: int) -> list[float]:
    """log p of the true x_{t+1}, x_{t+2}, … as far as heads and text go."""
    text, following = list(tokens[: t + 1]), list(tokens[t + 1 :])
    logits = logits_behind(token_heads, text, following[:-1])
    return [float(torch.log_softmax(at_V, dim=0)[token]) for at_V, token in zip(logits, following, strict=False)]


def log_p(token_heads: TokenHeads, tokens: list[int], t: int, n: int) -> float:
    """log p(x_{t+n} | …) with t counted from 0."""
    return all_log_p(token_heads, tuple(tokens), t)[n - 1]


def perplexity(logs: list[float]) -> float:
    return math.exp(-sum(logs) / len(logs))


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexities_are_those_of_a_loop_over_positions(family: str) -> None:
    token_heads = heads_of(family)
    found = measure_perplexity(token_heads, BLOCKS)
    texts = [block.tokens_T.tolist() for block in BLOCKS]
    for n in range(1, NUM_HEADS + 2):
        where = [(text, t) for text in texts for t in range(len(text) - n)]
        single = [log_p(token_heads, text, t, n) for text, t in where]
        joint = [sum(log_p(token_heads, text, t, i) for i in range(1, n + 1)) / n for text, t in where]
        assert found.nth[n - 1].terms == found.joint[n - 1].terms == len(where)
        assert found.nth[n - 1].value == pytest.approx(perplexity(single), rel=1e-5)
        assert found.joint[n - 1].value == pytest.approx(perplexity(joint), rel=1e-5)


def test_small_chunks_and_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    token_heads = heads_of("medusa")
    whole = measure_perplexity(token_heads, BLOCKS), measure_dynamic(token_heads, BLOCKS, THRESHOLDS)
    monkeypatch.setattr("heads.evaluation.predictions.CHUNK_ELEMENTS", 5 * VOCAB)
    monkeypatch.setattr("heads.evaluation.perplexity.BATCH", 1)
    single = measure_perplexity(token_heads, BLOCKS), measure_dynamic(token_heads, BLOCKS, THRESHOLDS)
    for one, other in zip(whole[0].nth + whole[0].joint, single[0].nth + single[0].joint, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5)
    for at, again in zip(whole[1], single[1], strict=True):
        assert at.perplexity.value == pytest.approx(again.perplexity.value, rel=1e-5)
        assert at.tokens_per_pass == again.tokens_per_pass


@pytest.mark.parametrize(
    ("nth", "printed"),
    [
        ((18.3, 111.4), 45.2),  # DynaMo-77M-T3, PPL_12: 45.15
        ((18.3, 111.4, 262.0), 81.2),  # its PPL_123: 81.13 of the printed figures
        ((18.3, 111.5), 45.2),  # DynaMo-99M-T2
        ((18.3, 112.4), 45.4),  # DynaMo-74M-T2
        ((18.3, 86.7), 39.9),  # DynaMo-77M-T2: 39.83
        ((18.3, 296.4), 73.7),  # DynaMo-74M-T2 (C): 73.65
        ((20.2, 119.1), 49.0),  # DynaMo-74M-T2-H: 49.05
    ],
)
def test_the_papers_joint_perplexities_are_geometric_means(nth: tuple[float, ...], printed: float) -> None:
    """Table 9, as far as its figures are rounded; six of its twelve rows are no geometric means."""

    def mean(shift: float) -> float:
        logs = [math.log(ppl + shift) for ppl in nth]
        return Estimate.of(sums=[-sum(logs)], counts=[len(nth)], texts=[0]).value

    assert mean(-0.05) <= printed + 0.05
    assert mean(0.05) >= printed - 0.05
    assert mean(0) == pytest.approx(printed, abs=0.15)


def test_the_joint_perplexity_is_the_geometric_mean_over_the_same_positions() -> None:
    token_heads = heads_of("medusa")
    blocks = [Block(block.tokens_T[: NUM_HEADS + 2], block.text) for block in BLOCKS]  # one position has all places
    found = measure_perplexity(token_heads, blocks)
    at_first = [
        perplexity([log_p(token_heads, block.tokens_T.tolist(), 0, n) for block in blocks])
        for n in range(1, NUM_HEADS + 2)
    ]
    assert found.joint[-1].value == pytest.approx(math.prod(at_first) ** (1 / (NUM_HEADS + 1)), rel=1e-5)


def test_intervals_come_from_texts_and_not_from_blocks() -> None:
    one = Estimate.of(sums=[-3.0, -5.0], counts=[2, 2], texts=[0, 0])
    assert (one.low, one.high) == (None, None)
    apart = Estimate.of(sums=[-3.0, -5.0, -3.0, -5.0], counts=[2, 2, 2, 2], texts=[0, 1, 2, 3])
    paired = Estimate.of(sums=[-3.0, -5.0, -3.0, -5.0], counts=[2, 2, 2, 2], texts=[0, 0, 1, 1])
    assert apart.value == paired.value
    assert apart.low is not None
    assert paired.low is not None
    assert apart.low < apart.value
    assert paired.low == pytest.approx(paired.value)  # the two texts are alike, their blocks are not
    with pytest.raises(ValueError, match="NaN"):
        Estimate.of(sums=[math.nan], counts=[1], texts=[0])
    assert Estimate.of(sums=[-math.inf], counts=[1], texts=[0]).value == math.inf


def first_order(token_heads: TokenHeads, text: list[int], threshold: float, table: Any) -> int:
    """How many tokens the first pass of dynamic decoding emits behind a text."""
    output = token_heads.backbone.model.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.long),
        custom_generate=DynamicDecoding(token_heads, threshold=threshold, cooccurrence=table),
        do_sample=True,
        temperature=0.7,
        top_k=50,
        repetition_penalty=1.1,
        max_new_tokens=NUM_HEADS + 2,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    drafted = output.stats.drafted[0]  # the first token of a pass is the backbone's
    return next((i for i, own in enumerate(drafted) if i and not own), len(drafted))


@pytest.mark.parametrize(("family", "masked"), [*((family, False) for family in UNGROUNDED), ("dynamo", True)])
def test_a_walk_decides_as_dynamic_decoding_does(family: str, masked: bool, tmp_path: Path) -> None:
    token_heads = heads_of(family)
    table = None
    if masked:
        texts = [random_tokens(200, seed=seed).tolist() for seed in range(3)]
        table = count_ngrams(texts, folder=tmp_path / "table", order=3, vocab_size=VOCAB)
    orders = set()
    for threshold in (0.5, 0.7, 0.8):  # 0 and 1 are below
        settings = DecisionSettings(config=JointConfig(threshold=threshold), cooccurrence=table)
        walks = walk_blocks(predict_batch(token_heads, BLOCKS, settings), settings, VOCAB)
        logs, decisions = [], 0
        for block, steps in zip(BLOCKS, walks, strict=True):
            tokens, t = block.tokens_T.tolist(), 0
            for at, n in steps:
                assert at == t
                assert n == first_order(token_heads, tokens[: t + 1], threshold, table), (threshold, t)
                logs += [log_p(token_heads, tokens, t, i) for i in range(1, n + 1)]
                t, decisions = t + n, decisions + 1
                orders.add(n)
            assert t >= len(tokens) - 1 - NUM_HEADS > at
        (found,) = measure_dynamic(token_heads, BLOCKS, [threshold], DecisionSettings(cooccurrence=table))
        assert found.perplexity.terms == len(logs)
        assert found.perplexity.value == pytest.approx(perplexity(logs), rel=1e-5)
        assert found.tokens_per_pass == pytest.approx(len(logs) / decisions)
    assert orders == {1, 2, 3}, "thresholds of this test reach every order"


def test_the_ends_of_a_sweep_are_one_token_and_all_tokens() -> None:
    token_heads = heads_of("medusa")
    one, all_ = measure_dynamic(token_heads, BLOCKS, [1.0, 0.0])
    texts = [block.tokens_T.tolist() for block in BLOCKS]
    where = [(text, t) for text in texts for t in range(len(text) - NUM_HEADS - 1)]
    assert one.tokens_per_pass == 1
    assert one.perplexity.value == pytest.approx(perplexity([log_p(token_heads, x, t, 1) for x, t in where]), rel=1e-5)
    assert all_.tokens_per_pass == NUM_HEADS + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_heads": "grounded"}, "grounded"),
        ({"blocks": []}, "longer texts"),
        ({"blocks": [Block(random_tokens(3), 0)]}, "shortest block has 3 tokens"),
        ({"thresholds": [1.5]}, "threshold=1.5"),
        ({"settings": lambda: DecisionSettings(temperature=0)}, "temperature=0"),
        ({"settings": lambda: DecisionSettings(penalty=0.5)}, "penalty=0.5"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"token_heads": "medusa", "blocks": BLOCKS, "thresholds": [0.5], "settings": DecisionSettings, **change}
    with pytest.raises(ValueError, match=message):
        measure_dynamic(heads_of(given["token_heads"]), given["blocks"], given["thresholds"], given["settings"]())


def points(*values: tuple[float, float, float]) -> list[DynamicPerplexity]:
    return [
        DynamicPerplexity(
            threshold=threshold, perplexity=Estimate(value=v, low=v - 1, high=v + 1, terms=9), tokens_per_pass=speed
        )
        for threshold, speed, v in values
    ]


def test_the_curve_holds_the_sweep_and_names_its_ends() -> None:
    axes = Figure().subplots()
    draw_dynamic(axes, points((0.0, 3.0, 40.0), (0.5, 1.5, 20.0), (1.0, 1.0, 10.0)))
    curve, reference = axes.get_lines()
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1.0, 1.5, 3.0], [10.0, 20.0, 40.0])
    assert set(reference.get_ydata()) == {10.0}
    assert {text.get_text() for text in axes.texts} == {"PPL$_1$ = 10.0", "ε$_b$ = 1", "0.5", "0"}


def write_metrics(path: Path) -> Path:
    lines = [
        {"step": step, "eval_head1_top1": 0.1, "eval_backbone_loss": 2.0, "eval_head1_loss": 5 - step / 10,
         "eval_head2_loss": 6 - step / 10, "eval_multi_token_loss": (13 - step / 5) / 3}
        for step in (0, 10)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_loss_curves_are_the_runs_and_named(tmp_path: Path) -> None:
    axes = Figure().subplots()
    draw_validation_loss(axes, write_metrics(tmp_path / "metrics.jsonl"))
    ends = [line.get_ydata()[-1] for line in axes.get_lines()]
    assert ends == pytest.approx([2.0, 4.0, 5.0, 11 / 3])
    assert {text.get_text() for text in axes.texts} == {"backbone  2.00", "head 1  4.00", "head 2  5.00", "mean  3.67"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone `base`, heads `medusa` and `grounded` on it, and a table of n-grams `table`."""
    folder = tmp_path_factory.mktemp("demo")
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.config.eos_token_id = model.config.pad_token_id = model.config.bos_token_id = EOS
    model.config.name_or_path = str(folder / "base")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    held_out = {"heldout_files": ["copyreg.py", "colorsys.py"]}
    (folder / "base" / "training.json").write_text(json.dumps(held_out), encoding="utf-8")
    for family in ("medusa", "grounded"):
        save_load.save(create(family, model, num_heads=2), folder / family)
    texts = [random_tokens(300, seed=seed, vocab=NUM_TOKENS).tolist() for seed in range(2)]
    count_ngrams(texts, folder=folder / "table", order=3, vocab_size=NUM_TOKENS)
    (folder / "text.txt").write_text("def main():\n    return 1\n" * 4, encoding="utf-8")
    (folder / "short.txt").write_text("a\n", encoding="utf-8")
    write_metrics(folder / "metrics.jsonl")
    return folder


MAPS = ["{folder}/medusa", "--heatmaps", "a.png", "--prompt", "a", "--cooccurrence", "{folder}/table"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_the_command_measures_held_out_text_and_writes_all_it_found(folder: Path, tmp_path: Path) -> None:
    files = ["--json", tmp_path / "found.json", "--picture", tmp_path / "new" / "ppl.png"]
    small = ["--blocks", 3, "--block-tokens", 24, "--thresholds", "0,0.5,1", "--metrics", "perplexity,accuracy"]
    result = run(folder / "medusa", *small, "--cooccurrence", folder / "table", *files)
    assert result.exit_code == 0, result.stderr
    assert all(name in result.stdout for name in ("PPL_1", "PPL_2", "PPL_3", "PPL_12", "PPL_123", "ε_b", "top-1"))
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["perplexity"]["PPL_1"]["terms"] == 3 * 23
    assert [point["threshold"] for point in found["dynamic"]] == [0.0, 0.5, 1.0]
    assert [point["tokens_per_pass"] for point in found["dynamic"]][::2] == [3.0, 1.0]
    assert len(found["accuracy"]) == 3
    assert found["text"]["blocks"] == 3
    assert found["settings"]["cooccurrence"] == str(folder / "table")
    assert (tmp_path / "new" / "ppl.png").stat().st_size > 1000


def test_grounded_heads_have_no_sweep_and_the_command_says_so(folder: Path) -> None:
    result = run(folder / "grounded", "--text", folder / "text.txt", "--block-tokens", 30)
    assert result.exit_code == 0, result.stderr
    assert "true tokens in between" in result.stdout
    assert "ε_b" not in result.stdout
    assert "PPL_d" in result.stderr


def test_a_runs_losses_are_drawn_without_heads(folder: Path, tmp_path: Path) -> None:
    result = run("--training", folder / "metrics.jsonl", "--picture", tmp_path / "loss.png")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_heat_maps_are_drawn_without_a_measurement(folder: Path, tmp_path: Path) -> None:
    asked = ["--heatmaps", tmp_path / "joint.png", "--prompt", "def main", "--cooccurrence", folder / "table"]
    result = run(folder / "medusa", *asked)
    assert result.exit_code == 0, result.stderr
    assert "PPL" not in result.stdout
    assert (tmp_path / "joint.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/nothing"], "holds no heads.json"),
        (["{folder}/medusa", "--metrics", "perplexty"], "Did you mean 'perplexity'?"),
        (["{folder}/medusa", "--thresholds", "0,1.5"], "--thresholds"),
        (["{folder}/medusa", "--thresholds", "0,a"], "--thresholds"),
        (["{folder}/medusa", "--text", "{folder}/no.txt"], "does not exist"),
        (["{folder}/medusa", "--text", "{folder}/short.txt"], "longer texts"),
        (["{folder}/medusa", "--block-tokens", "3"], "--block-tokens"),
        (["{folder}/medusa", "--block-tokens", "9999"], "positions"),
        (["{folder}/grounded", "--thresholds", "0.5"], "grounded"),
        (["{folder}/medusa", "--heatmaps", "a.png"], "--prompt"),
        (["{folder}/medusa", "--prompt", "a"], "--heatmaps"),
        (["{folder}/medusa", "--heatmaps", "a.png", "--prompt", "a"], "--cooccurrence"),
        (["{folder}/medusa", "--metrics", "accuracy", "--picture", "a.png"], "nothing to draw"),
        (["{folder}/medusa", "--metrics", "accuracy", "--thresholds", "0.5"], "--thresholds is about perplexity"),
        (["{folder}/medusa", "--metrics", "accuracy", "--cooccurrence", "t"], "--cooccurrence is about perplexity"),
        (["{folder}/medusa", "--metrics", "accuracy", "--temperature", "0.7"], "--temperature is about perplexity"),
        (
            ["{folder}/medusa", "--metrics", "accuracy", "--top-k", "50", "--repetition-penalty", "2"],
            "--top-k, --repetition-penalty is about perplexity",
        ),
        (["{folder}/grounded", "--top-k", "5"], "grounded"),
        (["{folder}/grounded", "--cooccurrence", "{folder}/table"], "grounded"),
        (["{folder}/no", "--temperature", "0"], "a temperature is above 0"),
        ([*MAPS, "--block-tokens", "256"], "--block-tokens is about measuring"),
        ([*MAPS, "--repetition-penalty", "2"], "--repetition-penalty is about perplexity"),
        (["--training", "m.jsonl", "--picture", "a.png", "--json", "a.json"], "--json is about measuring"),
        (["--training", "m.jsonl", "--picture", "a.png", "--blocks", "2"], "--blocks is about measuring"),
        (
            ["--training", "m.jsonl", "--picture", "a.png", "--dtype", "auto", "--backbone", "b"],
            "--backbone, --dtype is about heads, and none are loaded",
        ),
        ([], "nothing to evaluate"),
        (["--training", "{folder}/metrics.jsonl"], "--picture"),
        (["--training", "{folder}/no.jsonl", "--picture", "a.png"], "does not exist"),
    ],
)
def test_what_a_user_can_cause_is_one_sentence(folder: Path, arguments: list[str], message: str) -> None:
    result = run(*(argument.format(folder=folder) for argument in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
