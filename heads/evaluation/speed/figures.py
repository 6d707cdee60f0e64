"""From rows of questions to figures: by category and overall, by depth, by position, by phase of a pass, by tree node.

A request is one turn. Two means of tokens per pass are given, which differ: the pooled one (all tokens over all passes)
and the mean of requests (each request's own, averaged). Speeds take each request's median over repeats; intervals are
of questions, whose turns belong together (heads/evaluation/runs/ratios.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from heads.evaluation.runs.ratios import Ratio, ratio_of_ratios, ratio_of_sums
from heads.evaluation.speed.counting import speculative_decoding
from heads.evaluation.speed.measuring import SpeedFigures
from heads.evaluation.speed.speakers import PLAIN

OVERALL = "overall"
BUCKETS = 16
"""Points of the curve over positions."""


def by_category(
    rows: Sequence[SpeedFigures], methods: Sequence[str], flops: dict[str, SpeedFigures]
) -> dict[str, dict[str, SpeedFigures]]:
    """Figures of each category, and of all questions together under "overall".

    Args:
        flops: counts of one answer by category and method.
    """
    groups: dict[str, list[SpeedFigures]] = defaultdict(list)
    for row in rows:
        if row["turns"]:
            groups[row["category"]].append(row)
    groups[OVERALL] = [row for row in rows if row["turns"]]
    found: dict[str, dict[str, SpeedFigures]] = {}
    for name, group in groups.items():
        counted = [flops[name]] if name in flops else list(flops.values()) if name == OVERALL else []
        found[name] = {method: summarise(group, method, [one[method] for one in counted]) for method in methods}
    return found


def summarise(rows: Sequence[SpeedFigures], method: str, flops: Sequence[SpeedFigures]) -> SpeedFigures:
    """One method on questions."""
    ours, plain = (per_question(rows, name) for name in (method, PLAIN))
    requests = [turn["methods"][method] for row in rows for turn in row["turns"]]
    per_pass = ratio_of_sums(ours["tokens"], ours["passes"])
    speed_up = ratio_of_ratios(ours["tokens"], ours["seconds"], plain["tokens"], plain["seconds"])
    return {
        "questions": len(rows),
        "requests": len(requests),
        "tokens": int(sum(ours["tokens"])),
        "passes": int(sum(ours["passes"])),
        "tokens_per_pass": as_dict(per_pass),
        "tokens_per_pass_mean_of_requests": statistics.mean(one["tokens"] / max(1, one["passes"]) for one in requests),
        "tokens_per_second": sum(ours["tokens"]) / sum(ours["seconds"]),
        "speed_up": as_dict(speed_up),
        "flops_per_token": sum(one["flops"] for one in flops) / sum(one["tokens"] for one in flops) if flops else None,
        "different_texts": sum(one.get("differs_at") is not None for one in requests),
        "ties": sum(one.get("ties", 0) for one in requests),
    }


def per_question(rows: Sequence[SpeedFigures], method: str) -> dict[str, list[float]]:
    """Tokens, passes and seconds of each question, over its turns."""
    found: dict[str, list[float]] = {"tokens": [], "passes": [], "seconds": []}
    for row in rows:
        turns = [turn["methods"][method] for turn in row["turns"]]
        found["tokens"].append(float(sum(turn["tokens"] for turn in turns)))
        found["passes"].append(float(sum(turn["passes"] for turn in turns)))
        found["seconds"].append(float(sum(statistics.median(turn["seconds"]) for turn in turns)))
    return found


def as_dict(estimate: Ratio) -> SpeedFigures:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "questions": estimate.units}


def by_depth(accepted: Sequence[int], depth: int) -> SpeedFigures:
    """Joint acceptance (depth 1 to d all accepted, over all passes) and conditional (over passes that reached d - 1).

    >>> by_depth([2, 1, 0, 2], depth=2)
    {'passes': 4, 'joint': [0.75, 0.5], 'conditional': [0.75, 0.6666666666666666]}
    """
    reached = [sum(count >= d for count in accepted) for d in range(depth + 1)]
    return {
        "passes": len(accepted),
        "joint": [reached[d] / max(1, reached[0]) for d in range(1, depth + 1)],
        "conditional": [reached[d] / reached[d - 1] if reached[d - 1] else None for d in range(1, depth + 1)],
    }


def by_position(texts: Iterable[Sequence[int]], buckets: int = BUCKETS) -> list[SpeedFigures]:
    """Tokens per pass against the position in the output where a pass begins; a pass emits one token more than it
    accepted.

    Args:
        texts: accepted tokens of each pass, text by text; the first token of a text comes from the prompt's pass.

    >>> [(one["from"], one["passes"], one["tokens_per_pass"]) for one in by_position([[1, 0, 3]], buckets=2)]
    [(0, 2, 1.5), (4, 1, 4)]
    """
    passes: list[tuple[int, int]] = []
    longest = 0
    for accepted in texts:
        position = 1
        for count in accepted:
            passes.append((position, count + 1))
            position += count + 1
        longest = max(longest, position)
    width = max(1, -(-longest // buckets))
    found = []
    for start in range(0, longest, width):
        inside = [tokens for position, tokens in passes if start <= position < start + width]
        if inside:
            found.append(
                {"from": start, "to": start + width, "passes": len(inside), "tokens_per_pass": statistics.mean(inside)}
            )
    return found


def by_phase(rows: Sequence[SpeedFigures], method: str) -> dict[str, float]:
    """Milliseconds of a pass by phase, the prompt's pass included; "other" is the rest of the wall time."""
    turns = [turn["methods"][method] for row in rows for turn in row["turns"]]
    passes = sum(turn["passes"] for turn in turns)
    if not passes:
        return {}
    wall = sum(statistics.median(turn["seconds"]) for turn in turns)
    names = list(turns[0]["phases"]) or ["whole"]
    totals = {name: sum(turn["phases"].get(name, wall / len(turns)) for turn in turns) for name in names}
    found = {name: 1000 * seconds / passes for name, seconds in totals.items()}
    return found | {"other": max(0.0, 1000 * (wall - sum(totals.values())) / passes)}


def by_node(rows: Sequence[SpeedFigures], method: str) -> SpeedFigures | None:
    """The tree that was verified most often, and how often each of its nodes was accepted; None if nothing was."""
    verified: dict[tuple[int, ...], int] = defaultdict(int)
    accepted: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        for turn in row["turns"]:
            for tree in turn["methods"][method].get("trees", []):
                shape = tuple(tree["parents"])
                verified[shape] += tree["verified"]
                accepted[shape] = [
                    a + b for a, b in zip(accepted.get(shape, [0] * len(shape)), tree["accepted"], strict=True)
                ]
    if not verified:
        return None
    shape = max(verified, key=lambda parents: verified[parents])
    return {"parents": list(shape), "verified": verified[shape], "accepted": accepted[shape]}


def accepted_of(rows: Sequence[SpeedFigures], method: str) -> list[int]:
    """Accepted tokens of all passes."""
    return [n for row in rows for turn in row["turns"] for n in turn["methods"][method].get("accepted", [])]


def requests_of(rows: Sequence[SpeedFigures], methods: Sequence[str], depths: Mapping[str, int]) -> list[SpeedFigures]:
    """One object a request, with vLLM's names for what was drafted and accepted.

    Args:
        depths: how deep each method that drafts may draft.
    """
    found = []
    for row in rows:
        for number, turn in enumerate(row["turns"], start=1):
            one: SpeedFigures = {
                "question_id": row["question_id"],
                "question_digest": row["digest"],
                "category": row["category"],
                "turn": number,
                "prompt_tokens": turn["prompt_tokens"],
                "methods": {},
            }
            for method in methods:
                counts = turn["methods"][method]
                seconds = statistics.median(counts["seconds"])
                shown: SpeedFigures = {"tokens": counts["tokens"], "passes": counts["passes"], "seconds": seconds}
                if "accepted" in counts:
                    shown["speculative_decoding"] = speculative_decoding(
                        counts["drafted"], counts["accepted"], depths[method]
                    )
                one["methods"][method] = shown
            found.append(one)
    return found
