"""N-gram tables agree with a plain Counter, whatever the vocabulary, order, shards and interruptions."""

from __future__ import annotations

import copy
import errno
import json
import math
import shutil
import zlib
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import typer
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from matrices import covering
from repository import DEMO
from typer.testing import CliRunner

from heads.cli.main import OneSentence
from heads.cli.ngrams import count_ngrams_command
from heads.data.documents import DataConfig, SourceConfig, load_documents
from heads.ngrams import counting as ngram_counting
from heads.ngrams import trie
from heads.ngrams.counting import count_ngrams
from heads.ngrams.runs import count_equal
from heads.ngrams.table import NgramTable

BASE = DEMO / "base"
SMALL = [[0, 1, 2, 0, 1, 2], [2, 0, 1], [3], [0, 1]]  # 12 tokens; token 4 is never seen


def random_documents(vocab_size: int, num: int = 60, seed: int = 0, distinct: int = 12) -> list[list[int]]:
    """Documents of 0 to 40 tokens over a few ids, the first and the last of the vocabulary among them."""
    rng = np.random.default_rng(seed)
    ids = np.unique([0, vocab_size - 1, *rng.integers(0, vocab_size, distinct)])
    return [rng.choice(ids, rng.integers(0, 41)).tolist() for _ in range(num)]


def reference(documents: list[list[int]], order: int) -> list[Counter[tuple[int, ...]]]:
    """Counts of all n-grams of orders 1 to `order`."""
    return [
        Counter(tuple(ids[i : i + n]) for ids in documents for i in range(len(ids) - n + 1))
        for n in range(1, order + 1)
    ]


def stored(table: NgramTable) -> list[Counter[tuple[int, ...]]]:
    """All that a table holds, by walking it from prefix to prefix."""
    orders: list[Counter[tuple[int, ...]]] = []
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(table.order):
        found: Counter[tuple[int, ...]] = Counter()
        for prefix in prefixes:
            tokens, counts = table.next_counts(prefix)
            found.update(
                {(*prefix, token): count for token, count in zip(tokens.tolist(), counts.tolist(), strict=True)}
            )
        orders.append(found)
        prefixes = list(found)
    return orders


def small_table(tmp_path: Path, **more: Any) -> NgramTable:
    return count_ngrams(SMALL, **{"folder": tmp_path / "small", "order": 3, "vocab_size": 5, **more})


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@covering(vocab_size=[2, 255, 256, 50_257, 131_072, 1 << 20], order=[1, 2, 3, 4, 5, 6], repeats=2)
def test_a_table_holds_what_a_plain_counter_counts(tmp_path, monkeypatch, vocab_size, order):
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 200)
    monkeypatch.setattr(ngram_counting, "PART_NGRAMS", 150)
    documents = random_documents(vocab_size)
    table = count_ngrams(documents, folder=tmp_path / "table", order=order, vocab_size=vocab_size)
    expected = reference(documents, order)
    assert stored(table) == expected
    assert table.positions == tuple(sum(counter.values()) for counter in expected)
    assert table.num_tokens == sum(map(len, documents))
    table.verify()


@pytest.mark.parametrize("search_from", [0, 1, 1000])
@pytest.mark.parametrize("vocab_size", [5, 131_072])
def test_a_joint_is_looked_up_at_once(tmp_path, monkeypatch, vocab_size, search_from):
    """Whether ranges are read or searched; candidates in any order, repeated, foreign or beyond the vocabulary."""
    monkeypatch.setattr(trie, "SEARCH_FROM", search_from)
    documents = random_documents(vocab_size)
    table = count_ngrams(documents, folder=tmp_path / "table", order=4, vocab_size=vocab_size)
    rng = np.random.default_rng(1)
    seen = sorted({token for ids in documents for token in ids})
    for n in range(1, 5):
        candidates = [rng.permutation([*rng.choice(seen, 4), vocab_size + 7, 1]) for _ in range(n)]
        counter = reference(documents, n)[n - 1]
        expected = [counter[tuple(int(token) for token in gram)] for gram in product(*candidates)]
        found = table.joint_counts([torch.from_numpy(ids) for ids in candidates])
        assert found.dtype == torch.int64
        assert found.shape == (6,) * n
        assert found.flatten().tolist() == expected
        assert sum(expected) > 0
        different = [np.unique(ids)[::-1].copy() for ids in candidates]
        expected = [counter[tuple(int(token) for token in gram)] for gram in product(*different)]
        assert table.joint_counts(different).flatten().tolist() == expected


def test_ngrams_never_cross_documents(tmp_path):
    together = small_table(tmp_path)
    assert together.joint_counts([[2], [2]]).item() == 0  # the first document ends in 2, the second begins with it
    assert together.joint_counts([[1], [3]]).item() == together.joint_counts([[3], [0]]).item() == 0
    assert together.positions == (12, 8, 5)
    one = count_ngrams([[i for ids in SMALL for i in ids]], folder=tmp_path / "one", order=3, vocab_size=5)
    assert one.positions == (12, 11, 10)


@pytest.mark.parametrize("min_count", [2, 3, 5])
def test_rare_ngrams_are_dropped_and_tokens_never(tmp_path, monkeypatch, min_count):
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 100)  # a threshold on a shard alone would drop more
    documents = random_documents(300)
    table = count_ngrams(documents, folder=tmp_path / "table", order=4, vocab_size=300, min_count=min_count)
    expected = reference(documents, 4)
    for counter in expected[1:]:
        for gram in [gram for gram, count in counter.items() if count < min_count]:
            del counter[gram]
    assert stored(table) == expected
    assert table.positions == tuple(sum(counter.values()) for counter in reference(documents, 4))


def test_many_workers_write_the_same_table_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 60)
    monkeypatch.setattr(ngram_counting, "PART_NGRAMS", 40)
    documents = random_documents(1000, num=200)
    done: list[tuple[str, int, int | None]] = []
    for workers in (1, 4):
        count_ngrams(
            iter(documents),
            folder=tmp_path / f"by{workers}",
            order=3,
            vocab_size=1000,
            workers=workers,
            report=lambda *what: done.append(what),
        )
    assert files_of(tmp_path / "by1") == files_of(tmp_path / "by4")
    assert ("counted tokens", sum(map(len, documents)), None) in done
    assert {what for what, _, _ in done} == {"counted tokens", "merged parts"}


@pytest.mark.parametrize("interrupted_in", ["count_shard", "merge_part", "write_table"])
def test_an_interrupted_count_goes_on(tmp_path, monkeypatch, interrupted_in):
    """What was in place is not counted again, and the table is the one that an undisturbed count writes."""
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 200)
    monkeypatch.setattr(ngram_counting, "PART_NGRAMS", 100)
    settings: dict[str, Any] = {"order": 3, "vocab_size": 1000}
    documents = random_documents(1000)
    count_ngrams(documents, folder=tmp_path / "whole", **settings)
    original, calls = getattr(ngram_counting, interrupted_in), []

    def stop(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 or interrupted_in == "write_table":
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ngram_counting, interrupted_in, stop)
        with pytest.raises(KeyboardInterrupt):
            count_ngrams(documents, folder=tmp_path / "table", **settings)
    work = tmp_path / "table.counting"
    assert not (tmp_path / "table").exists()
    kept = {path: path.stat().st_mtime_ns for path in work.glob("run-*.npy")}
    assert kept

    sizes = []
    count_equal = ngram_counting.count_equal
    monkeypatch.setattr(ngram_counting, "count_equal", lambda words: sizes.append(1) or count_equal(words))
    count_ngrams(documents, folder=tmp_path / "table", **settings)
    num_shards = len(list(ngram_counting.split_shards(documents)))
    assert len(sizes) == num_shards - len(kept)
    assert files_of(tmp_path / "table") == files_of(tmp_path / "whole")
    assert not work.exists()


def test_another_count_does_not_go_on_from_an_interrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 200)
    settings: dict[str, Any] = {"folder": tmp_path / "t", "order": 3, "vocab_size": 1000, "sources": ["a"]}
    documents = random_documents(1000)
    with monkeypatch.context() as patch:
        patch.setattr(ngram_counting, "write_table", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            count_ngrams(documents, **settings)
    for change, says in (
        ({"order": 2}, "with order 3, and 2 is given now"),
        ({"vocab_size": 1001}, "with vocab_size 1000, and 1001"),
        ({"min_count": 2}, "with min_count 1, and 2"),
        ({"sources": ["b"]}, r"with sources \['a'\], and \['b'\]"),
        ({"tokenizer": byte_tokenizer()}, "with tokenizer_sha256 None"),
    ):
        with pytest.raises(ValueError, match=says):
            count_ngrams(documents, **{**settings, **change})
    for others in (documents[1:], documents[:-20], random_documents(1000, seed=1)):
        with pytest.raises(ValueError, match="other documents than those given now"):
            count_ngrams(others, **settings)
        for run in list((tmp_path / "t.counting").glob("run-*.npy")):
            run.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(ngram_counting, "merge_runs", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                count_ngrams(documents, **settings)


def test_two_counts_never_share_a_folder(tmp_path):
    """The second is refused while the first runs; what the first has begun stays as it is."""
    settings: dict[str, Any] = {"folder": tmp_path / "t", "order": 2, "vocab_size": 1000}

    def documents():
        yield from random_documents(1000)
        with pytest.raises(ValueError, match="another process counts there"):
            count_ngrams(random_documents(1000), **settings)

    assert count_ngrams(documents(), **settings).max_order == 2
    assert not (tmp_path / "t.counting").exists()


def test_what_is_no_full_disk_says_so_itself(tmp_path, monkeypatch):
    def save(file: Any, content: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(PermissionError, match=r"Permission denied$"):
        count_ngrams(random_documents(1000), folder=tmp_path / "t", order=2, vocab_size=1000)


def test_a_full_disk_ends_in_a_sentence_and_the_same_call_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_counting, "SHARD_TOKENS", 200)
    documents, settings = random_documents(1000), {"folder": tmp_path / "t", "order": 2, "vocab_size": 1000}

    def save(file: Any, content: Any) -> None:
        if "000002" in file.name:
            raise OSError("58278 requested and 37872 written")
        np.lib.format.write_array(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        with pytest.raises(OSError, match=r"could not be written \(58278 .*MB free. Free some space and give the same"):
            count_ngrams(documents, **settings)
    names = {path.name[:10] for path in (tmp_path / "t.counting").glob("run-*.npy")}
    assert {"run-000000", "run-000001"} <= names
    assert "run-000002" not in names
    count_ngrams(documents, **settings)


def test_cooccurrence_is_the_ratio_of_equation_3(tmp_path):
    documents = random_documents(300)
    table = count_ngrams(documents, folder=tmp_path / "table", order=3, vocab_size=300)
    counters = reference(documents, 3)
    ids = torch.tensor(sorted(token for (token,) in counters[0]))
    for n in (1, 2, 3):
        found = table.cooccurrence([ids] * n)
        assert found.dtype == torch.float32
        for gram in product(range(len(ids)), repeat=n):
            tokens = tuple(int(ids[i]) for i in gram)
            p_joint = counters[n - 1][tokens] / counters[n - 1].total()
            p_single = math.prod(counters[0][(token,)] / counters[0].total() for token in tokens)
            assert found[gram].item() == pytest.approx(p_joint / p_single, rel=1e-6)
    assert table.cooccurrence([ids]).tolist() == pytest.approx([1.0] * len(ids))


def test_what_was_never_seen_gets_what_is_asked(tmp_path):
    """Tokens of SMALL: 0, 1 four times, 2 three times, 3 once, 4 never; 12 tokens, 8 pairs."""
    table = small_table(tmp_path)
    first, second = torch.tensor([0, 3, 4]), torch.tensor([0, 1, 4, 900])
    seen = (4 / 8) / (4 / 12 * 4 / 12)
    assert table.cooccurrence([first, second]).tolist() == [
        pytest.approx([0, seen, 0, 0]),
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    never = 0.1 / (8 * 4 / 12 * 4 / 12)  # a tenth of an occurrence over those that independence would have
    rare = 0.1 / (8 * 1 / 12 * 4 / 12)
    smoothed = table.cooccurrence([first, second], unseen=0.1)
    assert smoothed.tolist() == [
        pytest.approx([never, seen, 1, 1]),
        pytest.approx([rare, rare, 1, 1]),
        [1, 1, 1, 1],
    ]
    assert table.cooccurrence([first, second], unseen=50.0)[1, 0] == 1
    for unseen in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="give a number from 0 on"):
            table.cooccurrence([first, second], unseen=unseen)


def test_a_batch_is_its_rows(tmp_path):
    table = small_table(tmp_path)
    rows = [torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.tensor([[1, 2, 4], [0, 1, 2], [2, 0, 9]])]
    found = table.cooccurrence(rows, unseen=0.5)
    assert found.shape == (3, 2, 3)
    for row in range(3):
        assert torch.equal(found[row], table.cooccurrence([ids[row] for ids in rows], unseen=0.5))
    for wrong in ([rows[0], rows[1][0]], [rows[0], rows[1][:2]], [rows[0][None], rows[1][None]]):
        with pytest.raises(ValueError, match="each \\(B, k\\) with one B"):
            table.cooccurrence(wrong)


def test_what_follows_a_prefix(tmp_path):
    table = small_table(tmp_path)
    as_lists = [array.tolist() for array in table.next_counts([0, 1])]
    assert as_lists == [[2], [2]]
    assert [array.tolist() for array in table.next_counts([])] == [[0, 1, 2, 3], [4, 4, 3, 1]]
    for unseen in ([3], [4], [0, 0], [3, 0], [99], [0, 99]):
        assert [array.tolist() for array in table.next_counts(unseen)] == [[], []]
    with pytest.raises(ValueError, match="serves up to 2; give its last tokens"):
        table.next_counts([0, 1, 2])


def test_joints_that_a_table_cannot_serve(tmp_path):
    table = small_table(tmp_path)
    for ask in (table.joint_counts, table.cooccurrence):
        with pytest.raises(ValueError, match=r"joint of 4 tokens was asked .* serves 1 to 3; ask for fewer"):
            ask([torch.tensor([0])] * 4)
        with pytest.raises(ValueError, match="joint of 0 tokens"):
            ask([])
        with pytest.raises(ValueError, match="token ids from 0 on"):
            ask([torch.tensor([0, -1])])
        with pytest.raises(ValueError, match="token ids from 0 on in one dimension; got float32"):
            ask([torch.tensor([0.5])])


def test_a_table_of_another_tokenizer_is_refused(tmp_path):
    tokenizer = copy.deepcopy(byte_tokenizer())
    count_ngrams(
        [[1, 2, 3]], folder=tmp_path / "t", order=2, vocab_size=len(tokenizer), tokenizer=tokenizer, sources=["x"]
    )
    table = NgramTable.open(tmp_path / "t", tokenizer)
    tokenizer.add_tokens(["another"])
    with pytest.raises(ValueError, match=r"and the backbone's is another one.*: headway count-ngrams --tokenizer"):
        NgramTable.open(tmp_path / "t", tokenizer)
    table.check_vocab(len(tokenizer))  # a padded embedding
    table.check_vocab(4)  # the ids that are there fit
    for vocab_size in (3, 50_304):
        with pytest.raises(ValueError, match=f"the backbone has {vocab_size:,}, so it is of another tokenizer"):
            table.check_vocab(vocab_size)
    small = small_table(tmp_path)  # counted without a tokenizer: the sizes must do
    assert small.description["tokenizer_sha256"] is None
    NgramTable.open(tmp_path / "small", byte_tokenizer())

    class Wide:
        def __len__(self) -> int:
            return 50_000

    with pytest.raises(ValueError, match="another tokenizer"):
        NgramTable.open(tmp_path / "small", Wide())


def test_damage_is_found(tmp_path):
    folder = small_table(tmp_path).folder

    def refused(match: str, check: Any = NgramTable.open) -> None:
        with pytest.raises(ValueError, match=match):
            check(folder)

    def edit(**fields: Any) -> None:
        (folder / "ngrams.json").write_text(json.dumps({**description, **fields}))

    description = json.loads((folder / "ngrams.json").read_text())
    tokens = folder / "order3.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    refused("order3.tokens holds .* bytes in place of .* damaged")
    tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("order3.tokens does not hold what was written", lambda folder: NgramTable.open(folder).verify())
    tokens.unlink()
    refused("order3.tokens is missing")
    tokens.write_bytes(whole)
    NgramTable.open(folder).verify()
    edit(format_version=3)
    refused("has format version 3; this version of Headway reads up to 2")
    edit(order=4)
    refused("does not fit together")
    edit(num_ngrams=[5, 9, 9])
    refused("does not fit together")
    edit(files={})
    refused("does not fit together .files are")
    (folder / "ngrams.json").write_text("{")
    refused("no description of n-grams")
    (folder / "ngrams.json").unlink()
    refused("holds no ngrams.json; give a folder that headway count-ngrams wrote")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 2.0}, "order 3, 2.0 tokens"),
        ({"vocab_size": 1 << 40}, "tokens"),
        ({"order": True}, "order True"),
        ({"positions": [1, "2", 3]}, "positions or num_ngrams"),
        ({"positions": [1, 2, 10**400]}, "positions or num_ngrams"),
        ({"positions": {"0": 1, "1": 2, "2": 3}}, "positions or num_ngrams"),
        ({"num_ngrams": None}, "positions or num_ngrams"),
        ({"files": 7}, "no description of n-grams"),
        ({"format_version": float("inf")}, "no description of n-grams"),
    ],
)
def test_odd_descriptions_end_in_a_sentence(tmp_path, fields, says):
    path = small_table(tmp_path).folder / "ngrams.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=says):
        NgramTable.open(path.parent)


def test_files_of_a_table_lie_in_its_folder(tmp_path):
    folder = small_table(tmp_path).folder
    description = json.loads((folder / "ngrams.json").read_text())
    files = description["files"]
    for odd, says in (
        ({**files, "../../victim": files["order1.counts"]}, "files are"),
        ({**files, "order1.counts": {"kind": "<i8", "length": files["order1.counts"]["length"]}}, "crc32"),
        ({**files, "order1.counts": {**files["order1.counts"], "length": 0.5}}, "has length 0.5"),
    ):
        (folder / "ngrams.json").write_text(json.dumps({**description, "files": odd}))
        with pytest.raises(ValueError, match=says):
            NgramTable.open(folder)
    (folder / "ngrams.json").write_text(json.dumps(description))
    (folder / "order2.tokens").rename(tmp_path / "elsewhere")
    (folder / "order2.tokens").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"order2.tokens is a link to"):
        NgramTable.open(folder)


def test_starts_that_are_no_places_end_in_a_sentence(tmp_path):
    folder = small_table(tmp_path).folder
    path = folder / "order2.starts"
    starts = np.fromfile(path, "<u4")
    for odd in (starts + 1000, -starts - 1, starts[::-1]):
        odd.tofile(path)
        table = NgramTable.open(folder)
        tokens = np.flatnonzero(table.unigrams_V)
        with pytest.raises(ValueError, match="starts are no places in its arrays"):
            table.joint_counts([tokens, tokens])
        with pytest.raises(ValueError, match="starts are no places in its arrays"):
            [table.next_counts([token]) for token in tokens.tolist()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"order": 0}, "order is 0; give a number from 1 to 6"),
        ({"order": 7}, "order is 7; give a number from 1 to 6"),
        ({"vocab_size": 2_000_000}, "vocab_size is 2000000"),
        ({"min_count": 0}, "min_count is 0; give a number from 1 on"),
        ({"workers": 0}, "workers is 0"),
        ({"vocab_size": 3}, "ids from 3 to 3, and the vocabulary has 3 tokens"),
    ],
)
def test_settings_out_of_range(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        small_table(tmp_path, **change)


def test_what_cannot_be_counted(tmp_path):
    for nothing in ([], [[], []]):
        with pytest.raises(ValueError, match="hold no tokens"):
            count_ngrams(nothing, folder=tmp_path / "none", order=2, vocab_size=5)
    small_table(tmp_path)
    with pytest.raises(ValueError, match="exists already; give a new folder"):
        small_table(tmp_path)
    with pytest.raises(ValueError, match="ids from -1 to 0"):
        count_ngrams([[-1, 0]], folder=tmp_path / "negative", order=2, vocab_size=5)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`headway count-ngrams …` with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    app = typer.Typer(cls=OneSentence, pretty_exceptions_enable=False)
    app.command("count-ngrams")(count_ngrams_command)
    app.callback()(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["count-ngrams", *map(str, arguments)])


def test_the_command_counts_exactly_the_training_split(tmp_path, run, monkeypatch):
    """On the demo corpus cut to its smallest files, held-out ones among them."""
    monkeypatch.setattr("heads.data.standard_library.MAX_BYTES", 700)
    heldout_list = str(BASE / "training.json")
    demo = ("--tokenizer", BASE, "--data", "python-stdlib", "--heldout-list", heldout_list)
    result = run(*demo, "--out", tmp_path / "table")
    assert result.exit_code == 0, result.output
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    table = NgramTable.open(tmp_path / "table", tokenizer)
    config = DataConfig(train=[SourceConfig(path="python-stdlib", split="train")], heldout_list=heldout_list)
    rows = load_documents(config.train[0], config, tokenizer).rows
    documents = [np.asarray(row["input_ids"]).tolist() for row in rows]
    assert stored(table) == reference(documents, 3)
    assert f"{sum(map(len, documents)):,} tokens of" in result.stdout
    again = run(*demo, "--out", tmp_path / "table")
    assert again.exit_code == 1
    assert "exists already" in again.stderr


def test_the_command_reads_several_sources_and_names_bad_ones(tmp_path, run, caplog):
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "a.txt").write_text("abcabc")
    rows = [json.dumps({"text": "abd"})] * 300
    (tmp_path / "b.jsonl").write_text("\n".join([*rows, "{"]) + "\n")
    base, a, b = (str(tmp_path / name) for name in ("base", "a.txt", "b.jsonl"))
    settings = ("--order", 2, "--workers", 2, "--min-count", 2, "--out", tmp_path / "table")
    result = run("--tokenizer", base, "--data", a, "--data", b, *settings)
    assert result.exit_code == 0, result.output
    assert f"{b}: 1 of 301 rows are bad and skipped: {b} line 301: not JSON" in caplog.text
    table = NgramTable.open(tmp_path / "table")
    assert (table.order, table.vocab_size, table.description["min_count"]) == (2, NUM_TOKENS, 2)
    assert [source.split(",")[0] for source in table.description["sources"]] == [a, b]
    ids = byte_tokenizer()("ab", add_special_tokens=False)["input_ids"]
    assert table.joint_counts([[ids[0]], [ids[1]]]).item() == 302
    (tmp_path / "c.jsonl").write_text("\n".join([*rows[:50], "{"]) + "\n")
    bad = run("--tokenizer", base, "--data", tmp_path / "c.jsonl", "--out", tmp_path / "other")
    assert bad.exit_code == 1
    assert "1 of 51 rows of" in bad.stderr
    assert "repair or remove those lines, or raise --max-bad-fraction" in bad.stderr
    assert len(bad.stderr.strip().splitlines()) == 1
    good = run("--tokenizer", base, "--data", tmp_path / "c.jsonl", "--out", tmp_path / "c", "--max-bad-fraction", 0.1)
    assert good.exit_code == 0, good.stderr


def test_the_command_knows_roles_as_training_does(tmp_path, run):
    byte_tokenizer().save_pretrained(tmp_path / "base")
    turns = [{"role": "visitor", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    command = ["--tokenizer", tmp_path / "base", "--data", tmp_path / "chats.jsonl", "--chat-template", "vicuna"]
    refused = run(*command, "--out", tmp_path / "table")
    assert "say what the role stands for" in refused.stderr
    for roles, said in (
        ("visitor", "such as moderator=user"),
        ("visitor=guest", "roles={'visitor': 'guest'} was given"),
    ):
        assert said in run(*command, "--out", tmp_path / "table", "--roles", roles).stderr
    counted = run(*command, "--out", tmp_path / "table", "--roles", "visitor=user")
    assert counted.exit_code == 0, counted.stderr
    assert "roles visitor=user" in NgramTable.open(tmp_path / "table").description["sources"][0]


def test_the_command_takes_split_column_and_configuration_as_training_does(tmp_path, run, monkeypatch):
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "data").mkdir()
    for split, text in (("train", "ab"), ("validation", "abcd")):
        (tmp_path / "data" / f"{split}.jsonl").write_text(json.dumps({"code": text}) + "\n")
    command = ["--tokenizer", tmp_path / "base", "--order", 2, "--column", "code"]
    counted = run(*command, "--data", tmp_path / "data", "--split", "validation", "--out", tmp_path / "here")
    assert counted.exit_code == 0, counted.output
    whole = len(byte_tokenizer()("abcd")["input_ids"])
    assert NgramTable.open(tmp_path / "here").num_tokens in (whole, whole + 1)  # with an end of text
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options["split"]))
        return datasets.Dataset.from_dict({"code": ["abcd"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    counted = run(*command, "--data", "org/code", "--name", "python", "--split", "valid", "--out", tmp_path / "hub")
    assert counted.exit_code == 0, counted.output
    assert asked == [("org/code", "python", "valid")]


def test_help_names_the_options(run):
    result = run("--help")
    assert result.exit_code == 0
    for option in ("--tokenizer", "--data", "--out", "--order", "--min-count", "--workers", "--heldout-list"):
        assert option in result.output


def in_format_1(folder: Path) -> None:
    """Rewrite a table as the first format had it: numbers of 4 and 8 bytes alone."""
    description = json.loads((folder / "ngrams.json").read_text())
    for name, file in description["files"].items():
        kind = {"tokens": "<i4", "starts": "<i8"}.get(name[7:], "<i8" if name == "order1.counts" else "<u4")
        np.fromfile(folder / name, file["kind"]).astype(kind).tofile(folder / name)
        file.update(kind=kind, crc32=zlib.crc32((folder / name).read_bytes()))
    (folder / "ngrams.json").write_text(json.dumps({**description, "format_version": 1}))


@pytest.mark.parametrize("vocab_size", [300, 131_072])
def test_tables_of_the_first_format_are_read(tmp_path, vocab_size):
    documents = [*random_documents(vocab_size), [7] * 400]  # 7 after 7 is counted more often than a byte holds
    table = count_ngrams(documents, folder=tmp_path / "table", order=6, vocab_size=vocab_size)
    kinds = {name: file["kind"] for name, file in table.description["files"].items()}
    assert kinds["order6.tokens"] == ("<u2" if vocab_size == 300 else "<i4")
    assert kinds["order6.counts"] == "<u2"
    assert kinds["order6.starts"] == "<u4"
    shutil.copytree(tmp_path / "table", tmp_path / "old")
    in_format_1(tmp_path / "old")
    old = NgramTable.open(tmp_path / "old")
    old.verify()
    assert stored(old) == stored(table) == reference(documents, 6)
    candidates = [torch.tensor([7, 0, vocab_size - 1, 70_000])] * 3
    assert torch.equal(old.joint_counts(candidates), table.joint_counts(candidates))
    asked = torch.tensor([documents[-1][:5]]), torch.tensor([[7, 1, 65_535 + 8]])
    assert torch.equal(old.next_token_probabilities(*asked), table.next_token_probabilities(*asked))


@pytest.mark.parametrize(
    ("first_bits", "second_bits"), [(60, 4), (60, 5), (60, 12), (60, 20), (40, 40), (60, 21), (20, 20)]
)
def test_pairs_of_words_are_counted_as_plain_pairs(first_bits, second_bits):
    generator = np.random.default_rng(first_bits + second_bits)
    most = np.array([[1 << first_bits], [1 << second_bits]], np.uint64)
    chosen_WM = generator.integers(0, most, size=(2, 300), dtype=np.uint64)
    chosen_WM[0, 100:] = chosen_WM[0, :100].repeat(2)  # pairs that differ in their second word alone
    chosen_WM[1, :20] = chosen_WM[1, 20:40]  # and in their first
    chosen_WM[:, -1] = most[:, 0] - 1
    words_WN = chosen_WM[:, generator.integers(0, 300, 2000)]
    found_WN, counts_N = count_equal(words_WN)
    expected = Counter(zip(*words_WN.tolist(), strict=True))
    assert list(zip(zip(*found_WN.tolist(), strict=True), counts_N.tolist(), strict=True)) == sorted(expected.items())
