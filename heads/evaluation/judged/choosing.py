"""The judge that a suite's options name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import open_backbone
from heads.evaluation.judged.judge import Judge, LikelihoodJudge
from heads.evaluation.judged.llm_judges import EndpointJudge, LocalJudge
from heads.evaluation.judged.own_texts import refuse_own_texts


def choose_judge(
    kind: str,
    model: str | None,
    writers: Sequence[Any],
    answers: Path | None,
    prices: Sequence[float],
    dtype: Dtype = "auto",
    **asking: int,
) -> Judge:
    """
    Args:
        kind: "endpoint", the server that the environment names; "local", a model loaded here and asked in words; or
            "likelihood", another model's log-likelihood.
        model: folder or hub name of a judge of the last two kinds.
        writers: the models that write the texts, the baseline's among them.
        answers: the file in which the answers of a judge that is asked in words are stored.
        prices: dollars for a million tokens of questions, and of answers; empty if unknown.
        asking: `concurrency` and `tries` of an endpoint, where they are not its defaults.

    Raises:
        ValueError: no model for a kind that needs one, a model for the other kind, one of the writers, a model
            that cannot be loaded or asked, or not two prices.
    """
    if len(prices) not in (0, 2):
        raise ValueError(f"prices={prices} was given; give two: dollars for a million tokens asked, and answered.")
    if kind == "endpoint":
        if model is not None:
            raise ValueError("judge_model is for a local judge; an endpoint's model is HEADWAY_JUDGE_MODEL.")
        priced = (prices[0], prices[1]) if prices else None
        return EndpointJudge.from_environment(cache=answers, prices=priced, **asking)
    if model is None:
        raise ValueError(f"The judge {kind} needs a model; give --judge-model, another than the one that decodes.")
    opened = open_backbone(model, dtype)
    if kind == "likelihood":
        return LikelihoodJudge(opened.model, opened.tokenizer, *writers)
    refuse_own_texts(opened.model, *writers)
    return LocalJudge(name=model, loaded=opened.model, tokenizer=opened.tokenizer, cache=answers)
