"""Drafts of every method on the test split: perplexities, rankings, repetition and likeness, short and long.

Every row holds the figures of each prefix, so that claims can be tested by a bootstrap over prefixes, paired over
methods.
"""
# B prefix, K draft, N new token, T prefix position

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.superposed.bench import Row, SuperposedBench
from benchmarks.paper.superposed.methods import beam, greedy, ngrams_alone, nucleus, superposed
from benchmarks.paper.superposed.scores import perplexities, self_bleu, text_perplexities, texts_of, unique_ngrams
from benchmarks.paper.superposed.tuning import PAPER, PAPER_TO_4, Setting

GRAMS = (1, 2, 3)


def rounded(values: Tensor) -> list[Any]:
    """Figures as they are stored: six digits are more than an interval needs."""
    return torch.round(values.double(), decimals=6).tolist()


def measure_drafts(bench: SuperposedBench, settings: dict[str, Setting]) -> Row:
    """Tables 1 to 5 and the drafts of figures 4, 7, 12 and 14: k drafts of ten tokens after prefixes of 15."""
    plan = bench.plan
    prefixes_BT = bench.windows[:, : plan.prefix]
    model, second = bench.opened.model, bench.opened_second.model
    drafts = drafts_of_all(bench, model, prefixes_BT, settings)
    names = ("greedy", "nucleus", "superposed")
    drafts_second = {name: drafts_of(bench, opened_model, prefixes_BT, settings["6"], name)
                     for opened_model in (second,) for name in names}  # fmt: skip
    judge, tokenizer = bench.other_judge
    texts = {name: texts_of(bench.tokenizer, prefixes_BT, drafts_BKN) for name, drafts_BKN in drafts.items()}
    return {
        "prefixes": [bench.tokenizer.decode(prefix) for prefix in prefixes_BT.tolist()],
        "drafts": {
            name: [[bench.tokenizer.decode(draft) for draft in row] for row in drafts_BKN.tolist()]
            for name, drafts_BKN in drafts.items()
        },
        "perplexity": {
            name: rounded(perplexities(second, prefixes_BT, drafts_BKN)) for name, drafts_BKN in drafts.items()
        },
        "other tokenizer": {name: rounded(text_perplexities(judge, tokenizer, found)) for name, found in texts.items()},
        "second backbone": {
            name: rounded(perplexities(model, prefixes_BT, drafts_BKN)) for name, drafts_BKN in drafts_second.items()
        },
    }


def drafts_of_all(
    bench: SuperposedBench, model: Any, prefixes_BT: Tensor, settings: dict[str, Setting]
) -> dict[str, Tensor]:
    k, length = bench.plan.k, bench.plan.length
    ways = {
        "superposed": settings["6"],
        "superposed n ≤ 4": settings["4"],
        "superposed, no n-grams": settings["none"],
        "superposed, paper's α τ": PAPER,
        "superposed n ≤ 4, paper's α τ": PAPER_TO_4,
    }
    return {
        "greedy": greedy(model, prefixes_BT, length),
        "nucleus": nucleus(model, prefixes_BT, k, length),
        "beam": beam(model, prefixes_BT, k, length),
        "n-grams": ngrams_alone(bench.ngrams, prefixes_BT, length),
        **{name: superposed(model, prefixes_BT, length, setting.decoding(bench, k)) for name, setting in ways.items()},
    }


def drafts_of(
    bench: SuperposedBench, model: Any, prefixes_BT: Tensor, setting: Setting, name: str, **sizes: int
) -> Tensor:
    """Drafts of one method; `sizes` are k and length where they are not the plan's."""
    k, length = sizes.get("k", bench.plan.k), sizes.get("length", bench.plan.length)
    if name == "greedy":
        return greedy(model, prefixes_BT, length)
    if name == "nucleus":
        return nucleus(model, prefixes_BT, k, length)
    if name == "beam":
        return beam(model, prefixes_BT, k, length)
    return superposed(model, prefixes_BT, length, setting.decoding(bench, k))


def measure_sweeps(bench: SuperposedBench, settings: dict[str, Setting]) -> Row:
    """Figures 8 to 11: best perplexity by number of drafts, prefix and length; repetition and Self-BLEU beside it."""
    plan = bench.plan
    ks = [sweep_point(bench, settings["6"], k=k, prefix=plan.prefix, length=plan.length, value=k) for k in plan.ks]
    prefixes = [
        sweep_point(bench, settings["6"], k=plan.k, prefix=prefix, length=plan.length, value=prefix)
        for prefix in plan.prefix_lengths
    ]
    lengths = [
        sweep_point(bench, settings["6"], k=plan.k, prefix=plan.prefix, length=length, value=length)
        for length in plan.lengths
    ]
    return {"drafts": ks, "prefix": prefixes, "length": lengths}


def sweep_point(bench: SuperposedBench, setting: Setting, *, k: int, prefix: int, length: int, value: int) -> Row:
    """One point of the three sweeps, for each method."""
    prefixes_BT = bench.windows[:, LONGEST - prefix : LONGEST]
    found: Row = {"value": value}
    for name in ("nucleus", "beam", "superposed"):
        drafts_BKN = drafts_of(bench, bench.opened.model, prefixes_BT, setting, name, k=k, length=length)
        found[name] = {
            "perplexity": rounded(perplexities(bench.opened_second.model, prefixes_BT, drafts_BKN)),
            "unique": unique_shares(drafts_BKN),
            "self_bleu": [round(self_bleu(drafts), 6) for drafts in drafts_BKN.tolist()],
        }
    return found


LONGEST = 40
"""Prefixes of all lengths end after so many tokens of a window, so that drafts continue the same place in the text."""


def unique_shares(drafts_BKN: Tensor) -> list[list[float]]:
    """(B, 3): the mean share of unique 1-, 2- and 3-grams over a prefix's drafts."""
    rows = drafts_BKN.tolist()
    return [[round(mean([unique_ngrams(draft, n) for draft in drafts]), 6) for n in GRAMS] for drafts in rows]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure_long_texts(bench: SuperposedBench, settings: dict[str, Setting]) -> Row:
    """Appendix I: texts of 200 tokens with and without resets, and nucleus sampling's; how much they repeat."""
    plan = bench.plan
    prefixes_BT = bench.windows[: plan.long_prefixes, : plan.prefix]
    model, setting = bench.opened.model, settings["6"]
    resets = setting.decoding(bench, plan.k, reset_every=plan.reset_every, generator=torch.Generator().manual_seed(0))
    texts = {
        "superposed, resets": superposed(model, prefixes_BT, plan.long_length, resets)[:, :1],
        "superposed": superposed(model, prefixes_BT, plan.long_length, setting.decoding(bench, plan.k))[:, :1],
        "greedy": greedy(model, prefixes_BT, plan.long_length),
        "nucleus": nucleus(model, prefixes_BT, 1, plan.long_length),
    }
    judge = bench.opened_second.model
    return {
        name: {
            "unique": {str(n): unique_shares(texts_B1N[..., :n]) for n in (50, 100, plan.long_length)},
            "perplexity": rounded(perplexities(judge, prefixes_BT, texts_B1N)),
            "text": bench.tokenizer.decode(texts_B1N[0, 0].tolist()),
        }
        for name, texts_B1N in texts.items()
    } | {"prefix": bench.tokenizer.decode(prefixes_BT[0].tolist())}
