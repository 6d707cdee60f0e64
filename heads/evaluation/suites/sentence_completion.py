"""Suite `sentence-completion`: texts of dynamic decoding against plain generation's, judged (DynaMo, §3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from heads.evaluation.judged.completion import JudgedConfig, run_judged
from heads.evaluation.judged.report_sections import compare_judged as compare
from heads.evaluation.judged.report_sections import judged_sections as sections
from heads.evaluation.judged.sentences import prompts_of
from heads.evaluation.runs.task import SuiteTask
from heads.validation import validated

__all__ = ["Config", "compare", "run", "sections"]


@validated
@dataclass(kw_only=True)
class Config(JudgedConfig):
    """Sentence completion: a judge compares texts of dynamic decoding at each ε_b with plain generation's.

    Attributes:
        prompts: "english" has DynaMo's table 7, "code" beginnings of Python code.
    """

    prompts: Literal["english", "code"] = "english"


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """The suite's results; what `task.rows` holds is not done again."""
    return run_judged(task, prompts_of(config.prompts), config)
