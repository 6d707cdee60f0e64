"""Measure one folder of heads on held-out blocks: perplexity, PPL_d (if the heads allow it) and accuracy.

`evaluate` runs the requested measurements; an `Evaluation` shows them as tables, as panels of a picture and as JSON
with everything that is needed to repeat them. `headway evaluate` is its command.
"""
# R row (a position of some block), C row of a chunk, V vocabulary

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from heads.checkpoint.opening import Opened
from heads.decoding.dynamo.cooccurrence import open_cooccurrence
from heads.evaluation.accuracy import HeadAccuracy
from heads.evaluation.lossy.dynamic_perplexity import DecisionSettings, DynamicPerplexity, measure_dynamic
from heads.evaluation.perplexity import Perplexity, measure_perplexity
from heads.evaluation.perplexity_report import (
    Panel,
    accuracy_table,
    draw_dynamic,
    dynamic_table,
    perplexity_rows,
    perplexity_table,
)
from heads.evaluation.predictions import BATCH, Block, predict, stack
from heads.evaluation.tables import describe_machine, progress_bar, versions
from heads.interface.token_heads import TokenHeads
from heads.ngrams.table import NgramTable
from heads.validation import nearest

METRICS = ("perplexity", "accuracy")
THRESHOLDS = ",".join(f"{i / 10:g}" for i in range(11))
"""ε_b at which PPL_d is measured by default."""


@dataclass(kw_only=True)
class Evaluation:
    """Measurements of one folder of heads; those that were not requested are None or empty.

    Attributes:
        settings: how PPL_d decides n.
        table_folder: folder of the co-occurrence table in these settings.
    """

    name: str
    token_heads: TokenHeads
    blocks: Sequence[Block]
    settings: DecisionSettings
    table_folder: Path | None = None
    perplexity: Perplexity | None = None
    dynamic: list[DynamicPerplexity] = field(default_factory=list)
    accuracy: list[HeadAccuracy] = field(default_factory=list)

    @property
    def num_texts(self) -> int:
        return len({block.text for block in self.blocks})

    def tables(self) -> list[Table]:
        """One table for each measurement."""
        title = f"{self.name}, {len(self.blocks)} blocks of {self.num_texts} texts"
        found = [accuracy_table(self.accuracy, title)] if self.accuracy else []
        if self.perplexity is not None:
            given = ", given the true tokens in between" if self.token_heads.grounded else ""
            found.append(perplexity_table(self.perplexity, title + given))
        if self.dynamic:
            masked = "co-occurrence masks" if self.table_folder else "no co-occurrence mask"
            found.append(dynamic_table(self.dynamic, f"{title}, {masked}"))
        return found

    def panels(self) -> list[Panel]:
        """The panels of its picture."""
        return [partial(draw_dynamic, points=self.dynamic)] if self.dynamic else []

    def as_dict(self) -> dict[str, Any]:
        """All figures, settings, machine and command, for JSON."""
        perplexities = {} if self.perplexity is None else dict(perplexity_rows(self.perplexity))
        config = dataclasses.asdict(self.settings.config)
        del config["threshold"]
        settings = {"temperature": self.settings.temperature, "repetition_penalty": self.settings.penalty, **config}
        return {
            "heads": self.name,
            "perplexity": {name: dataclasses.asdict(estimate) for name, estimate in perplexities.items()},
            "given_true_tokens_between": self.token_heads.grounded,
            "dynamic": [dataclasses.asdict(point) for point in self.dynamic],
            "accuracy": [
                {name: getattr(meter, name) for name in ("top1", "top5", "agreement", "loss")}
                for meter in self.accuracy
            ],
            "text": {
                "blocks": len(self.blocks),
                "texts": self.num_texts,
                "tokens": sum(len(block.tokens_T) for block in self.blocks),
            },
            "settings": settings | {"cooccurrence": None if self.table_folder is None else str(self.table_folder)},
            "machine": describe_machine(self.token_heads.backbone.device),
            "versions": versions(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        }


def evaluate(
    opened: Opened,
    blocks: Sequence[Block],
    *,
    metrics: Sequence[str],
    thresholds: Sequence[float],
    settings: DecisionSettings,
    table_folder: Path | None,
    console: Console,
) -> Evaluation:
    """Run the measurements under a progress bar.

    Args:
        metrics: names in METRICS.
        thresholds: values of ε_b at which PPL_d is measured; may be empty.
        settings: how PPL_d decides n, without a co-occurrence table.
        table_folder: the table that `headway count-ngrams` made for the co-occurrence masks.

    Raises:
        ValueError: as `measure_perplexity` and `measure_dynamic`.
    """
    ((name, token_heads),) = opened.token_heads.items()
    ngrams = None if table_folder is None else NgramTable.open(table_folder, opened.tokenizer)
    table = open_cooccurrence(ngrams, token_heads.num_heads + 1, token_heads.backbone.vocab_size)
    settings = dataclasses.replace(settings, cooccurrence=table)
    found = Evaluation(name=name, token_heads=token_heads, blocks=blocks, settings=settings, table_folder=table_folder)
    sweeps = len(thresholds) if "perplexity" in metrics else 0
    with progress_bar(console, "measuring", -(-len(blocks) // BATCH) * (len(metrics) + sweeps)) as report:
        if "accuracy" in metrics:
            found.accuracy = measure_accuracy(token_heads, blocks, report)
        if "perplexity" in metrics:
            found.perplexity = measure_perplexity(token_heads, blocks, report)
        if sweeps:
            found.dynamic = measure_dynamic(token_heads, blocks, thresholds, settings, report)
    return found


def measure_accuracy(
    token_heads: TokenHeads, blocks: Sequence[Block], report: Callable[[], None]
) -> list[HeadAccuracy]:
    """The backbone's accuracy, then each head's, over all positions of all blocks.

    Args:
        report: called after every batch of BATCH blocks.
    """
    meters = [HeadAccuracy() for _ in range(token_heads.num_heads + 1)]
    for start in range(0, len(blocks), BATCH):
        stacked = [
            stack(blocks[start : start + BATCH], n, token_heads.backbone.device) for n in range(1, len(meters) + 1)
        ]
        tokens_R = stacked[0][0].flatten()
        choices_R = torch.zeros_like(tokens_R)
        predictions = predict(token_heads, stacked[0][0], [rows_R for _, rows_R, _ in stacked])
        for n, prediction in enumerate(predictions, start=1):
            rows_R = prediction.rows_R
            if n == 1:
                choices_R[rows_R] = torch.cat([logits_CV.argmax(dim=1) for logits_CV in prediction.logits()])
            labels_R, chosen_R = tokens_R[rows_R + n], choices_R[rows_R + n - 1]
            meters[n - 1].update(prediction.projection, prediction.hidden_RD, labels_R, chosen_R)
        report()
    return meters


def read_metrics(metrics: str | None, *, with_heatmaps: bool) -> list[str]:
    """The names in --metrics, separated by commas; by default perplexity, or nothing if heat maps are requested.

    >>> read_metrics(None, with_heatmaps=False), read_metrics("accuracy, perplexity", with_heatmaps=True)
    (['perplexity'], ['accuracy', 'perplexity'])
    """
    if metrics is None:
        return [] if with_heatmaps else ["perplexity"]
    names = [name.strip() for name in metrics.split(",")]
    for name in names:
        if name not in METRICS:
            raise ValueError(f"--metrics has {name!r}; allowed are {', '.join(METRICS)}.{nearest(name, METRICS)}")
    return names


def read_thresholds(text: str) -> list[float]:
    """The numbers from 0 to 1 in --thresholds, with commas between them.

    >>> read_thresholds("0, 0.5,1")
    [0.0, 0.5, 1.0]
    """
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--thresholds has {text!r}; give numbers from 0 to 1 with commas, as 0,0.5,1.") from None
    if not all(0 <= threshold <= 1 for threshold in found):
        raise ValueError(f"--thresholds has {text!r}; all must lie from 0 (all tokens) to 1 (one token).")
    return found
