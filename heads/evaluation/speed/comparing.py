"""Several runs of the suite `speed` side by side: each against the first, on the questions that both have.

Runs are made at different times, so tokens per second are not compared: each run's speed is taken over its own plain
generation's, which was measured in turns with it. A difference counts as one only where its interval leaves out 1. An
interval over questions cannot hold what changed on the machine from run to run, which need not weigh alike on plain
generation and on heads. So a difference of speed-ups counts only where its interval leaves out 1 by more than the two
runs' plain generations are apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heads.evaluation.report.sections import Section, Table
from heads.evaluation.runs.ratios import LEAST_UNITS, Ratio, ratio_of_ratios
from heads.evaluation.speed.drawings import draw_bars, draw_lines
from heads.evaluation.speed.figures import OVERALL
from heads.evaluation.speed.measuring import SpeedFigures
from heads.evaluation.speed.report_sections import FEW, INTERVAL, in_order, interval
from heads.evaluation.speed.speakers import ALONE, PLAIN

Questions = dict[str, dict[str, float]]
VERDICTS = {"more": "more", "less": "less", "": "no difference"}
DRIFT = "within drift"


def compare(runs: Mapping[str, SpeedFigures]) -> list[Section]:
    """Plain generation in all runs, a section for each method that all runs have, then pictures.

    Raises:
        ValueError: two runs have no question in common, or answered them otherwise, or one question_id of them has
            other words in another run.
    """
    first = next(iter(runs.values()))
    refuse_other_settings(runs)
    refuse_other_questions(runs)
    methods = [m for m in first["methods"] if m != PLAIN and all(m in run["methods"] for run in runs.values())]
    sections = [method_section(runs, method) for method in methods]
    bars = {
        category: {
            name: tuple(run["categories"][category][ALONE]["tokens_per_pass"][k] for k in ("value", "low", "high"))
            for name, run in runs.items()
            if category in run["categories"]
        }
        for category in in_order(first["categories"])
    }
    lines = {
        name: [(float(d), share) for d, share in enumerate(run["depth"][ALONE]["joint"], start=1)]
        for name, run in runs.items()
    }
    pictures = [
        draw_bars(bars, "Tokens per pass by category, heads alone, with 95 % intervals.", "tokens per pass", 1.0),
        draw_lines(
            lines, "Joint acceptance by depth, heads alone.", "depth", "accepted", percent=True, whole_steps=True
        ),
    ]
    return [plain_section(runs), *sections, Section(title="Side by side", pictures=pictures)]


def plain_section(runs: Mapping[str, SpeedFigures]) -> Section:
    """Plain generation's speed in each run, with its range, and what that means for the ratios."""
    speeds = {name: run["categories"][OVERALL][PLAIN]["tokens_per_second"] for name, run in runs.items()}
    low, high = min(speeds.values()), max(speeds.values())
    text = (
        f"Each run measured plain generation in turns with its heads: {low:.1f} to {high:.1f} tokens/s over the runs, "
        f"{high / low - 1:.0%} apart. Every speed-up is over the plain generation of its own run, so that a machine "
        f"that was faster or slower in another run, or another backbone, changes no ratio as long as it "
        f"changes both alike. It need not, so a difference of speed-ups that is within what plain generation differs "
        f"is called neither."
    )
    rows = [[name, f"{speed:.1f}"] for name, speed in speeds.items()]
    return Section(title="Plain generation", text=text, tables=[Table(columns=["run", "plain, tokens/s"], rows=rows)])


def refuse_other_settings(runs: Mapping[str, SpeedFigures]) -> None:
    """
    Raises:
        ValueError: runs with answers of other lengths, or that read their questions in another form.
    """
    for name in ("new_tokens", "form"):
        values = [run[name] for run in runs.values()]
        if len(set(values)) > 1:
            raise ValueError(
                f"The runs have {name} {' and '.join(map(str, values))}, so their ratios would not be the heads'; "
                f"measure them with the same --{name.replace('_', '-')}."
            )


def refuse_other_questions(runs: Mapping[str, SpeedFigures]) -> None:
    """
    Raises:
        ValueError: a question_id that two runs share belongs to other words; runs of an earlier version do not know
            their words, and pass.
    """
    (first_name, first), *others = ((name, digests_of(run["requests"])) for name, run in runs.items())
    for name, found in others:
        other = [question for question, digest in found.items() if first.get(question, digest) != digest]
        if other:
            shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
            raise ValueError(
                f"{first_name} and {name} asked other questions under the question_id {shown}; measure both on the "
                f"same file."
            )


def digests_of(requests: Sequence[SpeedFigures]) -> dict[str, str]:
    """What was asked under each question_id, where the run says it."""
    return {one["question_id"]: one["question_digest"] for one in requests if "question_digest" in one}


def method_section(runs: Mapping[str, SpeedFigures], method: str) -> Section:
    (first_name, first), *_ = runs.items()
    rows = []
    for name, run in runs.items():
        for category, methods in in_order(run["categories"]).items():
            if category not in first["categories"]:
                continue
            found = methods[method]
            row = [category, name, interval(found["tokens_per_pass"]), interval(found["speed_up"])]
            if run is first:
                rows.append([*row, "", "", "", ""])
                continue
            passes, speed, drift = against(run, first, method, category)
            rows.append([*row, str(passes), say_verdict(passes), str(speed), say_verdict(speed, drift)])
    order = {category: i for i, category in enumerate(in_order(first["categories"]))}
    rows.sort(key=lambda row: order[row[0]])
    columns = [
        "category", "run", "tokens per pass", "speed over plain", f"tokens per pass over {first_name}'s", "more?",
        f"speed-up over {first_name}'s", "faster?",
    ]  # fmt: skip
    note = (
        f"{INTERVAL}Where it holds 1 there is no difference to speak of. The questions are those that both runs have. "
        f"Speed-ups are over each run's own plain generation; {DRIFT}: the interval leaves out 1 by less than these "
        f"plain generations differ in tokens/s on the same questions, so that the machine may be the reason."
    )
    return Section(title=f"{method}, against {first_name}", tables=[Table(columns=columns, rows=rows, note=note)])


def say_verdict(estimate: Ratio, drift: float = 1.0) -> str:
    """Whether there is more, less, or no difference beyond the interval, and beyond what plain generation drifted.

    >>> ratio = Ratio(value=1.2, low=1.1, high=1.3, units=9)
    >>> say_verdict(ratio), say_verdict(ratio, drift=1.05), say_verdict(ratio, drift=1.15)
    ('more', 'more', 'within drift')
    >>> say_verdict(Ratio(value=1.2, low=1.2, high=1.2, units=1))
    'too few questions'

    Args:
        drift: the larger over the smaller of two runs' own plain speeds.
    """
    if estimate.units < LEAST_UNITS:
        return FEW
    if estimate.verdict and estimate.low / drift <= 1 <= estimate.high * drift:
        return DRIFT
    return VERDICTS[estimate.verdict]


def against(run: SpeedFigures, first: SpeedFigures, method: str, category: str) -> tuple[Ratio, Ratio, float]:
    """Tokens per pass and speed-up over the first run's, on the questions that both have, and plain's drift there."""
    ours, theirs = (questions_of(one["requests"], method, category) for one in (run, first))
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise ValueError(f"The runs have no question of {category} in common; measure both on the same file.")

    def column(found: Questions, figure: str) -> list[float]:
        return [found[name][figure] for name in shared]

    passes = ratio_of_ratios(
        column(ours, "tokens"), column(ours, "passes"), column(theirs, "tokens"), column(theirs, "passes")
    )
    plain, other = (sum(column(one, "plain_tokens")) / sum(column(one, "plain_seconds")) for one in (ours, theirs))
    return passes, speed_ratio(ours, theirs, shared), max(plain / other, other / plain)


def speed_ratio(ours: Questions, theirs: Questions, shared: Sequence[str]) -> Ratio:
    """One speed-up over another: the seconds of a token of plain over those of heads, in both runs.

    Within a run plain and heads write as many tokens up to rounding, so that seconds alone are compared.
    """
    return ratio_of_ratios(
        [ours[name]["plain_seconds"] for name in shared],
        [ours[name]["seconds"] for name in shared],
        [theirs[name]["plain_seconds"] for name in shared],
        [theirs[name]["seconds"] for name in shared],
    )


def questions_of(requests: Sequence[SpeedFigures], method: str, category: str) -> Questions:
    """Tokens, passes and seconds of each question over its turns, and plain's tokens and seconds."""
    found: Questions = {}
    for request in requests:
        if category not in (OVERALL, request["category"]):
            continue
        counts = request["methods"][method]
        sums = found.setdefault(
            request["question_id"], dict.fromkeys(("tokens", "passes", "seconds", "plain_tokens", "plain_seconds"), 0.0)
        )
        for figure in ("tokens", "passes", "seconds"):
            sums[figure] += counts[figure]
        sums["plain_tokens"] += request["methods"][PLAIN]["tokens"]
        sums["plain_seconds"] += request["methods"][PLAIN]["seconds"]
    return found
