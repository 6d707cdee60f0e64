"""Compare the parts of dynamic decoding (DynaMo's table 8) by likelihood: `python -m benchmarks.paper.dynamo_decoding`.

In the paper a strong model compares texts at ε_b = 0.5, where the variants also differ in speed. Here each variant
writes texts at several ε_b with the paper's settings of `generate`. Their mean -log p (dynamo_texts.py) is compared at
equal tokens per pass, by linear interpolation between thresholds; lower means likelier text. At ε_b = 1 every variant
is plain sampling. Finally plain generation and dynamic decoding are timed in turn. Scored texts are stored in --out, so
an interrupted call can be repeated. heads/decoding/dynamo/threshold.py explains the variants of adaptive thresholding.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.paper.dynamo_texts import (
    JUDGES,
    PAPER_REQUEST,
    Figures,
    Texts,
    losses_at_speed,
    resamples,
    with_interval,
    write_texts,
)
from benchmarks.shared import (
    NGRAMS,
    describe_cpu,
    figures_table,
    held_out,
    open_ngrams,
    parser_of,
    run_benchmark,
    say,
    wide_console,
)
from benchmarks.stored_rows import StoredRow, load_or_measure
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.dynamo.threshold import Adaptive
from heads.evaluation.methods import Method, Outcome, Promise, SampledSettings, outcome_of, plain
from heads.evaluation.tables import measure, progress_bar, speed_table
from heads.ngrams.table import NgramTable
from train.data.hidden_states import checksum

THRESHOLDS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8)
TIMED_THRESHOLDS = (0.65, 0.5, 0.35)
PLAIN = "plain sampling (ε_b = 1)"
"""One token per pass; its loss is repeated in every column of speeds, for comparison."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderVariant:
    """A row of the tables: which parts of dynamic decoding are switched on."""

    name: str
    transparency: float = 1.0
    adaptive: Adaptive | None = "otsu_first"
    blur: int = 1


VARIANTS = (
    DecoderVariant(name="CO", adaptive=None),
    DecoderVariant(name="CO + AT, Otsu first"),
    DecoderVariant(name="CO + AT + G-3, Otsu first", blur=3),
    DecoderVariant(name="CO + AT + G-3, static first", adaptive="static_first", blur=3),
    DecoderVariant(name="CO + AT + G-3, at ε_b", adaptive="at_epsilon", blur=3),
    DecoderVariant(name="CO + AT + G-3, blurred", adaptive="blurred", blur=3),
    DecoderVariant(name="CO-0.5 + AT + G-3, Otsu first", transparency=0.5, blur=3),
    DecoderVariant(name="AT + G-3, Otsu first", transparency=0.0, blur=3),
    DecoderVariant(name="none", transparency=0.0, adaptive=None),
)
REFERENCE = VARIANTS[0].name
"""Without adaptive thresholding."""

Sweep = Mapping[str, Mapping[float, Texts]]
"""By variant and ε_b."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    opened = open_heads([options.heads])
    table = open_ngrams(opened, options.ngrams)
    judge = AutoModelForCausalLM.from_pretrained(options.judge, dtype=opened.model.dtype).eval()
    prompts_BT = torch.cat(held_out(opened, options.prompts))
    texts = sweep(console, opened, table, judge, prompts_BT, options)
    say(
        console,
        f"{options.heads}, {options.prompts} held-out prompts, {options.new_tokens} new tokens, {options.draws} "
        f"draw(s); top-k 50, temperature 0.7, repetition penalty 1.1; the other model is {options.judge}; [] is 95 % "
        f"of a paired bootstrap over prompts; {describe_cpu()}",
    )
    for judge_name in JUDGES:
        for printed in at_equal_speed(texts, options.tokens_per_pass, judge_name):
            console.print(printed)
    console.print(at_equal_threshold(texts, 0.5))
    if options.timed_prompts:
        console.print(timed(console, opened, table, judge, list(prompts_BT[: options.timed_prompts].split(1)), options))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_decoding", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument("--judge", default="checkpoints/demo/draft", help="another model of the same tokenizer")
    parser.add_argument("--ngrams", default=NGRAMS, help="table of n-grams; counted if it does not exist")
    parser.add_argument("--out", default="checkpoints/runs/dynamo_decoding", help="scored texts are stored here")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each")
    parser.add_argument("--draws", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--timed-prompts", type=int, default=20, help="number of prompts that are timed; 0: none")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of the timed prompts")
    parser.add_argument(
        "--tokens-per-pass", type=float, nargs="+", default=[1.25, 1.5, 1.75, 2.0], help="where variants are compared"
    )
    return parser


def sweep(
    console: Console, opened: Opened, table: NgramTable, judge: Any, prompts_BT: Tensor, options: argparse.Namespace
) -> Sweep:
    """The texts of every variant at every threshold, with the same seeds; those at ε_b = 1 are written once for all."""
    (token_heads,) = opened.token_heads.values()

    def texts_of(variant: DecoderVariant, threshold: float) -> Texts:
        def decoding(seed: int) -> DynamicDecoding:
            return DynamicDecoding(
                token_heads,
                threshold=threshold,
                cooccurrence=table if variant.transparency else None,
                generator=torch.Generator(prompts_BT.device).manual_seed(seed),
                transparency=variant.transparency,
                adaptive=variant.adaptive,
                blur=variant.blur,
            )

        def measure_here(_: Path) -> Texts:
            return write_texts(opened.model, decoding, judge, prompts_BT, options.new_tokens, options.draws)

        return load_or_measure(stored_texts(variant, threshold, options), Texts, measure_here)

    found: dict[str, dict[float, Texts]] = {}
    with progress_bar(console, "decoding", 1 + len(VARIANTS) * len(THRESHOLDS)) as advance:
        plain_texts = texts_of(VARIANTS[0], 1.0)
        for variant in VARIANTS:
            found[variant.name] = {1.0: plain_texts}
            for threshold in THRESHOLDS:
                found[variant.name][threshold] = texts_of(variant, threshold)
                advance()
    return found


def stored_texts(variant: DecoderVariant, threshold: float, options: argparse.Namespace) -> StoredRow:
    """Where the texts of a variant and a threshold are stored, named by all settings that they depend on."""
    folders = (options.heads, options.judge)
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.safetensors"))]
    files.append(Path(options.ngrams) / "ngrams.json")  # has the checksums of the table's files
    settings = {
        "decoding": dataclasses.asdict(variant) | {"name": None, "threshold": threshold},
        "request": PAPER_REQUEST,
        **{name: getattr(options, name) for name in ("prompts", "new_tokens", "draws")},
        "files": {str(file): checksum(file) for file in files},
    }
    name = re.sub(r"[^\w.-]+", "_", f"{variant.name}-{threshold:g}")
    return StoredRow(folder=Path(options.out), name=name, settings=settings)


def at_equal_speed(texts: Sweep, speeds: Sequence[float], judge: str) -> Iterator[Table]:
    """Two tables: losses at equal speeds, and their differences from those without adaptive thresholding."""
    weights_SB = weights_of(texts)
    plain_S = texts[REFERENCE][1.0].loss(weights_SB, judge)
    losses = {PLAIN: [plain_S] * len(speeds)} | {
        name: [losses_at_speed(list(own.values()), weights_SB, judge, speed) for speed in speeds]
        for name, own in texts.items()
    }
    columns = ("method", *(f"{speed:g}" for speed in speeds))
    table = figures_table(f"\nmean -log p under the {judge} at equal tokens per pass (lower is likelier)", *columns)
    beside = figures_table(f"\nthe same, beside {REFERENCE}", *columns)
    for name, found in losses.items():
        table.add_row(name, *map(with_interval, found))
        pairs = zip(found, losses[REFERENCE], strict=True)
        if name != REFERENCE:
            beside.add_row(name, *(with_interval(values_S - reference_S, "+.3f") for values_S, reference_S in pairs))
    yield table
    yield beside


def at_equal_threshold(texts: Sweep, threshold: float) -> Table:
    title = f"\nat ε_b = {threshold}, as the paper's table 8"
    columns = ("tokens per pass", *(f"-log p, {judge}" for judge in JUDGES), "repeated 4-grams")
    table = figures_table(title, "method", *columns)
    weights_SB = weights_of(texts)
    rows = {name: own[threshold] for name, own in texts.items()}
    for name, row in ({PLAIN: texts[REFERENCE][1.0]} | rows).items():
        table.add_row(
            name,
            with_interval(row.tokens_per_pass(weights_SB), ".2f"),
            *(with_interval(row.loss(weights_SB, judge)) for judge in JUDGES),
            with_interval(row.repeated(weights_SB), ".3f"),
        )
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperSettings(SampledSettings):
    """The settings of appendix A.1, under which prompts are decoded one after another."""

    def generate(self, model: Any, prompt_1T: Tensor, **more: Any) -> Any:
        return super().generate(model, prompt_1T, **PAPER_REQUEST, **more)


def timed(
    console: Console, opened: Opened, table: NgramTable, judge: Any, prompts: list[Tensor], options: argparse.Namespace
) -> Table:
    """Whole calls of plain generation and of dynamic decoding, interleaved, at the paper's settings."""
    (token_heads,) = opened.token_heads.values()
    settings = PaperSettings(new_tokens=options.new_tokens)

    def method(name: str, promises: Promise = "lossy", **given: Any) -> Method:
        decoding = DynamicDecoding(token_heads, cooccurrence=table, **given)

        def run(prompt_1T: Tensor) -> Outcome:
            output = settings.generate(opened.model, prompt_1T, custom_generate=decoding, return_dict_in_generate=True)
            return outcome_of(output, prompt_1T)

        return Method(name=name, run=run, promises=promises)

    methods = [
        plain(opened.model, settings),
        method("CO + AT, ε_b 1", "same text", threshold=1.0),
        *(method(f"CO + AT, ε_b {value:g}", threshold=value) for value in TIMED_THRESHOLDS),
        method("CO + AT + G-3, static first, ε_b 0.5", threshold=0.5, adaptive="static_first", blur=3),
    ]
    rows = measure(console, opened.model, methods, settings, prompts, options.repeats, "timing", other_model=judge)
    title = f"\n{len(prompts)} of the prompts one by one, {options.repeats} interleaved repeats"
    return speed_table(rows, title)


def weights_of(texts: Sweep) -> Figures:
    return resamples(len(texts[REFERENCE][1.0].tokens_B))


if __name__ == "__main__":
    run_benchmark(main)
