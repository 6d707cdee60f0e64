"""Suite `sentence-completion`: texts of dynamic decoding against plain generation's, judged (DynaMo, §3.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from heads.evaluation.judged.completion import run_judged, thresholds_by
from heads.evaluation.judged.sentences import prompts_of
from heads.evaluation.judged.shown import compare_judged as compare
from heads.evaluation.judged.shown import judged_sections as sections
from heads.evaluation.runs.task import SuiteTask
from heads.validation import validated, within

__all__ = ["Config", "compare", "run", "sections"]


@validated
@dataclass(kw_only=True)
class Config:
    """Sentence completion: texts of dynamic decoding at each ε_b against plain generation's, judged.

    Attributes:
        prompts: "english" is DynaMo's table 7, "code" the same layout for a backbone of Python.
        judge: "endpoint" (HEADWAY_JUDGE_URL, HEADWAY_JUDGE_MODEL, OPENAI_API_KEY), "local" model asked in words, or
            "likelihood" of another model.
        judge_model: folder or hub name of a judge that is not an endpoint.
        prices: dollars for a million tokens asked, and answered, of an endpoint.
        step: of ε_b from 0 to 1.
        draws: texts of each prompt at each ε_b.
        new_tokens: most tokens of a text.
        seed: of texts and of the places in pairs.
        cooccurrence: table that masks; by default none.
        adaptive: Otsu's threshold beside the static one.
        blur: of the adaptive threshold, odd.
    """

    prompts: Literal["english", "code"] = "english"
    judge: Literal["endpoint", "local", "likelihood"] = "likelihood"
    judge_model: str | None = None
    prices: list[float] = field(default_factory=list)
    step: float = within(above=0, high=1, default=0.02)
    draws: int = within(1, default=10)
    new_tokens: int = within(1, default=32)
    seed: int = within(0, default=0)
    cooccurrence: str | None = None
    adaptive: Literal["none", "otsu_first", "static_first"] = "otsu_first"
    blur: int = within(1, default=1)


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """Write and judge what `task.rows` does not hold yet."""
    return run_judged(task, prompts_of(config.prompts), thresholds_by(config.step), config)
