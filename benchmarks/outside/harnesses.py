"""Outside harnesses' figures beside ours: `python -m benchmarks.outside.harnesses --copies FOLDER`.

FOLDER (by default $HEADWAY_HARNESSES) holds the checkouts Spec-Bench (github.com/hemingkx/Spec-Bench) and
Model-Optimizer (github.com/NVIDIA/Model-Optimizer); neither is a part of this project. Both decode the demo's held-out
prompts, greedily and without lookup, with the adapters beside this file. Counts must be equal, or the command fails; if
a harness counts in another way, a sentence says how. Plain and heads take turns within each harness, and each prompt's
seconds are medians over these repeats; a ratio's interval is over prompts.
"""
# P prompt, R repeat

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.outside import spec_bench, specdec_bench
from benchmarks.outside.answer_by_pass import decode
from benchmarks.shared import figures_table, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.prompts import default_prompts
from heads.evaluation.runs.ratios import Ratio, ratio_of_ratios

COPIES = "HEADWAY_HARNESSES"
CATEGORY = "coding"
PRECISION = 1e-9  # both sides divide the same integers

COUNTED = (
    "Spec-Bench's mean accepted tokens pools all passes; specdec_bench's Average_AL is the mean of requests. Both "
    "count the prompt's pass, and so do we. specdec_bench leaves out end-of-text tokens: {ended} here."
)
TIMED = (
    "All three time whole calls, the prompt's pass included: ours and specdec_bench until the last token is streamed, "
    "Spec-Bench until the call returns. Spec-Bench warms up by three answers to its first prompt, under "
    "torch.inference_mode; ours by one; specdec_bench not at all, which is why one more run of it goes before. It also "
    "decodes in a second thread. The ratios here are of all tokens over all seconds; Spec-Bench's own speed.py divides "
    "means of each prompt's speed."
)
BASELINE = (
    "Spec-Bench's speed.py counts plain's tokens anew from the stripped text, less one for a begin-of-text token that "
    "the demo's tokenizer does not write: {counted} tokens where {made} were generated. Its ratio is too high by that."
)


@dataclass(frozen=True, kw_only=True)
class HarnessFigures:
    """One harness's figures for one method; None for a figure that it does not give."""

    harness: str
    method: str
    tokens: int
    passes: int
    pooled: float | None
    of_requests: float | None
    tokens_P: tuple[int, ...]
    seconds_P: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens_P) / sum(self.seconds_P)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.outside.harnesses", __doc__)
    parser.add_argument("--copies", default=os.environ.get(COPIES), help=f"folder of both checkouts; ${COPIES}")
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=96, help="most new tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method in each harness, in turns")
    options = parser.parse_args(arguments)
    if not options.copies:
        raise ValueError(f"No checkouts were given; set {COPIES} or --copies to a folder of both (see --help).")
    console, copies = wide_console(), Path(options.copies)
    opened = open_heads([options.heads])
    ((name, token_heads),) = opened.token_heads.items()
    decodings = {"plain": None, f"{name} alone": TreeDecoding(token_heads, lookup=0)}
    texts = [
        opened.tokenizer.decode(prompt_1T[0])
        for prompt_1T in default_prompts(opened.source, opened.tokenizer, options.prompts)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        questions = write_questions(Path(scratch), texts)
        compare(
            console, copies, opened, decodings, questions, texts, options.new_tokens, options.repeats, Path(scratch)
        )


def write_questions(scratch: Path, texts: Sequence[str]) -> Path:
    """A file in Spec-Bench's format, which both harnesses read."""
    path = scratch / "question.jsonl"
    rows = [{"question_id": i, "category": CATEGORY, "turns": [text]} for i, text in enumerate(texts, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def compare(
    console: Console,
    copies: Path,
    opened: Opened,
    decodings: dict[str, Any],
    questions: Path,
    texts: Sequence[str],
    new_tokens: int,
    repeats: int,
    scratch: Path,
) -> None:
    plain, *others = decodings
    spec, specdec = copies / "Spec-Bench", copies / "Model-Optimizer"
    answers, ends = {}, {}

    def run_ours(method: str) -> HarnessFigures:
        own, without_end = ours(opened, method, decodings[method], texts, new_tokens)
        ends[method] = without_end
        return own

    def run_spec_bench(method: str) -> HarnessFigures:
        answers[method] = scratch / f"{method.replace(' ', '_')}.jsonl"
        return of_spec_bench(
            method, spec_bench.run(spec, opened, decodings[method], questions, new_tokens, answers[method])
        )

    def run_specdec_bench(method: str) -> HarnessFigures:
        return of_specdec_bench(
            method, specdec_bench.run(specdec, opened, decodings[method], questions, new_tokens, scratch / method)
        )

    run_specdec_bench(plain)  # it has no warm-up of its own
    own = in_turns(run_ours, list(decodings), repeats)
    theirs = in_turns(run_spec_bench, list(decodings), repeats)
    third = in_turns(run_specdec_bench, list(decodings), repeats)
    for method in decodings:
        check_equal(own[method], theirs[method])
        check_equal(ends[method], third[method])
    rows = [found[method] for method in decodings for found in (own, theirs, third)]
    turns = f"medians over {repeats} turn{'s' * (repeats != 1)} of plain and heads"
    console.print(
        table(rows, f"{len(texts)} held-out prompts, {new_tokens} new tokens, greedy, without lookup; {turns}")
    )
    say(console, COUNTED.format(ended=own[plain].tokens - ends[plain].tokens))
    said = {method: turns_in(path) for method, path in answers.items()}
    for method in others:
        shown = ", ".join(
            f"{found[plain].harness} {over(found[method], found[plain])}" for found in (own, theirs, third)
        )
        say(console, f"{method} over plain, with 95 % intervals over prompts: {shown}")
        ratio = spec_bench.speed(spec, answers[method], answers[plain], opened.tokenizer.name_or_path, CATEGORY)[2]
        say(console, f"{method} over plain by Spec-Bench's own speed.py, of the last turn: {ratio:.2f}")
        same = "equal" if said[method] == said[plain] else "NOT equal"
        say(console, f"{method}: Spec-Bench's answers are {same} to plain's")
    say(console, TIMED)
    counted = sum(len(opened.tokenizer(turn).input_ids) - 1 for turn in said[plain])
    say(console, BASELINE.format(counted=counted, made=own[plain].tokens))


def in_turns(run: Callable[[str], HarnessFigures], methods: Sequence[str], repeats: int) -> dict[str, HarnessFigures]:
    """Each method `repeats` times, all methods in each turn; a prompt's seconds are the median over its turns."""
    found: dict[str, list[HarnessFigures]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            found[method].append(run(method))
    return {method: median_of(rows) for method, rows in found.items()}


def median_of(rows: Sequence[HarnessFigures]) -> HarnessFigures:
    """
    >>> rows = [of_lengths("ours", "plain", [[1], [1, 1]], seconds) for seconds in ([1.0, 9.0], [2.0, 2.0], [3.0, 1.0])]
    >>> median_of(rows).seconds_P
    (2.0, 2.0)
    """
    seconds_PR = zip(*(row.seconds_P for row in rows), strict=True)
    return replace(rows[0], seconds_P=tuple(statistics.median(seconds_R) for seconds_R in seconds_PR))


def over(ours: HarnessFigures, plain: HarnessFigures) -> Ratio:
    """One harness's speed with heads over its plain speed, all tokens over all seconds."""
    return ratio_of_ratios(ours.tokens_P, ours.seconds_P, plain.tokens_P, plain.seconds_P)


def turns_in(answers: Path) -> list[str]:
    """The texts in Spec-Bench's file of answers."""
    found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    return [turn for answer in found for turn in answer["choices"][0]["turns"]]


def ours(
    opened: Opened, method: str, decoding: Any, texts: Sequence[str], new_tokens: int
) -> tuple[HarnessFigures, HarnessFigures]:
    """Our own figures on the texts that both harnesses read, and the same without end-of-text tokens."""
    prompts = [opened.tokenizer(text, return_tensors="pt").input_ids.to(opened.model.device) for text in texts]
    decode(opened.model, decoding, prompts[0], new_tokens)  # a first call allocates memory
    found = [decode(opened.model, decoding, prompt_1T, new_tokens)[1] for prompt_1T in prompts]
    seconds = [passes.times[-1] - passes.times[0] for passes in found]
    lengths = [[len(chunk) for chunk in passes.chunks] for passes in found]
    end = opened.tokenizer.eos_token_id
    inside = [[len([t for t in chunk if t != end]) for chunk in passes.chunks] for passes in found]
    inside = [[length for length in one if length] for one in inside]
    return of_lengths("ours", method, lengths, seconds), of_lengths("ours", method, inside, seconds)


def of_lengths(harness: str, method: str, lengths: Sequence[Sequence[int]], seconds: Sequence[float]) -> HarnessFigures:
    """
    >>> row = of_lengths("ours", "grounded alone", [[1, 3], [1, 1, 1]], [2.0, 1.5])
    >>> row.tokens, row.passes, row.pooled, row.of_requests, row.tokens_per_second
    (7, 5, 1.4, 1.5, 2.0)
    """
    tokens, passes = sum(map(sum, lengths)), sum(map(len, lengths))
    return HarnessFigures(
        harness=harness,
        method=method,
        tokens=tokens,
        passes=passes,
        pooled=tokens / passes,
        of_requests=statistics.mean(sum(one) / len(one) for one in lengths),
        tokens_P=tuple(map(sum, lengths)),
        seconds_P=tuple(seconds),
    )


def of_spec_bench(method: str, answers: Sequence[dict[str, Any]]) -> HarnessFigures:
    """The figures of its file of answers; Spec-Bench sums up by the mean of all passes' accept lengths."""
    choices = [answer["choices"][0] for answer in answers]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    tokens_P = tuple(sum(choice["new_tokens"]) for choice in choices)
    return HarnessFigures(
        harness="Spec-Bench",
        method=method,
        tokens=sum(tokens_P),
        passes=sum(sum(choice["decoding_steps"]) for choice in choices),
        pooled=sum(lengths) / len(lengths),
        of_requests=None,
        tokens_P=tokens_P,
        seconds_P=tuple(sum(choice["wall_time"]) for choice in choices),
    )


def of_specdec_bench(method: str, found: dict[str, Any]) -> HarnessFigures:
    histogram = found["acceptance"]["Acceptance_Length_Histogram"]
    return HarnessFigures(
        harness="specdec_bench",
        method=method,
        tokens=sum(found["tokens"]),
        passes=sum(histogram.values()),
        pooled=None,
        of_requests=found["acceptance"]["Average_AL"],
        tokens_P=tuple(found["tokens"]),
        seconds_P=tuple(found["seconds"]),
    )


def check_equal(ours: HarnessFigures, theirs: HarnessFigures) -> None:
    """
    Raises:
        ValueError: a count of a harness is not ours.
    """
    for name in ("tokens", "passes", "pooled", "of_requests"):
        our, their = getattr(ours, name), getattr(theirs, name)
        if their is not None and abs(our - their) > PRECISION:
            raise ValueError(
                f"{theirs.harness} counts {their} {name} for {theirs.method}, we count {our}; one of the adapters is "
                f"wrong, or the harness has changed."
            )


def table(rows: Sequence[HarnessFigures], title: str) -> Any:
    shown = figures_table(
        title,
        "method",
        "harness",
        "tokens",
        "passes",
        "tokens per pass, pooled",
        "mean of requests",
        "tokens/s",
        left=2,
    )
    for row in rows:
        means = ("–" if value is None else f"{value:.4f}" for value in (row.pooled, row.of_requests))
        shown.add_row(row.method, row.harness, str(row.tokens), str(row.passes), *means, f"{row.tokens_per_second:.1f}")
    return shown


if __name__ == "__main__":
    run_benchmark(main)
