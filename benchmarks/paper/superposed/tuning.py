"""α, τ and δ by the lowest mean perplexity over the k drafts on the validation split (section 4.1).

α and τ are searched together with the default δ of `SuperposedDecoding`, then δ with the best α and τ. This is done
with n-grams up to 6, and anew with those up to 4 (appendix C). Without n-grams (section 4.2) only τ is searched.
"""
# B prefix, T prefix position, K draft

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from benchmarks.paper.superposed.bench import Row, SuperposedBench
from benchmarks.paper.superposed.methods import superposed
from benchmarks.paper.superposed.scores import perplexities
from heads import SuperposedDecoding
from heads.decoding.superposed.run import DEFAULT_PENALTY
from heads.decoding.superposed.step import PAPER_WEIGHTS

FIRST_PENALTY = DEFAULT_PENALTY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """α, τ and δ, and the longest n-grams that are used; 0 uses none."""

    alpha: float
    temperature: float
    penalty: float = FIRST_PENALTY
    longest: int = 6

    def decoding(self, bench: SuperposedBench, k: int, **more: Any) -> SuperposedDecoding:
        """λ of longer n-grams is 0."""
        with_ngrams = bool(self.longest and self.alpha)
        weights = [weight if n <= self.longest else 0.0 for n, weight in enumerate(PAPER_WEIGHTS, start=2)]
        of_ngrams: dict[str, Any] = {
            "ngrams": bench.ngrams,
            "alpha": self.alpha,
            "penalty": self.penalty,
            "weights": weights,
        }
        more |= of_ngrams if with_ngrams else {}
        return SuperposedDecoding(k=k, temperature=self.temperature, **more)

    @property
    def name(self) -> str:
        orders = f"n ≤ {self.longest}, α {self.alpha:g}, " if self.longest and self.alpha else "no n-grams, "
        return f"{orders}τ {self.temperature:g}" + (f", δ {self.penalty:g}" if self.longest and self.alpha else "")


PAPER = Setting(alpha=0.54, temperature=0.06)
PAPER_TO_4 = Setting(alpha=0.55, temperature=0.1, longest=4)


def tune(bench: SuperposedBench) -> Row:
    """The best setting of each kind, and the mean perplexity of every setting that was tried."""
    plan = bench.plan
    tried: list[Row] = []

    def best(settings: list[Setting]) -> Setting:
        found = [(mean_perplexity(bench, setting), setting) for setting in settings]
        tried.extend({"setting": dataclasses.asdict(setting), "perplexity": value} for value, setting in found)
        return min(found, key=lambda pair: pair[0])[1]

    chosen = {"none": best([Setting(alpha=0.0, temperature=tau, longest=0) for tau in plan.temperatures])}
    for longest in (6, 4):
        grid = itertools.product([alpha for alpha in plan.alphas if alpha], plan.temperatures)
        pair = best([Setting(alpha=alpha, temperature=tau, longest=longest) for alpha, tau in grid])
        chosen[str(longest)] = best([dataclasses.replace(pair, penalty=penalty) for penalty in plan.penalties])
    return {"best": {name: dataclasses.asdict(setting) for name, setting in chosen.items()}, "tried": tried}


def mean_perplexity(bench: SuperposedBench, setting: Setting) -> float:
    prefixes_BT = bench.validation_windows[:, : bench.plan.prefix]
    drafts_BKN = superposed(bench.opened.model, prefixes_BT, bench.plan.length, setting.decoding(bench, bench.plan.k))
    return float(perplexities(bench.opened_second.model, prefixes_BT, drafts_BKN).mean())


def settings_of(tuned: Row) -> dict[str, Setting]:
    """The tuned settings "6", "4" and "none"."""
    return {name: Setting(**fields) for name, fields in tuned["best"].items()}
