"""Parameters of the DynaMo suite and its variants beside the paper's numbers, from Pythia's published shapes.

    python -m benchmarks.paper.dynamo_counts

All models are on the meta device: no weights, no memory, no download.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from benchmarks.shared import figures_table, run_benchmark, wide_console
from heads.backbone.model import Backbone
from heads.families import create


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One size of Pythia, and the paper's name for it with two heads."""

    width: int
    layers: int
    attention_heads: int
    vocab: int = 50304
    parameters: int
    paper: str


SHAPES = {
    "70m": Shape(width=512, layers=6, attention_heads=8, parameters=70_426_624, paper="77M"),
    "160m": Shape(width=768, layers=12, attention_heads=12, parameters=162_322_944, paper="180M"),
    "410m": Shape(width=1024, layers=24, attention_heads=16, parameters=405_334_016, paper="430M"),
    "1b": Shape(width=2048, layers=16, attention_heads=8, parameters=1_011_781_632, paper="1.1B"),
    "1.4b": Shape(width=2048, layers=24, attention_heads=16, parameters=1_414_647_808, paper="1.5B"),
    "2.8b": Shape(width=2560, layers=32, attention_heads=32, parameters=2_775_208_960, paper="2.9B"),
    "6.9b": Shape(width=4096, layers=32, attention_heads=32, vocab=50432, parameters=6_857_302_016, paper="7.3B"),
}

# Steps and tokens a step: appendix A.1, and Biderman et al., 2023, table 6.
MODIFIED_CLM = (75_782, 64 * 2048)
PYTHIA = (143_000, 1024 * 2048)

# Variants of figure 12 and table 9 on Pythia-70M: their fields, and the millions of parameters in their names.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "96M-T2": ({"num_heads": 1, "layers_per_head": 0, "tap": "last", "unembedding": "own"}, 96),
    "74M-T2 (C)": ({"num_heads": 1, "start": "copied"}, 74),
    "70M-T2 (LoRA)": ({"num_heads": 1, "lora_rank": 32, "lora_targets": ["query_key_value"]}, 70),
    "99M-T2": ({"num_heads": 1, "unembedding": "own"}, 99),
    "74M-T2 (NP)": ({"num_heads": 1, "tap": "last"}, 74),
    "74M-T2": ({"num_heads": 1}, 74),
    "77M-T2": ({"num_heads": 1, "layers_per_head": 2}, 77),
    "77M-T3": ({"num_heads": 2}, 77),
}


def build_backbone(shape: Shape) -> Backbone:
    """A Pythia of this shape without weights."""
    config = GPTNeoXConfig(
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.attention_heads,
        vocab_size=shape.vocab,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return Backbone(AutoModelForCausalLM.from_config(config), check_projection=False)


def count_heads(backbone: Backbone, **config: Any) -> int:
    with torch.device("meta"):
        return count(create("dynamo", backbone, **config))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def rounded(parameters: int) -> str:
    """Two significant figures, as the paper names its models.

    >>> rounded(76_731_392), rounded(176_498_688), rounded(7_260_061_696)
    ('77M', '180M', '7.3B')
    """
    unit, letter = (10**9, "B") if parameters >= 10**9 else (10**6, "M")
    return f"{float(f'{parameters / unit:.2g}'):g}{letter}"


def suite_table() -> Table:
    title = "DynaMo-T3: Pythia and two heads of one decoder layer"
    counted = ("backbone", "heads", "heads / backbone", "together", "rounded", "paper")
    table = figures_table(title, "Pythia", *counted)
    for name, shape in SHAPES.items():
        backbone = build_backbone(shape)
        base, extra = count(backbone.model), count_heads(backbone, num_heads=2)
        share, total = f"{extra / base:.2%}", base + extra
        table.add_row(name, f"{base:,}", f"{extra:,}", share, f"{total:,}", rounded(total), shape.paper)
    return table


def variants_table() -> Table:
    title = "Figure 12 and table 9: variants on Pythia-70M"
    table = figures_table(title, "variant", "heads", "together", "in millions", "paper")
    backbone = build_backbone(SHAPES["70m"])
    base = count(backbone.model)
    for name, (config, paper) in VARIANTS.items():
        extra = count_heads(backbone, **config)
        table.add_row(name, f"{extra:,}", f"{base + extra:,}", f"{(base + extra) / 10**6:.0f}M", f"{paper}M")
    return table


def share_of_pretraining() -> float:
    """Tokens of the modified CLM over those of Pythia's pre-training: table 6 has the same ratio in hours.

    >>> f"{share_of_pretraining():.2%}"
    '3.31%'
    """
    return math.prod(MODIFIED_CLM) / math.prod(PYTHIA)


def main() -> None:
    console = wide_console()
    console.print(suite_table())
    console.print(variants_table())
    width = SHAPES["70m"].width
    console.print(
        f"LoRA of rank 32: the paper's 65K is {32 * (width + 3 * width):,}, on the query-key-value matrix. A low-rank "
        f"path beside the whole layer (the other reading of figure 12c) would have {32 * 2 * width:,}."
    )
    console.print(
        f"Table 6: the hours of the modified CLM on 5 % of the Pile are 2.67 % of those that Pythia reports for its "
        f"whole pre-training at 6.9B. Hours are not reproduced here; its tokens are {share_of_pretraining():.2%} of "
        f"Pythia's. heads_overhead in a run's log is another quantity: the time that heads add to one training step."
    )


if __name__ == "__main__":
    run_benchmark(main)
