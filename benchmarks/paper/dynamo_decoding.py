"""Table 8 of DynaMo by likelihood: `python -m benchmarks.paper.dynamo_decoding`. Which parts of dynamic decoding pay.

The paper lets a strong model judge texts at ε_b = 0.5, where its variants also differ in speed. Here each variant is
swept over ε_b, every text is scored by the backbone that wrote it (mean -log p of the new tokens, plain and
unprocessed), and the scores are compared at equal tokens per pass, by linear interpolation. Lower is likelier text.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from heads.backbone.model import Backbone
from heads.checkpoint.opening import Opened, open_heads
from heads.cli.folders import count_ngrams_command
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.methods import end_tokens
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine, progress_bar
from heads.ngrams.table import NgramTable
from train.run import explain_errors

THRESHOLDS = (0.2, 0.35, 0.5, 0.65, 0.8, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A row: what is on."""

    name: str
    transparency: float
    adaptive: bool
    blur: int


VARIANTS = (
    Variant(name="CO + AT + G-3", transparency=1.0, adaptive=True, blur=3),
    Variant(name="CO + AT", transparency=1.0, adaptive=True, blur=1),
    Variant(name="CO", transparency=1.0, adaptive=False, blur=1),
    Variant(name="CO-0.5 + AT + G-3", transparency=0.5, adaptive=True, blur=3),
    Variant(name="AT + G-3", transparency=0.0, adaptive=True, blur=3),
    Variant(name="none", transparency=0.0, adaptive=False, blur=1),
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
    table = open_table(options, opened)
    prompts_BT = torch.cat(default_prompts(opened.source, opened.tokenizer, options.prompts))
    points = sweep(console, opened, table, prompts_BT.to(opened.model.device), options)
    machine = describe_machine(opened.model.device)
    console.print(
        f"{options.heads}, {options.prompts} held-out prompts, {options.new_tokens} new tokens, {options.draws} draws; "
        f"top-k 50, temperature 0.7, repetition penalty 1.1; {machine['cpu']}, {machine['threads']} threads",
        highlight=False,
        soft_wrap=True,
    )
    console.print(at_equal_speed(points, options.tokens_per_pass))
    console.print(at_equal_threshold(points, 0.5))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.dynamo_decoding", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads (default: %(default)s)")
    parser.add_argument(
        "--ngrams",
        default="checkpoints/runs/demo-ngrams",
        help="table of n-grams; counted from the demo corpus where it does not exist (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=2, help="texts for each prompt (default: %(default)s)")
    parser.add_argument(
        "--tokens-per-pass", type=float, nargs="+", default=[1.25, 1.5, 1.75, 2.0], help="where variants are compared"
    )
    return parser


def open_table(options: argparse.Namespace, opened: Opened) -> NgramTable:
    if not Path(options.ngrams).is_dir():
        count_ngrams_command(
            opened.source,
            ["python-stdlib"],
            Path(options.ngrams),
            heldout_list=str(Path(opened.source) / "training.json"),
            order=3,
            min_count=1,
            workers=0,
        )
    return NgramTable.open(options.ngrams, opened.tokenizer)


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
    variant: Variant,
    threshold: float,
    prompts_BT: Tensor,
    options: argparse.Namespace,
) -> Point:
    """Tokens per pass and the mean -log p of what was written, over all prompts and draws."""
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
    """-log p of each new token under the backbone; what follows a row's end of text is left out."""
    final_BLD, _ = backbone.forward(tokens_BL, use_cache=False)
    logits_BNV = backbone.logits(final_BLD[:, prompt_length - 1 : -1]).float()
    labels_BN = tokens_BL[:, prompt_length:]
    losses_BN = torch.nn.functional.cross_entropy(logits_BNV.transpose(1, 2), labels_BN, reduction="none")
    ends_BN = torch.isin(labels_BN, labels_BN.new_tensor(end_tokens(backbone.model)))
    is_text_BN = ends_BN.cumsum(dim=1) - ends_BN.long() == 0
    return losses_BN[is_text_BN]


def interpolate(points: Sequence[Point], tokens_per_pass: float) -> float | None:
    """The loss at a speed, between the two neighbouring thresholds; None outside what was swept.

    >>> a = Point(name="", threshold=0.9, tokens_per_pass=1.0, loss=2.0)
    >>> b = Point(name="", threshold=0.1, tokens_per_pass=2.0, loss=4.0)
    >>> interpolate([b, a], 1.25), interpolate([a, b], 2.5)
    (2.5, None)
    """
    ordered = sorted(points, key=lambda point: point.tokens_per_pass)
    for low, high in itertools.pairwise(ordered):
        if low.tokens_per_pass <= tokens_per_pass <= high.tokens_per_pass != low.tokens_per_pass:
            share = (tokens_per_pass - low.tokens_per_pass) / (high.tokens_per_pass - low.tokens_per_pass)
            return low.loss + share * (high.loss - low.loss)
    return None


def at_equal_speed(points: Sequence[Point], speeds: Sequence[float]) -> Table:
    table = Table(
        title="\nmean -log p of the text under the backbone at equal tokens per pass (lower is likelier)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method")
    for speed in speeds:
        table.add_column(f"{speed:g}", justify="right")
    for variant in VARIANTS:
        own = [point for point in points if point.name == variant.name]
        found = [interpolate(own, speed) for speed in speeds]
        table.add_row(variant.name, *("–" if value is None else f"{value:.3f}" for value in found))
    return table


def at_equal_threshold(points: Sequence[Point], threshold: float) -> Table:
    table = Table(
        title=f"\nat ε_b = {threshold}, as the paper's table 8",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("method", "tokens per pass", "mean -log p"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for point in points:
        if point.threshold == threshold:
            table.add_row(point.name, f"{point.tokens_per_pass:.2f}", f"{point.loss:.3f}")
    return table


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    explain_errors(main)
