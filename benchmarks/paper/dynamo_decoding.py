"""Table 8 of DynaMo by likelihood: `python -m benchmarks.paper.dynamo_decoding`. Which parts of dynamic decoding pay.

The paper lets a strong model judge texts at ε_b = 0.5, where its variants also differ in speed. Here each variant is
swept over ε_b, every text is scored by the backbone that wrote it (mean -log p of the new tokens, plain and
unprocessed), and the scores are compared at equal tokens per pass, by linear interpolation. Lower is likelier text.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.shared import (
    NGRAMS,
    describe_cpu,
    figures_table,
    held_out,
    interpolate,
    open_ngrams,
    or_dash,
    parser_of,
    run_benchmark,
    say,
)
from heads.backbone.model import Backbone
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.methods import end_tokens
from heads.evaluation.tables import progress_bar
from heads.ngrams.table import NgramTable

THRESHOLDS = (0.2, 0.35, 0.5, 0.65, 0.8, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderVariant:
    """A row: which parts of dynamic decoding are switched on."""

    name: str
    transparency: float
    adaptive: bool
    blur: int


VARIANTS = (
    DecoderVariant(name="CO + AT + G-3", transparency=1.0, adaptive=True, blur=3),
    DecoderVariant(name="CO + AT", transparency=1.0, adaptive=True, blur=1),
    DecoderVariant(name="CO", transparency=1.0, adaptive=False, blur=1),
    DecoderVariant(name="CO-0.5 + AT + G-3", transparency=0.5, adaptive=True, blur=3),
    DecoderVariant(name="AT + G-3", transparency=0.0, adaptive=True, blur=3),
    DecoderVariant(name="none", transparency=0.0, adaptive=False, blur=1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One variant at one ε_b."""

    name: str
    threshold: float
    tokens_per_pass: float
    loss: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console()
    opened = open_heads([options.heads])
    table = open_ngrams(opened, options.ngrams)
    prompts_BT = torch.cat(held_out(opened, options.prompts))
    points = sweep(console, opened, table, prompts_BT, options)
    say(
        console,
        f"{options.heads}, {options.prompts} held-out prompts, {options.new_tokens} new tokens, {options.draws} draws; "
        f"top-k 50, temperature 0.7, repetition penalty 1.1; {describe_cpu()}",
    )
    console.print(at_equal_speed(points, options.tokens_per_pass))
    console.print(at_equal_threshold(points, 0.5))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_decoding", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument(
        "--ngrams",
        default=NGRAMS,
        help="table of n-grams; counted from the demo corpus where it does not exist",
    )
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each")
    parser.add_argument("--draws", type=int, default=2, help="texts for each prompt")
    parser.add_argument(
        "--tokens-per-pass", type=float, nargs="+", default=[1.25, 1.5, 1.75, 2.0], help="where variants are compared"
    )
    return parser


def sweep(
    console: Console, opened: Opened, table: NgramTable, prompts_BT: Tensor, options: argparse.Namespace
) -> list[Point]:
    """Every variant at every threshold, the same seeds for all."""
    points = []
    with progress_bar(console, "decoding", len(VARIANTS) * len(THRESHOLDS)) as advance:
        for variant in VARIANTS:
            for threshold in THRESHOLDS:
                points.append(measure(opened, table, variant, threshold, prompts_BT, options))
                advance()
    return points


def measure(
    opened: Opened,
    table: NgramTable,
    variant: DecoderVariant,
    threshold: float,
    prompts_BT: Tensor,
    options: argparse.Namespace,
) -> Point:
    """Tokens per pass and the mean -log p of the new tokens, over all prompts and seeds."""
    (token_heads,) = opened.token_heads.values()
    tokens = passes = 0
    losses: list[Tensor] = []
    for seed in range(options.draws):
        decoding = DynamicDecoding(
            token_heads,
            threshold=threshold,
            cooccurrence=table if variant.transparency else None,
            generator=torch.Generator(prompts_BT.device).manual_seed(seed),
            transparency=variant.transparency,
            adaptive=variant.adaptive,
            blur=variant.blur,
        )
        output = opened.model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=options.new_tokens,
            do_sample=True,
            top_k=50,
            temperature=0.7,
            repetition_penalty=1.1,
            return_dict_in_generate=True,
            custom_generate=decoding,
        )
        tokens += output.stats.tokens
        passes += output.stats.row_passes
        losses.append(new_token_losses(token_heads.backbone, output.sequences, prompts_BT.shape[1]))
    loss = float(torch.cat(losses).mean())
    return Point(name=variant.name, threshold=threshold, tokens_per_pass=tokens / passes, loss=loss)


@torch.no_grad()
def new_token_losses(backbone: Backbone, tokens_BL: Tensor, prompt_length: int) -> Tensor:
    """-log p of each new token under the backbone, up to each row's end of text."""
    final_BLD, _ = backbone.forward(tokens_BL, use_cache=False)
    logits_BNV = backbone.logits(final_BLD[:, prompt_length - 1 : -1]).float()
    labels_BN = tokens_BL[:, prompt_length:]
    losses_BN = torch.nn.functional.cross_entropy(logits_BNV.transpose(1, 2), labels_BN, reduction="none")
    ends_BN = torch.isin(labels_BN, labels_BN.new_tensor(end_tokens(backbone.model)))
    is_text_BN = ends_BN.cumsum(dim=1) - ends_BN.long() == 0
    return losses_BN[is_text_BN]


def at_equal_speed(points: Sequence[Point], speeds: Sequence[float]) -> Table:
    title = "\nmean -log p of the text under the backbone at equal tokens per pass (lower is likelier)"
    table = figures_table(title, "method", *(f"{speed:g}" for speed in speeds))
    for variant in VARIANTS:
        own = [(point.tokens_per_pass, point.loss) for point in points if point.name == variant.name]
        table.add_row(variant.name, *(or_dash(interpolate(own, speed)) for speed in speeds))
    return table


def at_equal_threshold(points: Sequence[Point], threshold: float) -> Table:
    title = f"\nat ε_b = {threshold}, as the paper's table 8"
    table = figures_table(title, "method", "tokens per pass", "mean -log p")
    for point in points:
        if point.threshold == threshold:
            table.add_row(point.name, f"{point.tokens_per_pass:.2f}", f"{point.loss:.3f}")
    return table


if __name__ == "__main__":
    run_benchmark(main)
