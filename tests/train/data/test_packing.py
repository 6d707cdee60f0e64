"""Blocks hold the documents' tokens in order and nothing else; what must not be trained on is refused."""

import json
import logging
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from repository import DEMO
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads.data.documents import DataConfig, SourceConfig, load_documents
from heads.data.rows import RowTokenizer
from heads.data.streams import ROWS_PER_BATCH, is_held_out
from train.data.blocks import PackedData, pack
from train.data.packing import build_datasets, read_sources
from train.data.whole_documents import PACKINGS

BASE = DEMO / "base"
VOCABULARY = 2048
START = 0  # the demo tokenizer puts <|endoftext|> before every text
CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
UNMASKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
UNSUPERVISED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if 0 %}{% generation %}{% endgeneration %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing a test makes lands in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def write_lines(path: Path, rows: list) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, count: int, length: int = 7, first: int = 1) -> str:
    """Token rows [START, n, n, ...] with n from `first`, so that a block shows which documents it holds."""
    return write_lines(path, [{"tokens": [START] + [first + number] * (length - 1)} for number in range(count)])


def build(tokenizer, *paths: str, num_heads: int = 3, vocab_size: int = VOCABULARY, **config) -> PackedData:
    sources = [SourceConfig(path=path) if isinstance(path, str) else path for path in paths]
    settings = {"block_size": 16, **config}
    return build_datasets(DataConfig(train=sources, **settings), tokenizer, num_heads=num_heads, vocab_size=vocab_size)


def stream_of(blocks) -> list[int]:
    return [int(token) for block in blocks for token in block["input_ids"]]


def documents_of(blocks) -> list[tuple[int, ...]]:
    """The documents that begin with START, whole, from blocks in order."""
    stream = stream_of(blocks)
    starts = [index for index, token in enumerate(stream) if token == START] + [len(stream)]
    return [tuple(stream[start:end]) for start, end in pairwise(starts)]


def test_pack_cuts_documents_laid_end_to_end():
    documents = [(np.array(ids), np.array(ids) % 2 == 0) for ids in ([1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11, 12, 13])]
    blocks = [{name: column.tolist() for name, column in block.items()} for block in pack(documents, 4)]
    assert blocks[0] == {
        "input_ids": [1, 2, 3, 4],
        "loss_mask": [False, True, False, True],
        "document_ids": [0, 0, 0, 1],
    }
    assert [block["input_ids"] for block in blocks[1:]] == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert [block["document_ids"] for block in blocks[1:]] == [[0, 1, 1, 2], [0, 0, 0, 0]]


def test_a_row_of_one_token_more_than_a_block(tokenizer, tmp_path):
    """Rows as the Pile's tokenised samples have them: 2049 ids for 2048 positions."""
    packed = build(tokenizer, numbered(tmp_path / "a.jsonl", 4, length=17))
    assert len(packed.train) == 4
    assert packed.report.packed_train.dropped_tokens == 4
    assert packed.train[1]["document_ids"] == [0] + [1] * 15  # the last token of one row, then the next row
    assert packed.report.train[0].split == 4


def test_blocks_are_whole_and_in_the_order_of_the_documents(tokenizer, tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"text": " ".join(["word"] * int(rng.integers(3, 60)) + [str(number)])} for number in range(120)]
    packed = build(tokenizer, write_lines(tmp_path / "a.jsonl", rows))
    report = packed.report.packed_train
    assert packed.train.features == datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("bool")),
            "document_ids": datasets.List(datasets.Value("int32")),
        }
    )
    for block in packed.train:
        assert {len(column) for column in block.values()} == {16}
        assert max(block["input_ids"]) < VOCABULARY
        assert all(block["loss_mask"])
        steps = np.diff(block["document_ids"])
        assert block["document_ids"][0] == 0
        # A document's number rises exactly where the separator stands.
        assert [step == 1 for step in steps] == [token == START for token in block["input_ids"][1:]]
    tokens = [(START, *tokenizer(row["text"])["input_ids"]) for row in rows]
    assert report.tokens == sum(map(len, tokens)) == packed.report.train[0].tokens
    assert len(packed.train) == report.blocks == report.tokens // 16
    assert report.dropped_tokens == report.tokens % 16
    found = documents_of(packed.train)
    assert not Counter(found[:-1]) - Counter(tokens)  # all of them whole but the one that the tail was cut from
    assert found[:-1] != tokens[: len(found) - 1]  # shuffled


def test_masks_travel_with_their_tokens(tokenizer, tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": f"ask {n}"}, {"from": "gpt", "value": f"say {n}"}]}
        for n in range(40)
    ]
    packed = build(tokenizer, write_lines(tmp_path / "a.jsonl", rows), block_size=100)
    supervised = [
        token
        for block in packed.train
        for token, chosen in zip(block["input_ids"], block["loss_mask"], strict=True)
        if chosen
    ]
    replies = tokenizer.decode(supervised).split("<|endoftext|>")
    assert len(replies) > 20
    assert set(replies[:-1]) <= {f" say {n}" for n in range(40)}
    assert 0 < packed.report.train[0].supervised_share < 0.2


def test_the_seed_decides_the_order(tokenizer, tmp_path):
    path = numbered(tmp_path / "a.jsonl", 50)
    orders = {seed: stream_of(build(tokenizer, path, seed=seed).train) for seed in (0, 1)}
    datasets.config.HF_DATASETS_CACHE = tmp_path / "another-cache"
    assert stream_of(build(tokenizer, path, seed=0).train) == orders[0] != orders[1]


def test_a_second_build_neither_tokenises_nor_packs(tokenizer, tmp_path, monkeypatch):
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} has the number {n}"} for n in range(40)])
        for name in "abc"
    ]
    first = build(tokenizer, *paths, eval_fraction=0.1)

    def forbidden(*arguments, **options):
        raise AssertionError("worked again")

    monkeypatch.setattr(RowTokenizer, "__call__", forbidden)
    monkeypatch.setitem(PACKINGS, "cut", (forbidden, PACKINGS["cut"][1]))
    again = build(tokenizer, *paths, eval_fraction=0.1)
    assert again.report == first.report
    assert list(again.train) == list(first.train)
    assert list(again.eval) == list(first.eval)
    with pytest.raises(AssertionError, match="worked again"):
        build(tokenizer, *paths, eval_fraction=0.1, block_size=17)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights_are_shares_of_documents(tokenizer, tmp_path, streaming):
    small, large = numbered(tmp_path / "a.jsonl", 60), numbered(tmp_path / "b.jsonl", 400, first=1001)
    sources = [SourceConfig(path=small, weight=1), SourceConfig(path=large, weight=3)]
    packed = build(tokenizer, *sources, streaming=streaming)
    used = Counter(document[1] for document in documents_of(packed.train) if len(document) == 7)
    from_small, from_large = (sum(used[n + first] for n in range(400)) for first in (1, 1001))
    assert 0.2 < from_small / (from_small + from_large) < 0.3  # 1 : 3; 0.25 +- 2.5 standard deviations at 530 draws
    assert set(used) >= {n + 1 for n in range(60)}
    assert sum(n + 1001 in used for n in range(400)) >= 398  # all but what the dropped tail held
    if not streaming:
        assert packed.report.train[0].repeats == pytest.approx(from_small / 60, rel=0.25)


@pytest.mark.parametrize("streaming", [False, True])
def test_evaluation_documents_are_never_trained_on(tokenizer, tmp_path, streaming):
    path = numbered(tmp_path / "a.jsonl", 300, length=16)
    packed = build(tokenizer, path, eval_fraction=0.2, max_eval_blocks=200, streaming=streaming)
    trained, evaluated = set(documents_of(packed.train)), set(documents_of(packed.eval))
    assert not trained & evaluated
    assert len(trained) + len(evaluated) == 300
    assert len(evaluated) == 60 if not streaming else 35 < len(evaluated) < 85


def test_a_streams_subset_and_its_evaluation_share_are_drawn_apart(tokenizer, tmp_path):
    source = SourceConfig(path=numbered(tmp_path / "a.jsonl", 400, length=16), fraction=0.5)
    packed = build(tokenizer, source, eval_fraction=0.3, max_eval_blocks=400, streaming=True)
    evaluated = len(packed.eval)
    assert 0.2 < evaluated / (evaluated + len(list(packed.train))) < 0.4  # 3 standard deviations of 200 draws at 0.3


def rows_read(monkeypatch) -> list[int]:
    """Numbers of the rows that are tokenised from now on."""
    read, numbers = RowTokenizer.read, []
    monkeypatch.setattr(
        RowTokenizer, "read", lambda self, row, number: numbers.append(number) or read(self, row, number)
    )
    return numbers


def test_of_a_stream_each_split_tokenises_only_its_own_rows(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.packing.CHECKED_ROWS", 10)
    monkeypatch.setattr("train.data.streaming.CHECKED_ROWS", 10)
    numbers = rows_read(monkeypatch)
    source = SourceConfig(path=numbered(tmp_path / "a.jsonl", 1000, length=16), fraction=0.9)
    packed = build(tokenizer, source, eval_fraction=0.1, max_eval_blocks=20, streaming=True)
    evaluated, numbers[:] = set(numbers), []
    list(packed.train)
    of_eval = {n for n in range(1000) if is_held_out(n, share=0.1, seed=0)}
    assert not of_eval & set(numbers)
    # Beside the rows that are checked first, and those of the batch that is tokenised ahead.
    assert len(evaluated - of_eval) <= ROWS_PER_BATCH
    assert sorted(of_eval & evaluated)[:20] == [document[1] - 1 for document in documents_of(packed.eval)]


def test_a_streams_evaluation_blocks_are_those_of_filtered_documents(tokenizer, tmp_path):
    """Whatever is tokenised: the held-out documents in their order, from both sources in turn, packed."""
    sources = [SourceConfig(path=numbered(tmp_path / f"{n}.jsonl", 200, first=1 + 300 * n)) for n in range(2)]
    config = DataConfig(train=sources, block_size=16, eval_fraction=0.3, max_eval_blocks=9, streaming=True, seed=3)
    found = build_datasets(config, tokenizer, num_heads=3, vocab_size=VOCABULARY).eval
    kept = []
    for source in sources:
        rows = load_documents(source, config, tokenizer, streaming=True).rows
        kept.append([row for row in rows if is_held_out(row["row_number"], share=0.3, seed=3)])
    in_turn = [row for pair in zip(*kept, strict=False) for row in pair]
    documents = ((np.array(row["input_ids"]), np.array(row["loss_mask"])) for row in in_turn)
    wanted = [{name: column.tolist() for name, column in block.items()} for block in islice(pack(documents, 16), 9)]
    assert list(found) == wanted


def test_a_streams_evaluation_blocks_are_read_once(tokenizer, tmp_path, monkeypatch):
    """Other processes and resumed runs read them from the cache, until something that they depend on has changed."""
    monkeypatch.setattr("train.data.packing.CHECKED_ROWS", 10)
    path = numbered(tmp_path / "a.jsonl", 400, length=16)
    settings = {"eval_fraction": 0.1, "max_eval_blocks": 12, "streaming": True}
    numbers = rows_read(monkeypatch)
    first = build(tokenizer, path, **settings)
    assert max(numbers) > ROWS_PER_BATCH
    numbers.clear()
    again = build(tokenizer, path, **settings)
    assert max(numbers) < ROWS_PER_BATCH, "only the first rows are read, to be checked"
    assert list(again.eval) == list(first.eval)
    assert again.eval.features == first.eval.features
    for change in ({"seed": 1}, {"block_size": 17}, {"max_eval_blocks": 13}, {"eval_fraction": 0.2}, {"num_heads": 2}):
        numbers.clear()
        build(tokenizer, path, **settings | change)
        assert max(numbers) > ROWS_PER_BATCH, change
    numbered(tmp_path / "a.jsonl", 400, length=16, first=2)
    assert documents_of(build(tokenizer, path, **settings).eval) != documents_of(first.eval)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_evaluation_sources_and_their_limit(tokenizer, tmp_path):
    train, other = numbered(tmp_path / "a.jsonl", 20), numbered(tmp_path / "b.jsonl", 50, length=16, first=1001)
    for streaming in (False, True):
        packed = build(tokenizer, train, eval=[SourceConfig(path=other)], max_eval_blocks=5, streaming=streaming)
        assert len(packed.eval) == 5
        assert min(document[1] for document in documents_of(packed.eval)) > 1000
    stored = build(tokenizer, train, eval=[SourceConfig(path=other)], max_eval_blocks=5).report
    assert (stored.packed_eval.blocks, stored.packed_eval.unused_blocks) == (5, 45)


def test_a_stream_holds_what_is_stored(tokenizer, tmp_path):
    rows = [{"tokens": [START] + [number + 1] * 15} for number in range(64)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    stored, streamed = build(tokenizer, path), build(tokenizer, path, streaming=True)
    assert Counter(documents_of(streamed.train)) == Counter(documents_of(stored.train))
    assert len(documents_of(stored.train)) == 64
    once, twice = list(streamed.train), list(streamed.train)
    assert stream_of(once) == stream_of(twice)
    assert {name: type(column[0]) for name, column in once[0].items()} == {
        name: type(column[0]) for name, column in stored.train[0].items()
    }
    assert stream_of(build(tokenizer, path, streaming=True, seed=1).train) != stream_of(once)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_of_a_loader_lose_no_file_of_a_stream(tokenizer, tmp_path, num_workers):
    """One of two gets the whole stream, and must not leave half of its files to the other, which is stopped."""
    for number in range(4):
        numbered(tmp_path / f"{number}.jsonl", 8, length=16, first=1 + 100 * number)
    packed = build(tokenizer, str(tmp_path / "*.jsonl"), streaming=True)
    loader = DataLoader(packed.train, batch_size=2, num_workers=num_workers, collate_fn=list)
    found = documents_of(block for batch in loader for block in batch)
    assert Counter(document[1] // 100 for document in found) == {0: 8, 1: 8, 2: 8, 3: 8}


def test_short_documents_are_dropped_and_counted(tokenizer, tmp_path, caplog):
    rows = [{"tokens": [1] * 4}] * 3 + [{"tokens": [2] * 5}] * 20
    for streaming in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            packed = build(tokenizer, write_lines(tmp_path / "a.jsonl", rows), num_heads=3, streaming=streaming)
        assert set(stream_of(packed.train)) == {2}
        assert (packed.report.train[0].too_short, packed.report.train[0].documents) == (3, 20)
        assert sum("3 documents of fewer than 5 tokens" in record.message for record in caplog.records) == 1


def test_a_few_bad_rows_are_named_and_skipped(tokenizer, tmp_path, caplog):
    rows = [{"text": f"this text has the number {n}"} for n in range(299)]
    path = write_lines(tmp_path / "a.jsonl", [*rows[:5], "{broken\n", *rows[5:]])
    with caplog.at_level(logging.WARNING):
        packed = build(tokenizer, path)
    report = packed.report.train[0]
    assert (report.rows, report.bad, report.documents) == (300, 1, 299)
    assert "a.jsonl line 6: not JSON" in report.problems[0]
    assert any("a.jsonl line 6" in record.message for record in caplog.records)


@pytest.mark.parametrize("streaming", [False, True])
def test_more_than_one_bad_row_in_a_hundred_stops(tokenizer, tmp_path, streaming):
    rows = [{"text": f"text number {n}"} for n in range(98)]
    path = write_lines(tmp_path / "a.jsonl", [*rows, "{broken\n", "[]\n"])
    with pytest.raises(
        ValueError, match=r"2 of 100 rows .*more than 1%.*line 99: not JSON.*line 100: a list.*raise data"
    ):
        build(tokenizer, path, streaming=streaming)
    list(build(tokenizer, path, streaming=streaming, max_bad_fraction=0.02).train)
    blank = write_lines(tmp_path / "b.jsonl", [*rows, *["\n"] * 30])
    report = build(tokenizer, blank, streaming=streaming, max_bad_fraction=0).report.train[0]
    assert (report.rows, report.bad, report.empty) == (128, 0, 30)


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ("{broken\n", "repair or remove those lines, or raise data.max_bad_fraction"),
        ({"conversations": [{"from": "moderator", "value": "x"}]}, r"stands for: roles: {moderator: user}"),
        ({"conversations": [*CHAT, {"from": "tool", "value": "x"}, *CHAT]}, "set data.chat_template to one that takes"),
        ({"conversations": 5}, "repair them, or set the source's format and column"),
    ],
)
def test_the_advice_fits_the_fault(tokenizer, tmp_path, row, advice):
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": CHAT}] * 3 + [row] * 3)
    with pytest.raises(ValueError, match=advice):
        build(tokenizer, path, chat_template="vicuna")


def test_a_stream_shows_some_bad_rows_and_counts_all(tokenizer, tmp_path, caplog):
    rows = [{"text": f"text number {n}"} for n in range(400)]
    path = write_lines(tmp_path / "a.jsonl", [*rows[:300], *["{broken\n"] * 25, *rows[300:]])
    list(build(tokenizer, path, streaming=True, max_bad_fraction=0.5).train)
    said = [record.message.removeprefix(f"{path}: ") for record in caplog.records]
    said = [line for line in said if "bad" in line]
    assert [line.split(":")[0] for line in said[:5]] == ["bad row skipped"] * 5
    assert said[5:] == ["10 of 310 rows so far are bad and skipped", "25 of 425 rows so far are bad and skipped"]


def test_bad_rows_far_into_a_stream_stop_it(tokenizer, tmp_path):
    rows = [{"text": f"text number {n}"} for n in range(400)]
    path = write_lines(tmp_path / "a.jsonl", [*rows, *["{broken\n"] * 20])
    packed = build(tokenizer, path, streaming=True)
    with pytest.raises(ValueError, match=r"more than 1%.*line 401"):
        list(packed.train)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("template", "match"), [(UNSUPERVISED, "Nothing is supervised"), (UNMASKED, "Everything is supervised")]
)
def test_masks_that_teach_nothing_or_all_are_refused(tokenizer, tmp_path, template, match, streaming):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": CHAT}] * 20)
    with pytest.raises(ValueError, match=match):
        build(tokenizer, path, chat_template=str(file), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_ids_beyond_the_backbone_are_refused(tokenizer, tmp_path, streaming):
    path = numbered(tmp_path / "a.jsonl", 300)
    assert build(tokenizer, path, vocab_size=301, streaming=streaming)
    with pytest.raises(ValueError, match=r"Tokenizer and backbone disagree: .* 300"):
        list(build(tokenizer, path, vocab_size=300, streaming=streaming).train)


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_for_one_block(tokenizer, tmp_path, streaming):
    path = numbered(tmp_path / "a.jsonl", 2)
    with pytest.raises(ValueError, match="holds 14 tokens and one block takes block_size 16"):
        list(build(tokenizer, path, streaming=streaming).train)
    enough, other = numbered(tmp_path / "b.jsonl", 9), SourceConfig(path=path)
    with pytest.raises(ValueError, match="evaluation data holds 14 tokens"):
        build(tokenizer, enough, eval=[other], streaming=streaming)


def test_configs_that_contradict_themselves(tokenizer, tmp_path):
    path = numbered(tmp_path / "a.jsonl", 9)
    with pytest.raises(ValueError, match=r"15 heads need blocks of at least 17 tokens and data\.block_size is 16"):
        build(tokenizer, path, num_heads=15)
    assert build(tokenizer, numbered(tmp_path / "long.jsonl", 9, length=16), num_heads=14)
    with pytest.raises(ValueError, match=r"no document of at least 16 tokens \(heads \+ 2\)"):
        build(tokenizer, path, num_heads=14)
    with pytest.raises(ValueError, match="eval_fraction"):
        build(tokenizer, path, eval_fraction=1.0)
    with pytest.raises(ValueError, match="either eval sources or a share"):
        build(tokenizer, path, eval_fraction=0.1, eval=[SourceConfig(path=path)])
    with pytest.raises(ValueError, match="leaves none to train on"):
        build(tokenizer, path, eval_fraction=0.99)
    with pytest.raises(ValueError, match="needs max_eval_blocks"):
        build(tokenizer, path, eval_fraction=0.1, streaming=True)
    with pytest.raises(ValueError, match="max_eval_blocks=0 was given; allowed are integers of at least 1"):
        build(tokenizer, path, max_eval_blocks=0)
    with pytest.raises(ValueError, match="lists no source"):
        build(tokenizer)


def test_counts_do_not_depend_on_the_cache(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "word " * 40}, {"text": ""}, {"text": "a"}] * 40)
    config = DataConfig(train=[SourceConfig(path=path)], block_size=16)
    reports = [read_sources(config, tokenizer, num_heads=3)[0][0].report for _ in range(2)]
    assert reports[0] == reports[1]
    assert (reports[0].rows, reports[0].empty, reports[0].too_short, reports[0].documents) == (120, 40, 40, 40)
    assert reports[0].split == 40


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("mask", "match"),
    [
        ([1, 1] + [0] * 8, r"no document of .* has a label for head 3.*place 4 and later.*up to place 1 at most"),
        ([1, 1, 1, 1] + [0] * 6, r"no document of .* up to place 3 at most"),
        ([0] * 10, "Nothing is supervised"),
    ],
)
def test_masks_with_labels_that_a_head_never_reaches_are_refused(tokenizer, tmp_path, mask, match, streaming):
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5] * 10, "loss_mask": mask}] * 20)
    with pytest.raises(ValueError, match=f"(?i){match}"):
        build(tokenizer, path, streaming=streaming)
    if any(mask):
        build(tokenizer, path, num_heads=0 if sum(mask) == 2 else 2, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_that_every_block_cuts_off_are_refused(tokenizer, tmp_path, streaming, monkeypatch):
    """Each document fills two blocks and is supervised at the beginning of the second: heads see nothing before it."""
    monkeypatch.setattr("train.data.streaming.CHECKED_BLOCKS", 8)
    rows = [{"input_ids": [5] * 32, "loss_mask": [0] * 16 + [1] * 2 + [0] * 14}] * 20
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"training data has no label for head 1, 2, 3 in any block"):
        list(build(tokenizer, path, streaming=streaming).train)
    rows = [{"input_ids": [5] * 32, "loss_mask": [0] * 16 + [1] * 4 + [0] * 12}] * 20
    path = write_lines(tmp_path / "b.jsonl", rows)
    with pytest.raises(ValueError, match=r"training data has no label for head 3 in any block"):
        list(build(tokenizer, path, streaming=streaming).train)
    list(build(tokenizer, path, streaming=streaming, num_heads=2).train)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_table_without_columns_ends_in_a_sentence(tokenizer, tmp_path, streaming):
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({}), path)
    with pytest.raises(ValueError, match=r"none.parquet' has no columns; give tables with a column of texts"):
        build(tokenizer, str(path), streaming=streaming)
