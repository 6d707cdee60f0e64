"""Suite `vicuna`: answers in the Vicuna benchmark's format, pairwise (DynaMo, §4.4, figures 4 and 21 to 23)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from heads.evaluation.judged.completion import run_judged, thresholds_by
from heads.evaluation.judged.sentences import Prompt
from heads.evaluation.judged.shown import compare_judged as compare
from heads.evaluation.judged.shown import judged_sections as sections
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.speed.conversation import Prompter, choose_form
from heads.evaluation.speed.questions import read_questions
from heads.validation import validated, within

__all__ = ["Config", "compare", "run", "sections"]


@validated
@dataclass(kw_only=True)
class Config:
    """Vicuna benchmark: answers of dynamic decoding at each ε_b against plain generation's, judged.

    Attributes:
        questions: .jsonl file, each row with question_id, category and turns, of which the first is asked.
        form: "chat" by the tokenizer's template, "text" as it stands; "auto" is chat where there is a template.
        judge: as in sentence-completion: "endpoint", "local" or "likelihood".
        judge_model: folder or hub name of a judge that is not an endpoint.
        prices: dollars for a million tokens asked, and answered, of an endpoint.
        step: of ε_b from 0 to 1.
        draws: answers to each question at each ε_b.
        new_tokens: most tokens of an answer.
        seed: of answers and of the places in pairs.
        cooccurrence: table that masks; by default none.
        adaptive: Otsu's threshold beside the static one.
        blur: of the adaptive threshold, odd.
    """

    questions: str
    form: Literal["auto", "chat", "text"] = "auto"
    judge: Literal["endpoint", "local", "likelihood"] = "likelihood"
    judge_model: str | None = None
    prices: list[float] = field(default_factory=list)
    step: float = within(above=0, high=1, default=0.25)
    draws: int = within(1, default=1)
    new_tokens: int = within(1, default=256)
    seed: int = within(0, default=0)
    cooccurrence: str | None = None
    adaptive: Literal["none", "otsu_first", "static_first"] = "otsu_first"
    blur: int = within(1, default=1)


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """Write and judge what `task.rows` does not hold yet."""
    prompter = Prompter(tokenizer=task.tokenizer, form=choose_form(task.tokenizer, config.form))
    prompts = [
        Prompt(name=q.name, kind=q.category, text=q.turns[0], tokens=tuple(prompter.prompt(q, [])))
        for q in read_questions(Path(config.questions))
    ]
    return run_judged(task, prompts, thresholds_by(config.step), config)
