"""Outside harnesses' figures beside ours: `python -m benchmarks.outside.harnesses --copies FOLDER`.

FOLDER (by default $HEADWAY_HARNESSES) holds the checkouts Spec-Bench (github.com/hemingkx/Spec-Bench) and
Model-Optimizer (github.com/NVIDIA/Model-Optimizer); neither is a part of this project. Both decode the demo's held-out
prompts, greedily and without lookup, with the adapters beside this file. Counts must be equal, or the command fails; if
a harness counts in another way, a sentence says how. Speeds are of separate runs, so they differ.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.outside import spec_bench, specdec_bench
from benchmarks.outside.answer_by_pass import decode
from benchmarks.shared import figures_table, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.prompts import default_prompts

COPIES = "HEADWAY_HARNESSES"
CATEGORY = "coding"
PRECISION = 1e-9  # both sides divide the same integers

COUNTED = (
    "Spec-Bench's mean accepted tokens pools all passes; specdec_bench's Average_AL is the mean of requests. Both "
    "count the prompt's pass, and so do we. specdec_bench leaves out end-of-text tokens: {ended} here."
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
    tokens_per_second: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.outside.harnesses", __doc__)
    parser.add_argument("--copies", default=os.environ.get(COPIES), help=f"folder of both checkouts; ${COPIES}")
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=96, help="most new tokens of an answer")
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
        compare(console, copies, opened, decodings, questions, texts, options.new_tokens, Path(scratch))


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
    scratch: Path,
) -> None:
    rows, answers, said = [], {}, {}
    for method, decoding in decodings.items():
        own, without_end = ours(opened, method, decoding, texts, new_tokens)
        rows.append(own)
        path = scratch / f"{method.replace(' ', '_')}.jsonl"
        answers[method] = path
        found = spec_bench.run(copies / "Spec-Bench", opened, decoding, questions, new_tokens, path)
        said[method] = [answer["choices"][0]["turns"] for answer in found]
        rows.append(of_spec_bench(method, found))
        other = specdec_bench.run(copies / "Model-Optimizer", opened, decoding, questions, new_tokens, scratch / method)
        rows.append(of_specdec_bench(method, other))
        check_equal(own, rows[-2])
        check_equal(without_end, rows[-1])
    console.print(table(rows, f"{len(texts)} held-out prompts, {new_tokens} new tokens, greedy, without lookup"))
    say(console, COUNTED.format(ended=own.tokens - without_end.tokens))
    plain, *others = decodings
    for method in others:
        tokenizer = opened.tokenizer.name_or_path
        ratio = spec_bench.speed(copies / "Spec-Bench", answers[method], answers[plain], tokenizer, CATEGORY)[2]
        of = {(row.harness, row.method): row.tokens_per_second for row in rows}
        say(
            console,
            f"{method} over plain: ours {of['ours', method] / of['ours', plain]:.2f}, Spec-Bench {ratio:.2f}, "
            f"specdec_bench {of['specdec_bench', method] / of['specdec_bench', plain]:.2f}",
        )
        same = "equal" if said[method] == said[plain] else "NOT equal"
        say(console, f"{method}: Spec-Bench's answers are {same} to plain's")
    counted = sum(len(opened.tokenizer(turn).input_ids) - 1 for turns in said[plain] for turn in turns)
    say(console, BASELINE.format(counted=counted, made=next(row.tokens for row in rows if row.method == plain)))


def ours(
    opened: Opened, method: str, decoding: Any, texts: Sequence[str], new_tokens: int
) -> tuple[HarnessFigures, HarnessFigures]:
    """Our own figures on the texts that both harnesses read, and the same without end-of-text tokens."""
    prompts = [opened.tokenizer(text, return_tensors="pt").input_ids.to(opened.model.device) for text in texts]
    decode(opened.model, decoding, prompts[0], new_tokens)  # a first call allocates memory
    found = [decode(opened.model, decoding, prompt_1T, new_tokens)[1] for prompt_1T in prompts]
    seconds = sum(passes.times[-1] - passes.times[0] for passes in found)
    lengths = [[len(chunk) for chunk in passes.chunks] for passes in found]
    end = opened.tokenizer.eos_token_id
    inside = [[len([t for t in chunk if t != end]) for chunk in passes.chunks] for passes in found]
    inside = [[length for length in one if length] for one in inside]
    return of_lengths("ours", method, lengths, seconds), of_lengths("ours", method, inside, seconds)


def of_lengths(harness: str, method: str, lengths: Sequence[Sequence[int]], seconds: float) -> HarnessFigures:
    """
    >>> row = of_lengths("ours", "grounded alone", [[1, 3], [1, 1, 1]], 3.5)
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
        tokens_per_second=tokens / seconds,
    )


def of_spec_bench(method: str, answers: Sequence[dict[str, Any]]) -> HarnessFigures:
    """The figures of its file of answers; Spec-Bench sums up by the mean of all passes' accept lengths."""
    choices = [answer["choices"][0] for answer in answers]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    tokens = sum(sum(choice["new_tokens"]) for choice in choices)
    return HarnessFigures(
        harness="Spec-Bench",
        method=method,
        tokens=tokens,
        passes=sum(sum(choice["decoding_steps"]) for choice in choices),
        pooled=sum(lengths) / len(lengths),
        of_requests=None,
        tokens_per_second=tokens / sum(sum(choice["wall_time"]) for choice in choices),
    )


def of_specdec_bench(method: str, found: dict[str, Any]) -> HarnessFigures:
    histogram = found["acceptance"]["Acceptance_Length_Histogram"]
    return HarnessFigures(
        harness="specdec_bench",
        method=method,
        tokens=found["tokens"],
        passes=sum(histogram.values()),
        pooled=None,
        of_requests=found["acceptance"]["Average_AL"],
        tokens_per_second=found["tokens"] / found["seconds"],
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
