"""What both judged suites do: write all texts, ask the judge about each, and sum up its verdicts."""
# E threshold, P prompt

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from heads.decoding.dynamo.joint import check_independent
from heads.evaluation.judged.choosing import choose_judge
from heads.evaluation.judged.llm_judges import EndpointJudge
from heads.evaluation.judged.sentences import Prompt
from heads.evaluation.judged.win_rates import Figures, line_of_scores, ratio_with_interval, sum_up
from heads.evaluation.judged.writing import check_room, open_baseline, write_all
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.tables import progress_bar
from heads.validation import validated, within

OF_ENDPOINTS = ("prices", "concurrency", "tries")
"""Options that only a judge on a server has."""


@validated
@dataclass(kw_only=True)
class JudgedConfig:
    """The options that both judged suites share.

    Attributes:
        judge: "endpoint" (HEADWAY_JUDGE_URL, HEADWAY_JUDGE_MODEL, OPENAI_API_KEY), "local" (a model loaded here and
            asked in words), or "likelihood" (another model's log-likelihood).
        judge_model: folder or hub name of a judge that is not an endpoint.
        prices: an endpoint's dollars for a million tokens of questions, and of answers.
        concurrency: how many questions an endpoint is sent at once; by default 8.
        tries: how often an endpoint is sent a question before the call fails, with growing pauses; by default 5.
        step: distance between the thresholds ε_b, which go from 0 to 1.
        draws: texts of each prompt at each ε_b.
        max_new_tokens: the most tokens of a text.
        seed: seed of the texts, and of which text of a pair is shown first.
        cooccurrence: n-gram table that masks the joint distribution; by default none.
        adaptive: how Otsu's threshold is combined with the static one; "none" leaves it out.
        blur: cells of the Gaussian before Otsu's threshold, an odd number; 1 does not blur.
        transparency: α_c, the power of the co-occurrence ratio, with --cooccurrence; 0 does not mask.
        baseline: "before" is the backbone before it was trained with the heads; "own" is the one the heads run on.
    """

    judge: Literal["endpoint", "local", "likelihood"] = "likelihood"
    judge_model: str | None = None
    prices: list[float] = field(default_factory=list)
    concurrency: int | None = within(1, default=None)
    tries: int | None = within(1, default=None)
    step: float = within(above=0, high=1, default=0.02)
    draws: int = within(1, default=10)
    max_new_tokens: int = within(1, default=32)
    seed: int = within(0, default=0)
    cooccurrence: str | None = None
    adaptive: Literal["none", "otsu_first", "static_first"] = "otsu_first"
    blur: int = within(1, default=1)
    transparency: float = within(0, default=1.0)
    baseline: Literal["before", "own"] = "before"

    def validate_judge(self) -> None:
        given = [name for name in OF_ENDPOINTS if getattr(self, name) not in (None, [])]
        if given and self.judge != "endpoint":
            raise ValueError(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} about --judge endpoint, and the judge is "
                f"{self.judge}; leave {'it' if len(given) == 1 else 'them'} out."
            )

    def validate_mask(self) -> None:
        if self.cooccurrence is None and self.transparency not in (0, 1):  # 1 is the default
            raise ValueError(
                f"transparency={self.transparency} was given without a table, and nothing is masked then; give "
                f"--cooccurrence TABLE too."
            )

    def validate_blur(self) -> None:
        if self.adaptive == "none" and self.blur > 1:
            raise ValueError(
                f"blur={self.blur} was given with adaptive=none, and nothing is blurred then; leave one of them out."
            )


def thresholds_by(step: float) -> list[float]:
    """The thresholds ε_b from 0 to 1.

    Raises:
        ValueError: 1 is no multiple of the step.

    >>> thresholds_by(0.25), len(thresholds_by(0.02))
    ([0.0, 0.25, 0.5, 0.75, 1.0], 51)
    """
    steps = round(1 / step)
    if abs(steps * step - 1) > 1e-6:
        raise ValueError(f"step={step} was given; 1 has to be a multiple of it, such as 0.02 or 0.1.")
    return [round(i / steps, 6) for i in range(steps + 1)]


def run_judged(task: SuiteTask, prompts: Sequence[Prompt], config: JudgedConfig) -> dict[str, Any]:
    """The results of a judged suite, as results.json has them; what `task.rows` holds is not done again.

    Raises:
        ValueError: options or a judge that cannot be used or reached, or a prompt longer than the backbone reads.
    """
    thresholds = thresholds_by(config.step)
    check_independent(task.token_heads)  # before a baseline and a judge are loaded
    check_room(task, prompts, config.max_new_tokens)
    baseline, base = open_baseline(task) if config.baseline == "before" else (task.model, "the heads' backbone")
    answers = None if task.rows.path is None else task.rows.path.with_name("judge_answers.jsonl")
    writers = (task.model, baseline)
    asking = {name: getattr(config, name) for name in ("concurrency", "tries") if getattr(config, name) is not None}
    judge = choose_judge(config.judge, config.judge_model, writers, answers, config.prices, task.dtype, **asking)
    row = f"verdicts of {judge.identity}"  # an endpoint is named by the environment, not by the config
    verdicts = task.rows.get(row)
    if verdicts is None and isinstance(judge, EndpointJudge):
        judge.reach()  # before texts are written, which takes long
    with progress_bar(task.console, "texts", len(prompts) * (1 + len(thresholds))) as advance:
        texts = write_all(
            task,
            baseline,
            prompts,
            thresholds,
            config.max_new_tokens,
            config.draws,
            config.seed,
            advance,
            cooccurrence=config.cooccurrence,
            adaptive=None if config.adaptive == "none" else config.adaptive,
            blur=config.blur,
            transparency=config.transparency,
        )
    keys = [f"{threshold} {prompt.name}" for threshold in thresholds for prompt in prompts]
    if verdicts is None:
        verdicts = judge_all(judge, prompts, thresholds, texts, config.seed)
        if not verdicts["unreadable"]:  # one that could not be read is asked again
            task.rows.put(row, verdicts)
    by_prompt = {name: grid(thresholds, prompts, texts, verdicts, name) for name in SUMMED}
    wins_EP, losses_EP, tokens_EP, passes_EP = (by_prompt[name] for name in ("wins", "losses", "tokens", "passes"))
    most = task.token_heads.num_heads + 1
    return {
        "judge": judge.name,
        "base": base,
        "draws": config.draws,
        "max_new_tokens": config.max_new_tokens,
        "prompts": [prompt.name for prompt in prompts],
        "unreadable": verdicts["unreadable"],
        "asked": 2 * len(keys) * config.draws + len(prompts) * config.draws,
        "most": most,
        "thresholds": list(thresholds),
        "by_prompt": {name: found.tolist() for name, found in by_prompt.items()},
        "counts": {name: by_prompt[name].sum(axis=1).tolist() for name in ("wins", "losses", "ties")},
        "overall": sum_up(wins_EP, losses_EP, tokens_EP, passes_EP, most),
        "by_score": line_of_scores(by_prompt["scores"], by_prompt["scored"], tokens_EP, passes_EP),
        "kinds": by_kind(prompts, by_prompt),
        "scores": [scores_of(verdicts, [f"{threshold} {p.name}" for p in prompts]) for threshold in thresholds],
        "base_scores": scores_of(verdicts, [f"base {p.name}" for p in prompts]),
        "repeated": [mean_repeated(texts, [f"{e} {p.name}" for p in prompts]) for e in thresholds],
        "base_repeated": mean_repeated(texts, [f"base {p.name}" for p in prompts]),
        "examples": examples(prompts, thresholds, texts, verdicts),
    }


def judge_all(
    judge: Any, prompts: Sequence[Prompt], thresholds: Sequence[float], texts: dict[str, list[Any]], seed: int
) -> dict[str, Any]:
    """The score of every text, and the winner between each text of heads and the baseline's text of the same draw.

    Args:
        texts: the rows of `write_all`.
    """
    shown = {prompt.name: prompt.text for prompt in prompts}
    flat = [(key, shown[key.split(" ", 1)[1]], row["text"]) for key, rows in texts.items() for row in rows]
    pairs = [
        (f"{e} {p.name}", p.text, row["text"], base["text"])
        for e in thresholds
        for p in prompts
        for row, base in zip(texts[f"{e} {p.name}"], texts[f"base {p.name}"], strict=True)
    ]
    read_scores, read_winners = judge.verdicts([text[1:] for text in flat], [pair[1:] for pair in pairs], seed)
    scores: dict[str, list[Any]] = {key: [] for key in texts}
    for (key, *_), score in zip(flat, read_scores, strict=True):
        scores[key].append(None if score is None or not np.isfinite(score) else score)
    winners: dict[str, list[Any]] = {}
    for (key, *_), winner in zip(pairs, read_winners, strict=True):
        winners.setdefault(key, []).append(winner)
    return {"scores": scores, "winners": winners, "unreadable": judge.unreadable}


SUMMED = ("wins", "losses", "ties", "tokens", "passes", "scores", "scored")


def grid(thresholds: Sequence[float], prompts: Sequence[Prompt], texts: Any, verdicts: Any, name: str) -> Figures:
    """(E, P): one of SUMMED, added up over the texts of each threshold and prompt."""
    keys = [[f"{threshold} {prompt.name}" for prompt in prompts] for threshold in thresholds]
    return np.array([[summed(texts[key], verdicts, key)[name] for key in row] for row in keys], dtype=np.float64)


def summed(texts: Sequence[Any], verdicts: Any, key: str) -> dict[str, float]:
    """Each of SUMMED for the texts of one threshold and prompt; `scored` counts the scores that could be read."""
    scores = [score for score in verdicts["scores"][key] if score is not None]
    passes = {name: sum(row[name] for row in texts) for name in ("tokens", "passes")}
    return count(verdicts["winners"][key]) | passes | {"scores": sum(scores), "scored": len(scores)}


def count(winners: Sequence[str | None]) -> dict[str, float]:
    """How many pairs the heads' text (A) won, lost or tied.

    >>> count(["A", "B", "B", "tie", None])
    {'wins': 1, 'losses': 2, 'ties': 1}
    """
    return {name: winners.count(sign) for name, sign in (("wins", "A"), ("losses", "B"), ("ties", "tie"))}


def mean_repeated(texts: dict[str, list[Any]], keys: Sequence[str]) -> float:
    """The share of repeated 4-grams, mean over texts."""
    return float(np.mean([row["repeated"] for key in keys for row in texts[key]]))


def by_kind(prompts: Sequence[Prompt], by_prompt: dict[str, Figures]) -> dict[str, dict[str, Any]]:
    """Figure 19: each sentence type's win rate and speed over all thresholds."""
    found = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        of_P = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
        wins_P, losses_P, tokens_P, passes_P = (
            by_prompt[name][:, of_P].sum(axis=0) for name in ("wins", "losses", "tokens", "passes")
        )
        rate, interval = ratio_with_interval(wins_P, losses_P)
        speed, of_speed = ratio_with_interval(tokens_P, passes_P)
        found[kind] = {"rate": rate, "interval": interval, "speed": speed, "speed_interval": of_speed}
    return found


def scores_of(verdicts: Any, keys: Sequence[str]) -> list[float]:
    return [score for key in keys for score in verdicts["scores"][key] if score is not None]


def examples(prompts: Sequence[Prompt], thresholds: Sequence[float], texts: Any, verdicts: Any) -> list[Any]:
    """Figures 21 to 23: the first prompt, the baseline's first text, and those at three thresholds with the winners."""
    name = prompts[0].name
    rows = []
    for e in (thresholds[-1], thresholds[len(thresholds) // 2], thresholds[0]):
        row = texts[f"{e} {name}"][0]
        speed = row["tokens"] / max(row["passes"], 1)
        rows.append([e, speed, row["text"], verdicts["winners"][f"{e} {name}"][0]])
    return [prompts[0].text, texts[f"base {name}"][0]["text"], rows]
