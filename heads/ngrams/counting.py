"""Count the n-grams of a corpus into an `NgramTable`: in shards, in parallel, resumed where it was interrupted.

    documents ──► shards of whole documents ──► one sorted run each ──► parts by first token ──► the table's arrays
                    (many at a time)             <folder>.counting/       (many at a time)         <folder>/

A run or part gets its name when it is complete, and is then never computed again. The complete table moves to its
folder in one step. Memory holds some shards and parts, never the corpus.
"""
# L length of a shard's padded stream, N n-grams, T token of a document, V vocabulary, W words of an n-gram

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from heads.ngrams.files import FORMAT_VERSION, MAX_ORDER, MAX_VOCAB, fingerprint, write_atomically, write_table
from heads.ngrams.runs import Packing, count_equal, cut_orders, merge
from heads.ngrams.table import NgramTable

SHARD_TOKENS = 1 << 20  # an interruption loses at most one shard of each worker; larger ones take more memory and time
PART_NGRAMS = 1 << 20  # about so many in a part, which holds all n-grams of each of its first tokens
QUEUED_JOBS = 2  # for each worker, so that shards do not pile up in memory

Report = Callable[[str, int, int | None], Any]
"""Called with what is done ("counted tokens", "merged parts"), how much of it, and how much in all (None: unknown)."""


def count_ngrams(
    documents: Iterable[Sequence[int] | NDArray[Any]],
    *,
    folder: str | Path,
    order: int,
    vocab_size: int,
    tokenizer: Any | None = None,
    sources: Sequence[str] = (),
    min_count: int = 1,
    workers: int = 1,
    report: Report = lambda what, done, total: None,
) -> NgramTable:
    """Count all n-grams of orders 1 to `order` within documents.

    The same call resumes a count that was interrupted.

    Args:
        documents: the token ids of each document, in the same order when a count is resumed.
        folder: the table's, new or empty. `<folder>.counting` beside it holds what is unfinished.
        vocab_size: ids are below it; `len(tokenizer)`.
        tokenizer: the table stores its fingerprint; without one, tables differ by their vocabulary's size alone.
        sources: where the documents come from, for the record and to tell interrupted counts apart.
        min_count: n-grams of order 2 and above that are seen less often are dropped.
        workers: threads that sort and merge, for which NumPy releases the interpreter's lock.

    Raises:
        ValueError: settings out of range, no token, an id outside the vocabulary, a folder with something in it, an
            interrupted count with other settings or documents, or another process that counts there.
    """
    check_settings(order, vocab_size, min_count, workers)
    folder = Path(folder)
    check_new(folder)
    settings = {
        "order": order,
        "vocab_size": vocab_size,
        "tokenizer_sha256": None if tokenizer is None else fingerprint(tokenizer),
        "tokenizer": getattr(tokenizer, "name_or_path", None),
        "min_count": min_count,
        "sources": list(sources),
    }
    work = folder.with_name(folder.name + ".counting")
    packing = Packing(order, vocab_size)
    with alone_in(work):
        check_new(folder)  # another process may have finished it meanwhile
        begin_or_resume(work, settings)
        with ThreadPoolExecutor(workers) as pool:
            counted = count_shards(documents, packing, work, (pool, workers), report)
            parts = merge_runs(counted["runs"], packing, min_count, work, (pool, workers), report)
        (work / "table").mkdir(exist_ok=True)
        description = {"format_version": FORMAT_VERSION, **settings, "num_documents": counted["documents"]}
        write_table(work / "table", parts, description)
        os.replace(work / "table", folder)
        shutil.rmtree(work)
    return NgramTable.open(folder, tokenizer)


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Lock the folder of an unfinished count; the lock is released when the process ends, in whatever way.

    Raises:
        ValueError: another process counts there.
    """
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / "lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(
            f"{work} is in use: another process counts there; wait for it, or give another folder."
        ) from error


def check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give a new folder for the n-gram table or delete the old one.")


def check_settings(order: int, vocab_size: int, min_count: int, workers: int) -> None:
    for name, value, most in (
        ("order", order, MAX_ORDER),
        ("vocab_size", vocab_size, MAX_VOCAB),
        ("min_count", min_count, None),
        ("workers", workers, None),
    ):
        if value < 1 or (most is not None and value > most):
            raise ValueError(f"{name} is {value}; give a number from 1 {f'to {most:,}' if most else 'on'}.")


def begin_or_resume(work: Path, settings: dict[str, Any]) -> None:
    """Store the settings, or compare them with those of the interrupted count.

    Raises:
        ValueError: they differ.
    """
    path = work / "settings.json"
    settings = {**settings, "shard_tokens": SHARD_TOKENS, "part_ngrams": PART_NGRAMS}
    if not path.is_file():
        write_atomically(path, lambda file: file.write(json.dumps(settings, indent=2).encode()))
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{work} holds an interrupted count with {name} {begun.get(name)!r}, and {value!r} is given now; give "
                f"the former to resume it, or delete {work} to begin anew."
            )


def count_shards(
    documents: Iterable[Any], packing: Packing, work: Path, pool: tuple[Executor, int], report: Report
) -> dict[str, Any]:
    """Write one sorted run for each shard; returns the runs' paths and the number of documents.

    Raises:
        ValueError: there is no token, an id is outside the vocabulary, or runs of other documents are there.
    """
    runs: list[Path] = []
    totals = {"documents": 0, "tokens": 0}
    stale = set(work.glob("run-*.npy"))

    def jobs() -> Iterator[tuple[Any, ...]]:
        for number, shard in enumerate(split_shards(documents)):
            stream_L = packing.join([check_ids(ids, packing.vocab_size) for ids in shard])
            # A run of other tokens has another name, by the checksum.
            runs.append(work / f"run-{number:06d}-{zlib.crc32(stream_L.data):08x}.npy")
            totals["documents"] += len(shard)
            tokens = sum(map(len, shard))
            yield count_shard, packing, stream_L, runs[-1], tokens

    for tokens in run_ahead(pool, jobs()):
        totals["tokens"] += tokens
        report("counted tokens", totals["tokens"], None)
    if stale - set(runs):
        raise ValueError(
            f"{work} holds an interrupted count of other documents than those given now; give the same ones, or delete "
            f"{work} to begin anew."
        )
    if not totals["tokens"]:
        raise ValueError("The documents hold no tokens, so there is nothing to count; give a source with text.")
    return {"runs": runs, "documents": totals["documents"]}


def split_shards(documents: Iterable[Any]) -> Iterator[list[Any]]:
    shard: list[Any] = []
    tokens = 0
    for ids in documents:
        shard.append(ids)
        tokens += len(ids)
        if tokens >= SHARD_TOKENS:
            yield shard
            shard, tokens = [], 0
    if shard:
        yield shard


def check_ids(ids: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[np.int32]:
    ids_T = np.asarray(ids) if len(ids) else np.zeros(0, np.int32)
    if len(ids_T) and (ids_T.dtype.kind not in "iu" or ids_T.min() < 0 or ids_T.max() >= vocab_size):
        raise ValueError(
            f"A document holds ids from {ids_T.min()} to {ids_T.max()}, and the vocabulary has {vocab_size:,} tokens; "
            "give the tokenizer that the ids were made with."
        )
    return ids_T.astype(np.int32, copy=False)


def count_shard(packing: Packing, stream_L: NDArray[np.int32], path: Path, tokens: int) -> int:
    if not path.is_file():
        words_WN, counts_N = count_equal(packing.pack(stream_L))
        content = np.concatenate([words_WN, counts_N[None].astype(np.uint64)])
        write_atomically(path, lambda file: np.save(file, content))
    return tokens


def run_ahead(pool: tuple[Executor, int], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Results of jobs (function, *arguments) in their order; a job is created only when a worker will soon be free."""
    executor, workers = pool
    waiting: deque[Future[Any]] = deque()
    for job in jobs:
        waiting.append(executor.submit(*job))
        if len(waiting) >= workers + QUEUED_JOBS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def merge_runs(
    runs: Sequence[Path], packing: Packing, min_count: int, work: Path, pool: tuple[Executor, int], report: Report
) -> list[Path]:
    """Merge the runs into parts by first token; returns the parts' paths in the order of these tokens."""
    bounds = choose_bounds(runs, packing)
    parts = [work / f"part-{start:07d}.npz" for start in bounds[:-1]]
    jobs = (
        (merge_part, runs, packing, min_count, range(start, stop), part)
        for start, stop, part in zip(bounds, bounds[1:], parts, strict=False)
    )
    for done, _ in enumerate(run_ahead(pool, jobs), start=1):
        report("merged parts", done, len(parts))
    return parts


def choose_bounds(runs: Sequence[Path], packing: Packing) -> list[int]:
    """First tokens at which parts of about PART_NGRAMS begin, from 0 to the vocabulary's end."""
    tokens = np.arange(packing.vocab_size + 1)
    before_V = np.zeros(len(tokens), np.int64)
    for run in runs:
        before_V += packing.find_first(np.load(run, mmap_mode="r"), tokens)
    starts = np.unique(before_V[:-1] // PART_NGRAMS, return_index=True)[1]
    return [*starts.tolist(), packing.vocab_size]


def merge_part(runs: Sequence[Path], packing: Packing, min_count: int, first_tokens: range, path: Path) -> None:
    if path.is_file():
        return
    pieces = []
    for run in runs:
        content = np.load(run, mmap_mode="r")
        start, stop = packing.find_first(content, np.array([first_tokens.start, first_tokens.stop]))
        pieces.append((content[:-1, start:stop], content[-1, start:stop].astype(np.int64)))
    words_WN, counts_N = merge(pieces)
    unigrams, orders = cut_orders(packing, words_WN, counts_N, first_tokens, min_count)
    arrays: dict[str, Any] = {"order1.counts": unigrams, "order1.positions": unigrams.sum()}
    for order, grams in enumerate(orders, start=2):
        arrays |= {f"order{order}.tokens": grams.tokens_N, f"order{order}.counts": grams.counts_N}
        arrays |= {f"order{order}.starts": grams.children_P, f"order{order}.positions": grams.positions}
    write_atomically(path, lambda file: np.savez(file, **arrays))
