"""Which judge a suite asks, by its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import open_backbone
from heads.evaluation.judged.judge import Judge, LikelihoodJudge
from heads.evaluation.judged.llm_judges import EndpointJudge, LocalJudge


def choose_judge(
    kind: str, model: str | None, decoded: Any, answers: Path | None, prices: list[float], dtype: Dtype = "auto"
) -> Judge:
    """
    Args:
        kind: "endpoint" of the environment, "local" model asked in words, or "likelihood" of another model.
        model: folder or hub name for the last two.
        answers: file that keeps an endpoint's answers.
        prices: dollars for a million tokens asked and answered; empty where unknown.

    Raises:
        ValueError: a model that is missing or not used, or the decoded model itself.
    """
    if len(prices) not in (0, 2):
        raise ValueError(f"prices={prices} was given; give two: dollars for a million tokens asked, and answered.")
    if kind == "endpoint":
        if model is not None:
            raise ValueError("judge_model is for a local judge; an endpoint's model is HEADWAY_JUDGE_MODEL.")
        return EndpointJudge.from_environment(cache=answers, prices=(prices[0], prices[1]) if prices else None)
    if model is None:
        raise ValueError(f"The judge {kind} needs a model; give --judge-model, another than the one that decodes.")
    opened = open_backbone(model, dtype)
    judge = LikelihoodJudge(opened.model, opened.tokenizer, decoded)  # refuses the decoded model
    if kind == "likelihood":
        return judge
    return LocalJudge(name=model, loaded=opened.model, tokenizer=opened.tokenizer)
