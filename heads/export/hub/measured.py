"""Read what `headway benchmark --json` and `headway evaluate` wrote as rows of a model card.

benchmark --json                    each method's tokens per pass and ratio to plain generation
evaluate --json                     perplexities on held-out text, and how often each head is right
evaluate --suite speed --out DIR    as benchmark, over all questions of the suite (results.json)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.checkpoint.summary import ODD_RECORD

ALLOWED = "`headway benchmark --json FILE`, `headway evaluate --json FILE` or `headway evaluate --suite speed`"


@dataclass(kw_only=True)
class Measured:
    """The rows of one file.

    Attributes:
        speeds: method, tokens per pass, ratio, its interval, same text, settings.
        title: what `held_out` was measured on.
        held_out: name, value, interval.
    """

    speeds: list[tuple[str, ...]] = field(default_factory=list)
    title: str = ""
    held_out: list[tuple[str, ...]] = field(default_factory=list)


def read_measured(path: Path) -> Measured:
    """
    Raises:
        ValueError: another kind of file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "blocks" in found:
            return Measured(speeds=list(benchmark_rows(found)))
        if "perplexity" in found:
            return Measured(title=title_of(found), held_out=list(held_out_rows(found)))
        if found.get("suite") == "speed":
            return Measured(speeds=list(suite_rows(found)))
        raise KeyError("blocks, perplexity or suite")
    except (OSError, *ODD_RECORD) as error:
        raise ValueError(
            f"{path} cannot be read as measurements ({type(error).__name__}: {error}); give a file that "
            f"{ALLOWED} wrote."
        ) from None


def machine_of(found: dict[str, Any]) -> str:
    return "{device}, {cpu}, threads: {threads}".format(**found["machine"])


def benchmark_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for block, rows in found["blocks"].items():
        for row in rows:
            low, high = row["interval"]
            figures = (f"{row['tokens_per_pass']:.2f}", f"{row['ratio']:.2f}", f"{low:.2f}–{high:.2f}")
            yield (row["name"], *figures, row["same_text"], f"{block}; {machine_of(found)}")


def suite_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Each method's row over all questions."""
    results = found["results"]
    settings = f"{results['questions']} questions, {results['new_tokens']} new tokens; {machine_of(found)}"
    for method, row in results["categories"]["overall"].items():
        speed = row["speed_up"]
        figures = (f"{row['tokens_per_pass']['value']:.2f}", f"{speed['value']:.2f}")
        interval = f"{speed['low']:.2f}–{speed['high']:.2f}"
        same = f"{row['requests'] - row['different_texts']} of {row['requests']}"
        yield (method, *figures, interval, same, settings)


def title_of(found: dict[str, Any]) -> str:
    return f"On {found['text']['texts']} held-out texts of {found['text']['tokens']:,} tokens:"


def held_out_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, row in found["perplexity"].items():
        interval = "" if row["low"] is None else f"{row['low']:.2f}–{row['high']:.2f}"
        yield (f"perplexity, {name}", f"{row['value']:.2f}", interval)
    for k, row in enumerate(found["accuracy"]):
        whose = f"head {k}" if k else "backbone"
        yield (f"{whose}: the true token is its likeliest", f"{row['top1']:.1%}", "")
