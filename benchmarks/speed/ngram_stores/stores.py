"""The compared stores: each has a function that builds it on one core and, if it answers questions, one that asks it.

    headway      this library
    dictionaries {n-gram: count} of each order, the paper's way, pickled
    duckdb       GROUP BY over the n-grams of order 6, lower orders from higher ones; sorted tables
    polars       the same in its streaming engine; Parquet files
    infini-gram  a suffix array of the corpus (Liu et al. 2024): all orders at once, counted when they are asked for

`python -m benchmarks.speed.ngram_stores.stores STORE CORPUS TOKENS FOLDER` prints one store's figures as JSON. It runs
in its own process, in any Python that has the store's package; apart from that this file imports only NumPy.
"""
# T token of the corpus, N n-gram

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ORDER, VOCAB = 6, 2048
NO_TOKEN = -1  # behind a document's end
COLUMNS = [f"t{i}" for i in range(ORDER)]
Ask = Callable[[Any, Any], Any]
"""(N, C) contexts and (N, M) tokens to their probabilities (N, orders, M)."""


def windows(documents: Sequence[Any]) -> dict[str, Any]:
    """Six columns: the 6-gram that begins at each token."""
    joined = np.concatenate([np.append(ids.astype(np.int16), [NO_TOKEN] * (ORDER - 1)) for ids in documents])
    joined = joined.astype(np.int16)
    begins = np.flatnonzero(joined != NO_TOKEN)
    return {name: joined[begins + i] for i, name in enumerate(COLUMNS)}


def build_headway(documents: Sequence[Any], folder: Path) -> Ask:
    from heads.ngrams.counting import count_ngrams

    torch = importlib.import_module("torch")
    table = count_ngrams(documents, folder=folder / "table", order=ORDER, vocab_size=VOCAB, workers=1)

    def ask(contexts_NC: Any, tokens_NM: Any) -> Any:
        return table.next_token_probabilities(torch.from_numpy(contexts_NC), torch.from_numpy(tokens_NM)).numpy()

    return ask


def build_dictionaries(documents: Sequence[Any], folder: Path) -> Ask:
    counts: list[Counter[tuple[int, ...]]] = []
    for n in range(1, ORDER + 1):
        counts.append(Counter())
        for ids in map(np.ndarray.tolist, documents):
            counts[-1].update(zip(*(ids[i:] for i in range(n)), strict=False))
    before: Counter[tuple[int, ...]] = Counter()
    for grams in counts[1:]:
        for gram, count in grams.items():
            before[gram[:-1]] += count
    with (folder / "dictionaries.pickle").open("wb") as file:
        pickle.dump([*map(dict, counts), dict(before)], file, protocol=5)

    def ask(contexts_NC: Any, tokens_NM: Any) -> Any:
        found = np.zeros((len(contexts_NC), ORDER - 1, tokens_NM.shape[1]))
        for i, (context, tokens) in enumerate(zip(contexts_NC.tolist(), tokens_NM.tolist(), strict=True)):
            for n in range(2, ORDER + 1):
                beginning, grams = tuple(context[1 - n :]), counts[n - 1]
                if total := before.get(beginning, 0):
                    found[i, n - 2] = [grams.get((*beginning, token), 0) / total for token in tokens]
        return found

    return ask


def build_duckdb(documents: Sequence[Any], folder: Path) -> None:
    duckdb = importlib.import_module("duckdb")
    database = duckdb.connect(str(folder / "ngrams.duckdb"))
    database.execute("SET threads = 1; SET memory_limit = '4GB'; SET preserve_insertion_order = false")
    database.register("places", windows(documents))
    source, count = "places", "count(*)"
    for n in range(ORDER, 0, -1):
        names = ", ".join(COLUMNS[:n])
        database.execute(
            f"CREATE TABLE order{n} AS SELECT {names}, {count}::UINTEGER AS count FROM {source} "
            f"GROUP BY {names} ORDER BY {names}"
        )
        source, count = f"order{n}", "sum(count)"
    database.close()


def build_polars(documents: Sequence[Any], folder: Path) -> None:
    polars = importlib.import_module("polars")
    frame = polars.LazyFrame(windows(documents))
    count = polars.len()
    for n in range(ORDER, 0, -1):
        path = folder / f"order{n}.parquet"
        grouped = frame.group_by(COLUMNS[:n]).agg(count.cast(polars.UInt32).alias("count"))
        grouped.sort(COLUMNS[:n]).sink_parquet(path, engine="streaming")
        frame, count = polars.scan_parquet(path), polars.col("count").sum()


def build_infini_gram(documents: Sequence[Any], folder: Path) -> Ask:
    package = importlib.import_module("infini_gram.engine")
    end = np.array([0xFFFF], np.uint16)
    np.concatenate([part for ids in documents for part in (end, ids)]).astype("<u2").tofile(folder / "tokenized.0")
    lengths = 2 * np.array([1 + len(ids) for ids in documents], np.uint64)
    (np.cumsum(lengths) - lengths).astype("<u8").tofile(folder / "offset.0")
    options = f"--data_dir {folder} --save_dir {folder} --token_dtype u16 --cpus 1 --mem 4 --ulimit 1024"
    command = [sys.executable, "-m", "infini_gram.indexing", *options.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    engine = package.InfiniGramEngine(str(folder), eos_token_id=0, vocab_size=VOCAB)

    def ask(contexts_NC: Any, tokens_NM: Any) -> Any:
        found = np.zeros((len(contexts_NC), ORDER - 1, tokens_NM.shape[1]))
        for i, (context, tokens) in enumerate(zip(contexts_NC.tolist(), tokens_NM.tolist(), strict=True)):
            for n in range(2, ORDER + 1):
                answers = [engine.prob(prompt_ids=context[1 - n :], cont_id=token) for token in tokens]
                found[i, n - 2] = [max(0.0, answer["prob"]) for answer in answers]
        return found

    return ask


STORES: dict[str, Callable[[Sequence[Any], Path], Ask | None]] = {
    "headway": build_headway,
    "dictionaries": build_dictionaries,
    "duckdb": build_duckdb,
    "polars": build_polars,
    "infini-gram": build_infini_gram,
}

PACKAGES = {
    "headway": ("torch", "heads.ngrams.counting"),
    "dictionaries": (),
    "duckdb": ("duckdb",),
    "polars": ("polars",),
    "infini-gram": ("infini_gram.engine",),
}
"""The modules that each store imports."""


def main() -> None:
    from benchmarks.speed.ngram_stores.measure import measure_store

    store, corpus, tokens, folder = sys.argv[1:]
    for package in PACKAGES[store]:  # importing is not building
        importlib.import_module(package)
    print(json.dumps(measure_store(STORES[store], Path(corpus), int(tokens), Path(folder))))


if __name__ == "__main__":
    main()
