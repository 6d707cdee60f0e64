"""Measures one store in the process that builds it: seconds, memory, disk, and questions a second."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.ngram_stores.questions import Questions, make_questions

SPARE_TOKENS = 1_000_000  # after those that are counted: texts along whose steps questions are asked
EVERY = 0.05  # seconds between two looks at the folder
FREQUENT = 100
KIB = 1024


def measure_store(
    build: Callable[[Sequence[Any], Path], Any], corpus: Path, tokens: int, folder: Path
) -> dict[str, Any]:
    """Build a store of the corpus's first tokens and ask it.

    Returns:
        Seconds and CPU seconds of building; the memory that it added to the process with the corpus; the disk space of
        the store, and the most while it was built; and, of a store that answers, questions a second and the answers.
    """
    documents, asked = split_corpus(corpus, tokens)
    frequent = np.bincount(np.concatenate(documents)).argsort()[::-1][:FREQUENT]
    questions = make_questions(asked, frequent)
    folder.mkdir(parents=True, exist_ok=True)
    before = forget_peak()
    with LargestSize(folder) as largest:
        start, cpu = time.perf_counter(), cpu_seconds()
        ask = build(documents, folder)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    found = {
        "tokens": sum(map(len, documents)),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "memory": max(0, peak_bytes() - before),
    }
    found |= {"disk": size_of(folder), "largest_disk": max(largest.bytes, size_of(folder))}
    return found | (time_questions(ask, questions) if ask is not None else {})


def split_corpus(corpus: Path, tokens: int) -> tuple[list[Any], list[Any]]:
    """The first whole documents of at least so many tokens, and the documents after them."""
    with np.load(corpus) as arrays:
        tokens_T, ends_L = arrays["tokens_T"], np.cumsum(arrays["lengths_L"])
    documents = np.split(tokens_T, ends_L[:-1])
    count = 1 + int(np.searchsorted(ends_L, tokens))
    return documents[:count], documents[count:]


def time_questions(ask: Callable[[Any, Any], Any], questions: Questions) -> dict[str, Any]:
    """Questions a second, without the first pass over all steps, which reads the store from disk."""
    steps = list(zip(questions.contexts_SNC, questions.tokens_SNM, strict=True))
    half = len(steps) // 2
    for contexts_NC, tokens_NM in steps[:half]:
        ask(contexts_NC, tokens_NM)
    seconds, answers = [], []
    for contexts_NC, tokens_NM in steps[half:]:
        start = time.perf_counter()
        answers.append(ask(contexts_NC, tokens_NM))
        seconds.append(time.perf_counter() - start)
    each = questions.asked / len(steps)
    step = statistics.median(seconds)
    seen = int(sum((answer > 0).sum() for answer in answers))
    total = float(sum(answer.sum() for answer in answers))
    return {"questions_per_second": each / step, "step_ms": 1000 * step, "seen": seen, "total": total}


def cpu_seconds() -> float:
    """CPU seconds of this process and its children, which depend little on a busy machine."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(found.ru_utime + found.ru_stime for found in times)


def forget_peak() -> int:
    """Start the peak of this process anew, if the system can; returns the bytes that it holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_bytes()
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """Peak bytes of this process, or of one of its children if that is more."""
    children = KIB * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if Path("/proc/self/status").is_file():
        return max(status_bytes("VmHWM"), children)
    return max(KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, children)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return KIB * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # a temporary file that is gone
            continue
    return total


class LargestSize:
    """A context that reads a folder's size every `EVERY` seconds and keeps the largest."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes = folder, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LargestSize:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            self.bytes = max(self.bytes, size_of(self.folder))
