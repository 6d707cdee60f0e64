"""Compare the greedy texts of two sources on the same prompts, and show the verdicts as a table and as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.table import Table
from rich.text import Text

from heads.evaluation.lossless.answers import END, Answer, Asked, Source, mark_end, with_tokens
from heads.evaluation.lossless.stored_answers import keep_answer, keep_finding
from heads.evaluation.lossless.verdicts import Finding, Scorer, VerdictKind, examine
from heads.evaluation.methods import end_tokens
from heads.evaluation.runs.rows import Rows
from heads.evaluation.tables import describe_machine, versions

SHOWN_TEXT = 28
COLORS = {"same": "green", "rounding": "yellow", "bug": "bold red", "unknown": "magenta"}
GREEDY_ONLY = (
    "Greedy texts were compared. Sampled texts differ from call to call, so no comparison of texts can show whether "
    "sampling is lossless."
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdicts on one source's answers, each compared with the reference's."""

    name: str
    reference: str
    findings: Sequence[Finding]

    @property
    def counts(self) -> dict[VerdictKind, int]:
        """How many prompts have each verdict.

        >>> Comparison(name="a", reference="b", findings=[Finding(prompt=1, verdict="same")]).counts
        {'same': 1, 'rounding': 0, 'bug': 0, 'unknown': 0}
        """
        found = Counter(finding.verdict for finding in self.findings)
        return {kind: found[kind] for kind in get_args(VerdictKind)}

    def table(self) -> Table:
        """One row for each prompt."""
        table = Table(title=f"{self.name} beside {self.reference}", title_justify="left")
        for column in ("prompt", "first difference", "reference", "other"):
            table.add_column(column)
        for column in ("gap", "rounding"):
            table.add_column(column, justify="right")
        table.add_column("verdict")
        for finding in self.findings:
            table.add_row(*self._cells(finding))
        return table

    def _cells(self, finding: Finding) -> list[Any]:
        margins = finding.margins
        place = "" if finding.position is None else f"{finding.unit} {finding.position + 1}"
        figures = ["", ""] if margins is None else [f"{margins.gap:.3g}", f"{margins.rounding:.3g}"]
        verdict = finding.verdict + (f", {finding.excused} places" if finding.excused > 1 else "")
        return [
            str(finding.prompt),
            place,
            *(Text(shown[:SHOWN_TEXT]) for shown in (finding.reference, finding.other)),
            *figures,
            Text(verdict, style=COLORS[finding.verdict]),
        ]

    def summary(self) -> str:
        """How many prompts have each verdict, and the reasons given, one a line."""
        counted = f"{self.name}: " + ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if count)
        reasons = dict.fromkeys(f"{finding.verdict}: {finding.why}" for finding in self.findings if finding.why)
        return "\n".join([counted, *(f"  {reason}" for reason in reasons)])


def compare_sources(
    name: str,
    source: Source,
    reference_name: str,
    reference: Source,
    prompts: Sequence[Asked],
    *,
    scorer: Scorer | None = None,
    tokenizer: Any = None,
    rows: Rows | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> Comparison:
    """The verdict on each prompt.

    Args:
        scorer: explains differences; without one they are unknown.
        rows: stored answers and verdicts, for which no source is asked again. Several comparisons with one reference
            share its answers there.
        advance: called after each prompt.
    """
    rows = Rows() if rows is None else rows
    ends = [] if scorer is None else end_tokens(scorer.model)

    def find(number: int, asked: Asked) -> Finding:
        first = keep_answer(rows, number, lambda: normalised(reference.answer(asked), asked, tokenizer, ends))
        answer = normalised(source.answer(asked), asked, tokenizer, ends)
        read = as_read(asked, first)

        def resume(new: list[int]) -> Answer | None:
            found = reference.resume(read, new)
            return None if found is None else normalised(found, read, tokenizer, ends)

        return examine(
            number, first, answer, prompt_1T=read.prompt_1T, scorer=scorer, tokenizer=tokenizer, resume=resume
        )

    findings = []
    for number, asked in enumerate(prompts, start=1):
        findings.append(keep_finding(rows, name, number, partial(find, number, asked)))
        advance()
    return Comparison(name=name, reference=reference_name, findings=findings)


def normalised(answer: Answer, asked: Asked, tokenizer: Any, ends: Sequence[int]) -> Answer:
    """The answer with its tokens, read from its text if need be, and END in place of an end-of-text token."""
    if tokenizer is not None:
        answer = with_tokens(answer, asked, tokenizer)
    if answer.tokens is None:
        return answer
    tokens = mark_end(list(answer.tokens), ends)
    if answer.ended and tokens[-1:] != [END]:
        tokens.append(END)
    return replace(answer, tokens=tokens)


def as_read(asked: Asked, answer: Answer) -> Asked:
    """The prompt with the token ids that the server read, if it returned them."""
    if answer.prompt is None or asked.prompt_1T is None:
        return asked
    return Asked(prompt=asked.prompt, prompt_1T=torch.tensor([answer.prompt]))


def as_dict(comparisons: Sequence[Comparison], device: torch.device, **settings: Any) -> dict[str, Any]:
    """All findings, settings, machine and command, for JSON."""
    return {
        "comparisons": [
            {
                "name": comparison.name,
                "reference": comparison.reference,
                "counts": comparison.counts,
                "prompts": [dataclasses.asdict(finding) for finding in comparison.findings],
            }
            for comparison in comparisons
        ],
        "settings": settings,
        "machine": describe_machine(device),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
