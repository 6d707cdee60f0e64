"""Speed of counting n-grams and of looking up a joint of candidates: `python -m benchmarks.speed.ngrams`.

The corpus is sampled from a fixed seed: tokens of a Zipf distribution over 50,000, in documents of 1,000. A joint of
50 × 50 × 50 candidates is looked up in a table of over 10 million different trigrams, on one core: with candidates
sampled as the tokens are, and, the hardest case, with the 50 commonest tokens at every position. For comparison the
same is looked up in a Python dict that holds only this joint's trigrams, and a pass of a backbone in the shape of Llama
3.2 1B is timed: one layer and an eighth of the unembedding, with random weights.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.shared import figures_table, parser_of, run_benchmark, wide_console, write_figures
from heads.evaluation.tables import describe_machine
from heads.ngrams.counting import count_ngrams
from heads.ngrams.table import NgramTable

VOCAB, DOCUMENT = 50_000, 1_000
CANDIDATES, ORDER = 50, 3
COUNTED_TOKENS, TABLE_TOKENS = 10_000_000, 12_000_000  # the latter hold over 10 million different trigrams
WORKERS = 2
TARGET_LOOKUP_MS, TARGET_COUNTING_S = 5.0, 60.0
UNEMBEDDING_PARTS = 8
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def zipf_tokens(num: int, rng: np.random.Generator) -> Any:
    """Token i with a probability proportional to 1 / (i + 1)."""
    cumulative = np.cumsum(1 / np.arange(1, VOCAB + 1))
    return np.searchsorted(cumulative, rng.random(num) * cumulative[-1]).astype(np.int32)


def sample_candidates(rng: np.random.Generator) -> Tensor:
    """Distinct tokens in the order in which they are sampled."""
    return torch.tensor(list(dict.fromkeys(zipf_tokens(100 * CANDIDATES, rng).tolist()))[:CANDIDATES])


def make_documents(num_tokens: int) -> list[Any]:
    return np.split(zipf_tokens(num_tokens, np.random.default_rng(0)), range(DOCUMENT, num_tokens, DOCUMENT))


def time_counting(folder: Path) -> float:
    """Seconds from documents in memory to the table on disk."""
    documents = make_documents(COUNTED_TOKENS)
    start = time.perf_counter()
    count_ngrams(documents, folder=folder, order=ORDER, vocab_size=VOCAB, workers=WORKERS)
    return time.perf_counter() - start


def median_ms(calls: Sequence[Callable[[], Any]]) -> float:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_lookup(table: NgramTable, joints: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Milliseconds for one joint: its counts, its co-occurrence mask, and its counts from a dict of tuples."""
    known = [plain_counts(table, joint) for joint in joints[:3]]
    keys = [[ids.tolist() for ids in joint] for joint in joints[:3]]
    for joint, counts, ids in zip(joints, known, keys, strict=False):
        assert look_up_plainly(counts, ids) == table.joint_counts(joint).flatten().tolist()
    return {
        "counts_ms": median_ms([partial(table.joint_counts, joint) for joint in joints]),
        "mask_ms": median_ms([partial(table.cooccurrence, joint) for joint in joints]),
        "dict_ms": median_ms([partial(look_up_plainly, *pair) for pair in zip(known, keys, strict=True)]),
        "seen_share": statistics.mean(float((table.joint_counts(joint) > 0).float().mean()) for joint in joints),
    }


def plain_counts(table: NgramTable, joint: Sequence[Tensor]) -> dict[tuple[int, ...], int]:
    """The joint's trigrams in a dict, found prefix by prefix, independently of the code that is timed."""
    last = set(joint[-1].tolist())
    counts = {}
    for prefix in itertools.product(*(ids.tolist() for ids in joint[:-1])):
        tokens, seen = table.next_counts(prefix)
        counts.update({(*prefix, t): c for t, c in zip(tokens.tolist(), seen.tolist(), strict=True) if t in last})
    return counts


def look_up_plainly(counts: dict[tuple[int, ...], int], joint: Sequence[Sequence[int]]) -> list[int]:
    return [counts.get(gram, 0) for gram in itertools.product(*joint)]


@torch.no_grad()
def time_pass(rows: int, repeats: int = 9) -> float:
    """Milliseconds of a 1B-shaped float32 pass, extrapolated from one layer and a part of the unembedding."""
    config = LlamaConfig(**LLAMA_1B, attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, layer_idx=0).eval()
    unembedding = torch.randn(config.vocab_size // UNEMBEDDING_PARTS, config.hidden_size)
    hidden = torch.randn(1, rows, config.hidden_size)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(rows)[None])
    calls = [partial(layer, hidden, position_embeddings=rotary)] * repeats
    parts = [partial(torch.matmul, hidden, unembedding.T)] * repeats
    median_ms(calls[:2] + parts[:2])
    return config.num_hidden_layers * median_ms(calls) + UNEMBEDDING_PARTS * median_ms(parts)


def measure(folder: Path) -> dict[str, Any]:
    threads = torch.get_num_threads()
    passes = {rows: time_pass(rows) for rows in (1, 3)}
    torch.set_num_threads(1)
    seconds = time_counting(folder / "counted")
    documents = make_documents(TABLE_TOKENS)
    table = count_ngrams(documents, folder=folder / "table", order=ORDER, vocab_size=VOCAB, workers=WORKERS)
    del documents
    rng = np.random.default_rng(1)
    joints = {
        "sampled as tokens are": [[sample_candidates(rng) for _ in range(ORDER)] for _ in range(31)],
        "the 50 commonest": [[torch.randperm(CANDIDATES) for _ in range(ORDER)] for _ in range(31)],
    }
    return {
        "counting_seconds": seconds,
        "trigrams": table.description["num_ngrams"][-1],
        "lookups": {name: time_lookup(table, of) for name, of in joints.items()},
        "pass_ms": passes,
        "pass_threads": threads,
    }


def show(console: Console, found: dict[str, Any]) -> None:
    title = f"50 × 50 × 50 joint, {found['trigrams']:,} different trigrams, one core"
    table = figures_table(title, "candidates", "seen", "counts", "mask", "dict / counts", "mask / pass")
    for name, row in found["lookups"].items():
        ratio = f"{row['dict_ms'] / row['counts_ms']:.1f}"
        share = f"{row['mask_ms'] / found['pass_ms'][1]:.2%}"
        times = (f"{row['counts_ms']:.2f} ms", f"{row['mask_ms']:.2f} ms")
        table.add_row(name, f"{row['seen_share']:.0%}", *times, ratio, share)
    console.print(table)
    passes = ", ".join(f"{ms:.0f} ms over {rows} rows" for rows, ms in found["pass_ms"].items())
    console.print(f"A 1B-shaped pass in float32 on {found['pass_threads']} threads: {passes}.")
    for name, row in found["lookups"].items():
        say_target(console, f"mask of a joint, {name}", row["mask_ms"], TARGET_LOOKUP_MS, "ms")
    what = f"{COUNTED_TOKENS:,} tokens counted up to trigrams, {WORKERS} workers"
    say_target(console, what, found["counting_seconds"], TARGET_COUNTING_S, "s")


def say_target(console: Console, what: str, measured: float, target: float, unit: str) -> None:
    verdict = "reached" if measured <= target else "not reached"
    console.print(f"{what}: {measured:.2f} {unit}, target at most {target:g} {unit}: {verdict}")


def main() -> None:
    parser = parser_of("benchmarks.speed.ngrams", __doc__)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    show(wide_console(), found)
    write_figures(options.json, {"machine": describe_machine(torch.device("cpu")), **found})


if __name__ == "__main__":
    run_benchmark(main)
