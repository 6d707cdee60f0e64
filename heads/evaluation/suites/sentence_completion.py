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
    """Sentence completion: texts of dynamic decoding at each ε_b against plain generation's, judged.

    Attributes:
        prompts: "english" is DynaMo's table 7, "code" the same layout for a backbone of Python.
    """

    prompts: Literal["english", "code"] = "english"


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """Write and judge what `task.rows` does not hold yet."""
    return run_judged(task, prompts_of(config.prompts), config)
