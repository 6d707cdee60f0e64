"""Compares what vLLM drafted, accepted and wrote with our chain; a difference is an error that says where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.outside.chain import Chain


def check_equal(
    name: str, engine: Mapping[str, Any], plain: Mapping[str, Any], ours: Sequence[Chain], depth: int
) -> None:
    """
    Args:
        engine: what vLLM did with the heads; `plain`, what it did without.
        ours: our chains, one a prompt.

    Raises:
        ValueError: a text, drafted ids, or counts that differ; the sentence says where.
    """
    for i, (row, alone, chain) in enumerate(zip(engine["rows"], plain["rows"], ours, strict=True)):
        where = f"{name}, prompt {i + 1}"
        texts = {"in a batch": engine["batch"][i], "without heads": alone["text"], "of ours": chain.text}
        for of, text in texts.items():
            check_same(f"{where}: vLLM's text with heads and the text {of}", row["text"], text[: len(row["text"])])
        # vLLM drafts once more after the last pass, and drops it.
        if not 0 <= len(row["drafts"]) - len(chain.drafts) <= 1:
            raise ValueError(f"{where}: vLLM drafted {len(row['drafts'])} times, we {len(chain.drafts)} times.")
        for step, (theirs, mine) in enumerate(zip(row["drafts"], chain.drafts, strict=False)):
            check_same(f"{where}, pass {step + 1}: drafted ids of vLLM and ours", theirs, mine)
    counts = count(ours, depth)
    for key, found in engine["counts"].items():
        if found != counts[key]:
            raise ValueError(f"{name}: vLLM counts {key} {found}, we {counts[key]}.")


def check_same(what: str, one: Sequence[int], other: Sequence[int]) -> None:
    if list(one) != list(other):
        differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        at = next(differ, min(len(one), len(other)))
        raise ValueError(f"{what} part at {at}: {list(one)[at : at + 4]} and {list(other)[at : at + 4]}.")


def count(ours: Sequence[Chain], depth: int) -> dict[str, Any]:
    """Our counts under vLLM's names; drafts after the end of the text are counted as vLLM counts them."""
    passes = sum(len(chain.drafts) for chain in ours)
    per_depth = [chain.accepted_per_depth(depth) for chain in ours]
    return {
        "passes": passes,
        "drafted": passes * depth,
        "accepted": sum(map(sum, per_depth)),
        "accepted_per_depth": [sum(column) for column in zip(*per_depth, strict=True)],
    }
