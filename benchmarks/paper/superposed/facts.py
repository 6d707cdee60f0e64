"""P@k by exact match on questions with short answers (section 4.2, figure 5): is one of the first k drafts right?

The questions are rows {"prompt": …, "answers": […]} of a JSONL file, in which TriviaQA or Natural Questions can be
written too; the one that ships asks for names of Python and its standard library. A draft's answer is its first name:
letters, digits, underscores and dots after leading space. As in the paper, superposed decoding has no n-grams here.
"""
# B question, K draft, N new token, T prompt position

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.superposed.bench import Row, SuperposedBench
from benchmarks.paper.superposed.methods import beam, greedy, nucleus, superposed
from benchmarks.paper.superposed.tuning import Setting

SHIPPED = Path(__file__).parent / "data/code_facts.jsonl"
ANSWER = re.compile(r"\s*([\w.]+)")
NEW_TOKENS = 8
SEEDS = 5
"""How often nucleus sampling answers each question; P@k is the mean, since a single draw would be mostly chance."""


def read_facts(path: Path) -> list[tuple[str, list[str]]]:
    """Prompts and accepted answers.

    Raises:
        ValueError: a line that is no such row, which the error names.
    """
    if not path.is_file():
        raise ValueError(f"The file of questions {path} does not exist; give a .jsonl file of prompts and answers.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            prompt, answers = row["prompt"], row["answers"]
        except (ValueError, KeyError, TypeError):
            prompt = answers = None
        if not prompt or not isinstance(prompt, str) or not answers or not all(isinstance(a, str) for a in answers):
            raise ValueError(f'{path} line {number} is no {{"prompt": "…", "answers": ["…"]}}; write one in each line.')
        found.append((prompt, answers))
    return found


def is_right(draft: str, answers: Sequence[str]) -> bool:
    """Whether a draft begins with one of the answers, as a whole name.

    >>> is_right("join(a, b)", ["join"]), is_right(" joined", ["join"]), is_right("('x')", ["join"])
    (True, False, False)
    """
    found = ANSWER.match(draft)
    return found is not None and found[1].rstrip(".") in answers


def precision_at(right: Sequence[bool], k: int) -> float:
    """1 if one of the first k drafts is right.

    >>> [precision_at([False, True, False], k) for k in (1, 2, 3)]
    [0.0, 1.0, 1.0]
    """
    return float(any(right[:k]))


def measure_facts(bench: SuperposedBench, facts: Path, settings: dict[str, Setting]) -> Row:
    """Each method's P@1 … P@k for each question; nucleus sampling is given one draft, and k drafts beside it."""
    model, tokenizer, k = bench.opened.model, bench.tokenizer, bench.plan.k
    plain = Setting(alpha=0.0, temperature=1.0, longest=0)
    ways: dict[str, Any] = {
        "greedy": lambda prompts_BT: greedy(model, prompts_BT, NEW_TOKENS),
        "nucleus": lambda prompts_BT: nucleus(model, prompts_BT, SEEDS * k, NEW_TOKENS),
        "beam": lambda prompts_BT: beam(model, prompts_BT, k, NEW_TOKENS),
    }
    kinds = {"no n-grams": settings["none"], "no n-grams, τ 1": plain, "n ≤ 6": settings["6"]}
    for name, setting in kinds.items():
        decoding = setting.decoding(bench, k)
        ways[f"superposed, {name}"] = functools.partial(superposed, model, length=NEW_TOKENS, decoding=decoding)
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for prompts_BT, answers in by_length(read_facts(facts), tokenizer):
        for name, write in ways.items():
            for drafts, accepted in zip(write(prompts_BT).tolist(), answers, strict=True):
                right = [is_right(tokenizer.decode(draft), accepted) for draft in drafts]
                draws = [right[i : i + k] for i in range(0, len(right), k)]
                found[name].append([sum(precision_at(row, n) for row in draws) / len(draws) for n in range(1, k + 1)])
    return {"file": facts.name, "precision": found}


def by_length(facts: Sequence[tuple[str, list[str]]], tokenizer: Any) -> list[tuple[Tensor, list[list[str]]]]:
    """Questions of the same number of tokens together, as one batch without padding."""
    encoded = [(tokenizer(prompt)["input_ids"], answers) for prompt, answers in facts]
    lengths = sorted({len(tokens) for tokens, _ in encoded})
    groups = [[pair for pair in encoded if len(pair[0]) == length] for length in lengths]
    return [(torch.tensor([tokens for tokens, _ in group]), [answers for _, answers in group]) for group in groups]
