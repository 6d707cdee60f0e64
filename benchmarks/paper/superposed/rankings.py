"""Drafts ranked against each other (section 4.4, figures 7 and 12), by a judge in place of people.

Three settings: 1 draft of nucleus sampling against 3 superposed ones, 2 against 3, and 1 against the superposed draft
of lowest perplexity under another model, since no judge should rank its own choice. A superposed draft in first place
is a win. Prefixes with two equal drafts are left out, as in the paper, and so are unreadable verdicts.
"""
# K draft

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.superposed.bench import Row, SuperposedBench
from heads.evaluation.judged.judge import Judge, LikelihoodJudge
from heads.evaluation.judged.llm_judges import EndpointJudge

SUPERPOSED, MOST_NUCLEUS = 3, 2
JUDGES = ("likelihood", "endpoint")
EXPECTED = {"1v3": 0.75, "2v3": 0.6, "1v1": 0.5}
"""The share of wins if all drafts were equally good."""
PAPER = {"1v3": 0.636, "2v3": 0.606, "1v1": 0.514}


def measure_rankings(bench: SuperposedBench, drafts: Row, judge: str) -> Row:
    """For each setting whether a superposed draft won (1 or 0), prefix by prefix; and the judge's name."""
    asked = open_judge(bench, judge)
    lists, left_out = lists_of(drafts)
    return {
        "judge": asked.name,
        "wins": {name: wins(asked, found, int(name[0])) for name, found in lists.items()},
        "left out": left_out,
        "unreadable": asked.unreadable,
    }


def open_judge(bench: SuperposedBench, judge: str) -> Judge:
    """The log-likelihood under the model with another tokenizer, or the server that the environment names.

    Raises:
        ValueError: the environment names none.
    """
    if judge == "endpoint":
        return EndpointJudge.from_environment(cache=bench.folder / "answers.jsonl")
    return LikelihoodJudge(*bench.other_judge, bench.opened.model)


def lists_of(drafts: Row) -> tuple[dict[str, list[tuple[str, list[str]]]], int]:
    """For each setting the (prefix, texts) to rank, nucleus sampling's first; and the number of prefixes left out."""
    found: dict[str, list[tuple[str, list[str]]]] = {name: [] for name in EXPECTED}
    rows = zip(
        drafts["prefixes"],
        drafts["drafts"]["superposed"],
        drafts["drafts"]["nucleus"],
        drafts["perplexity"]["superposed"],
        strict=True,
    )
    left_out = 0
    for prefix, superposed, nucleus, perplexity in rows:
        ours, theirs = superposed[:SUPERPOSED], nucleus[:MOST_NUCLEUS]
        if len({*ours, *theirs}) < len(ours) + len(theirs):
            left_out += 1
            continue
        best = superposed[min(range(len(perplexity)), key=perplexity.__getitem__)]
        for name, texts in (("1v3", [*theirs[:1], *ours]), ("2v3", [*theirs, *ours]), ("1v1", [theirs[0], best])):
            found[name].append((prefix, texts))
    return found, left_out


def wins(judge: Judge, lists: Sequence[tuple[str, list[str]]], nucleus: int) -> list[float]:
    """1.0 for each list whose best text is not one of the first `nucleus`, which are nucleus sampling's."""
    return [float(order[0] >= nucleus) for order in judge.orders(lists, seed=0) if order is not None]
