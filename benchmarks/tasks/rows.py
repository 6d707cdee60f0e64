"""Rows of this folder's tasks for lm-evaluation-harness, made of held-out files of Python's standard library.

The demo backbone was trained on Python, so tasks in English would show noise. A row shows some lines of a file, and the
answer is the next line. The wrong choices are answers of other rows with the same indentation. Nothing is random.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import datasets

from heads.data.standard_library import load_heldout_files, stdlib_documents

RECORD = Path(__file__).resolve().parents[2] / "checkpoints/demo/base/training.json"
SHOWN, STEP = 12, 25  # lines before the question, and from one question to the next
CHOICES = 4
MADE = "_sysconfigdata"  # written by the machine that built Python
LONGEST, SHORTEST = 72, 12  # characters of an answer


def load(**_: object) -> datasets.DatasetDict:
    """The split `test`.

    Columns: `text` and the line that follows it as `answer`, with its indentation; `choices` and the right one's number
    as `label`; and the text with the answer's first word as `begun`, its other words as `rest`.
    """
    documents = stdlib_documents("heldout", load_heldout_files(RECORD))
    rows = [row for name, text in documents if not name.startswith(MADE) for row in questions(text)]
    return datasets.DatasetDict(test=datasets.Dataset.from_list(with_choices(rows)))


def questions(text: str) -> list[dict[str, str]]:
    """
    >>> questions("x = 0\\n" * 12 + "    return value\\n")[0]["answer"]
    '    return value'
    """
    lines = text.splitlines()
    found = []
    for at in range(SHOWN, len(lines), STEP):
        answer = lines[at].strip()
        first, space, rest = answer.partition(" ")
        if space and SHORTEST <= len(answer) <= LONGEST:
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            text = "\n".join(lines[at - SHOWN : at]) + "\n"
            row = {"text": text, "indent": indent, "answer": indent + answer}
            found.append({**row, "begun": text + indent + first, "rest": f" {rest}"})
    return found


def with_choices(rows: list[dict[str, str]]) -> list[dict[str, object]]:
    """Add three wrong choices to each row: the next rows' answers with the same indentation.

    The right one stands first, second, third and last in turn. Rows with too few of them are left out.
    """
    by_indent: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["answer"] not in by_indent[row["indent"]]:
            by_indent[row["indent"]].append(row["answer"])
    found: list[dict[str, object]] = []
    for number, row in enumerate(rows):
        others = by_indent[row["indent"]]
        if len(others) < CHOICES:
            continue
        at = others.index(row["answer"])
        choices = [others[(at + i) % len(others)] for i in range(1, CHOICES)]
        choices.insert(number % CHOICES, row["answer"])
        found.append({**row, "choices": choices, "label": number % CHOICES})
    return found
