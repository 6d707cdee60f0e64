"""Suite `vicuna`: answers in the Vicuna benchmark's format, pairwise (DynaMo, §4.4, figures 4 and 21 to 23)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heads.evaluation.judged.completion import JudgedConfig, run_judged
from heads.evaluation.judged.report_sections import compare_judged as compare
from heads.evaluation.judged.report_sections import judged_sections as sections
from heads.evaluation.judged.sentences import Prompt
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.speed.conversation import Prompter, choose_form
from heads.evaluation.speed.questions import SHIPPED, read_questions
from heads.validation import validated, within

__all__ = ["Config", "compare", "run", "sections"]


@validated
@dataclass(kw_only=True)
class Config(JudgedConfig):
    """Vicuna benchmark: a judge compares answers of dynamic decoding at each ε_b with plain generation's.

    Attributes:
        questions: .jsonl file, each row with question_id, category and turns, of which the first is asked; "shipped":
            beginnings of code.
        form: "chat" by the tokenizer's template, "text" as it stands; "auto" is chat where there is a template.
    """

    questions: str = "shipped"
    form: Literal["auto", "chat", "text"] = "auto"
    step: float = within(above=0, high=1, default=0.25)
    draws: int = within(1, default=1)
    max_new_tokens: int = within(1, default=256)


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """The suite's results; what `task.rows` holds is not done again."""
    prompter = Prompter(tokenizer=task.tokenizer, form=choose_form(task.tokenizer, config.form))
    prompts = [
        Prompt(name=q.name, kind=q.category, text=q.turns[0], tokens=tuple(prompter.prompt(q, [])))
        for q in read_questions(SHIPPED if config.questions == "shipped" else Path(config.questions))
    ]
    return run_judged(task, prompts, config)
