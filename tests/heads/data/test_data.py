"""Rows of every kind become documents; bad ones are named; subsets, caches and streams say the same."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from repository import DEMO
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads.data import sources, standard_library
from heads.data.documents import DataConfig, SourceConfig, detect_format, load_documents
from heads.data.rows import RowTokenizer, document_frame

BASE = DEMO / "base"
HELDOUT_LIST = str(BASE / "training.json")
CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing a test makes lands in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def documents(tokenizer, source: SourceConfig, streaming: bool = False, **config) -> list[dict]:
    config = DataConfig(train=[source], **config)
    rows = load_documents(source, config, tokenizer, streaming=streaming).rows
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in rows]


def texts(tokenizer, rows: list[dict]) -> list[str]:
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def write_lines(path: Path, rows: list) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def small_tokenizer(**special) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_text_files_are_documents_framed_as_the_demo_was_trained(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n")
    rows = documents(tokenizer, SourceConfig(path=str(tmp_path / "a.txt")))
    expected = [tokenizer.eos_token_id, *tokenizer("x = 1\n", add_special_tokens=False)["input_ids"]]
    assert [row["input_ids"] for row in rows] == [expected]
    assert rows[0]["loss_mask"] == [True] * len(expected)
    assert (rows[0]["num_tokens"], rows[0]["num_supervised"]) == (len(expected), len(expected))
    assert rows[0]["max_id"] == max(expected)


def test_what_separates_documents_follows_the_tokenizer():
    assert document_frame(small_tokenizer(bos_token="</s>", eos_token="</s>")) == ([1], [])
    assert document_frame(small_tokenizer(eos_token="</s>")) == ([], [1])
    assert document_frame(small_tokenizer(bos_token="<s>", eos_token="</s>")) == ([], [1])
    llama = small_tokenizer(bos_token="<s>", eos_token="</s>")
    llama.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert document_frame(llama) == ([0], [1])
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        document_frame(small_tokenizer())


def test_every_kind_of_file_gives_the_same_texts(tokenizer, tmp_path):
    words = ["one two", "three four", "five"]
    rows = [{"id": number, "text": text} for number, text in enumerate(words)]
    table = Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"dev": table}).save_to_disk(str(tmp_path / "saved-dict"))
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(words):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    sources = [
        *(SourceConfig(path=str(tmp_path / name)) for name in ("a.parquet", "a.jsonl", "a.json", "saved", "folder")),
        SourceConfig(path=str(tmp_path / "saved-dict"), split="dev"),
        SourceConfig(path=str(tmp_path / "folder" / "*.txt")),
        SourceConfig(path=str(arrow)),
    ]
    for source in sources:
        for streaming in (False, True):
            assert texts(tokenizer, documents(tokenizer, source, streaming)) == words, (source.path, streaming)


def test_long_text_files_are_cut_at_line_ends(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "TEXT_PIECE", 20)
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(8)))
    found = texts(tokenizer, documents(tokenizer, SourceConfig(path=str(tmp_path / "a.txt"))))
    assert len(found) > 1
    assert all(text.endswith("\n") for text in found)
    assert "".join(found) == (tmp_path / "a.txt").read_text()


def test_token_rows_stay_as_they_are(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"tokens": [5, 6, 7]}] * 300 + [{"tokens": [1, -2]}, {"tokens": []}])
    rows = documents(tokenizer, SourceConfig(path=path))
    assert (rows[0]["input_ids"], rows[0]["loss_mask"]) == ([5, 6, 7], [True] * 3)
    assert [row["status"] for row in rows[-3:]] == ["ok", "bad", "empty"]
    named = documents(tokenizer, SourceConfig(path=path, format="tokens", column="tokens"))
    assert [row["input_ids"] for row in named] == [row["input_ids"] for row in rows]


def test_token_rows_bring_their_mask(tokenizer, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8, 9], "loss_mask": None}]
    masks = [[False, True, True], [True, True]]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    lines = write_lines(tmp_path / "a.jsonl", rows)
    for path in (lines, str(tmp_path / "a.parquet")):
        for streaming in (False, True):
            found = documents(tokenizer, SourceConfig(path=path), streaming=streaming)
            assert [row["loss_mask"] for row in found] == masks
            assert [row["num_supervised"] for row in found] == [2, 2]


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ("01", "the loss_mask is a str, not a list"),
        ([0, 1], "the loss_mask has 2 values for 3 token ids"),
        ([0, 1, 2], "the loss_mask has values other than 0 and 1"),
        ([0, 1, 0.5], "the loss_mask has values other than 0 and 1"),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_is_a_bad_row(tokenizer, tmp_path, mask, problem):
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": mask}])
    (row,) = documents(tokenizer, SourceConfig(path=path))
    assert (row["status"], row["input_ids"]) == ("bad", [])
    assert row["problem"].endswith(problem)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": CHAT},
        {"id": "x", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
        {"instruction": "Hi", "input": "", "output": "Hello.", "text": "ignored"},
        {"dialogue": CHAT},
    ],
)
def test_chats_are_supervised_on_the_reply(tokenizer, tmp_path, row):
    column = "dialogue" if "dialogue" in row else None
    (found,) = documents(tokenizer, SourceConfig(path=write_lines(tmp_path / "a.jsonl", [row]), column=column))
    reply = [token for token, chosen in zip(found["input_ids"], found["loss_mask"], strict=True) if chosen]
    assert tokenizer.decode(reply) == " Hello.<|endoftext|>"
    assert found["num_supervised"] == len(reply) < found["num_tokens"]


def test_chats_from_parquet(tokenizer, tmp_path):
    Dataset.from_list([{"conversations": CHAT}] * 2).to_parquet(str(tmp_path / "a.parquet"))
    for streaming in (False, True):
        rows = documents(tokenizer, SourceConfig(path=str(tmp_path / "a.parquet")), streaming)
        assert [row["num_supervised"] > 0 for row in rows] == [True, True]


def test_malformed_lines_are_named_by_line(tokenizer, tmp_path):
    good = {"text": "fine"}
    path = write_lines(
        tmp_path / "a.jsonl", [good, "\n", good, "{broken\n", "[1]\n", {"text": 3}, {"other": "x"}, good]
    )
    Path(path).write_bytes(Path(path).read_bytes() + b'{"text": "\xff"}\n{"text": "\\ud800"}\n')
    for streaming in (False, True):
        rows = documents(tokenizer, SourceConfig(path=path), streaming)
        assert [row["status"] for row in rows] == ["ok", "empty", "ok", "bad", "bad", "bad", "bad", "ok", "bad", "bad"]
        problems = [row["problem"] for row in rows if row["status"] == "bad"]
        lines = [4, 5, 6, 7, 9, 10]
        assert [problem.split(":")[0] for problem in problems] == [f"{path} line {line}" for line in lines]
        assert "not JSON" in problems[0]
        assert "a list" in problems[1]
        assert "a int" in problems[2]
        assert "missing" in problems[3]


def test_bad_rows_of_a_subset_keep_their_number(tokenizer, tmp_path):
    Dataset.from_list([{"text": None if number % 2 else "x"} for number in range(40)]).to_parquet(
        str(tmp_path / "a.parquet")
    )
    source = SourceConfig(path=str(tmp_path / "a.parquet"), fraction=0.5)
    for streaming in (False, True):
        rows = documents(tokenizer, source, streaming)
        assert 0 < len(rows) < 40
        for row in rows:
            assert (row["status"] == "bad") == (row["row_number"] % 2 == 1)
            assert row["status"] == "ok" or f"row {row['row_number'] + 1}:" in row["problem"]


def test_fractions_are_seeded_subsets(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(200)])
    source = SourceConfig(path=path, fraction=0.1)

    def subset(seed: int, streaming: bool = False) -> list[int]:
        return [row["row_number"] for row in documents(tokenizer, source, streaming, seed=seed)]

    assert len(subset(0)) == 20
    assert subset(0) == subset(0) != subset(1)
    assert 5 < len(subset(0, streaming=True)) < 45  # each row on its own: about 20
    assert subset(0, streaming=True) == subset(0, streaming=True) != subset(1, streaming=True)
    for fraction in (0, 1.5):
        with pytest.raises(ValueError, match=r"fraction=.* numbers above 0 and of at most 1"):
            documents(tokenizer, SourceConfig(path=path, fraction=fraction))
    for weight, numbers in ((0, "numbers"), (float("nan"), "finite numbers"), (float("inf"), "finite numbers")):
        with pytest.raises(ValueError, match=rf"weight=.* allowed are {numbers} above 0"):
            documents(tokenizer, SourceConfig(path=path, weight=weight))


def test_streams_hold_what_is_stored(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"row {number} " * (number % 7)} for number in range(150)])
    source = SourceConfig(path=path)
    assert documents(tokenizer, source, streaming=True) == documents(tokenizer, source)


def test_a_second_run_tokenises_nothing(tokenizer, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    calls = []
    tokenize = RowTokenizer.__call__
    monkeypatch.setattr(RowTokenizer, "__call__", lambda self, *a, **k: calls.append(1) or tokenize(self, *a, **k))
    first = documents(tokenizer, SourceConfig(path=path))
    assert calls == [1]
    tokenizer("a call leaves state in a fast tokenizer", truncation=True, max_length=4, padding="max_length")
    assert documents(AutoTokenizer.from_pretrained(BASE), SourceConfig(path=path)) == first
    assert documents(tokenizer, SourceConfig(path=path)) == first
    assert calls == [1]
    other = AutoTokenizer.from_pretrained(BASE)
    other.add_tokens(["two"])
    assert documents(other, SourceConfig(path=path)) != first  # another tokenizer is another cache
    write_lines(Path(path), [{"text": "changed"}])
    assert texts(tokenizer, documents(tokenizer, SourceConfig(path=path))) == ["changed"]  # and so is another file


def test_the_chat_template_is_part_of_the_cache_key(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": CHAT}])
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}")
    vicuna = documents(tokenizer, SourceConfig(path=path))
    short = documents(tokenizer, SourceConfig(path=path), chat_template=str(template))
    assert tokenizer.decode(short[0]["input_ids"]) == "user:Hi<|endoftext|>assistant:Hello.<|endoftext|>"
    assert vicuna != short


def test_two_processes_give_what_one_gives(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(10)])
    one = documents(tokenizer, SourceConfig(path=path))
    datasets.config.HF_DATASETS_CACHE = tmp_path / "another-cache"
    assert documents(tokenizer, SourceConfig(path=path), num_proc=2) == one


def test_directories_keep_their_splits_apart(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train-0.jsonl", [{"text": "to train on"}])
    write_lines(tmp_path / "data" / "valid.jsonl", [{"text": "to check with"}])
    assert texts(tokenizer, documents(tokenizer, SourceConfig(path=str(tmp_path / "data")))) == ["to train on"]
    held_out = SourceConfig(path=str(tmp_path / "data"), split="validation")
    assert texts(tokenizer, documents(tokenizer, held_out)) == ["to check with"]
    with pytest.raises(ValueError, match="by their names it has train, validation"):
        documents(tokenizer, SourceConfig(path=str(tmp_path / "data"), split="test"))


def test_files_of_a_folder_that_are_left_out_are_named(tokenizer, tmp_path, caplog):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b", "unit_test"):
        write_lines(folder / f"{name}.jsonl", [{"text": f"words of {name}"}])
    found = texts(tokenizer, documents(tokenizer, SourceConfig(path=str(folder))))
    assert found == ["words of a", "words of b"]
    assert "1 others are left out (unit_test.jsonl); a pattern such as" in caplog.text
    caplog.clear()
    everything = SourceConfig(path=str(folder / "**" / "*.jsonl"))
    assert len(documents(tokenizer, everything)) == 3
    write_lines(folder / "train.jsonl", [{"text": "words of train"}])
    assert texts(tokenizer, documents(tokenizer, SourceConfig(path=str(folder)))) == ["words of train"]
    assert "3 others are left out (a.jsonl, b.jsonl, unit_test.jsonl)" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet"])
def test_a_file_that_exists_is_no_pattern(tokenizer, tmp_path, suffix, streaming):
    path = tmp_path / f"part[1]{suffix}"
    if suffix == ".parquet":
        Dataset.from_dict({"text": ["a word"]}).to_parquet(path)
    else:
        path.write_text('{"text": "a word"}\n' if suffix == ".jsonl" else "a word", encoding="utf-8")
    assert texts(tokenizer, documents(tokenizer, SourceConfig(path=str(path)), streaming)) == ["a word"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", '[{"text": "a word"}]'), ("a.jsonl", '{"text": "a word"}'), ("a.txt", "a word")]
)
def test_a_byte_order_mark_is_no_text(tokenizer, tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert texts(tokenizer, documents(tokenizer, SourceConfig(path=str(tmp_path / name)))) == ["a word"]


def test_formats_by_column():
    source = SourceConfig(path="x")
    assert detect_format([{"id": 1, "conversations": CHAT}], source) == ("sharegpt", "conversations")
    assert detect_format([{"text": "a", "input_ids": [1]}], source) == ("tokens", "input_ids")
    assert detect_format([{"body": "a"}], SourceConfig(path="x", column="body")) == ("text", "body")
    assert detect_format([{"ids": [1]}], SourceConfig(path="x", column="ids")) == ("tokens", "ids")
    assert detect_format([{"text": "a", "messages": []}], SourceConfig(path="x", format="text")) == ("text", "text")
    with pytest.raises(ValueError, match="columns body"):
        detect_format([{"body": "a"}], source)
    with pytest.raises(ValueError, match="columns body"):
        detect_format([{"body": "a"}], SourceConfig(path="x", format="alpaca"))


def test_columns_are_found_in_any_case():
    source = SourceConfig(path="x")
    assert detect_format([{"Tokens": [5, 6]}], source) == ("tokens", "Tokens")
    assert detect_format([{"TEXT": "a", "Messages": []}], source) == ("messages", "Messages")
    assert detect_format([{"Text": "a", "text": "b"}], source) == ("text", "text")
    assert detect_format([{"Tokens": 512, "text": "a"}], source) == ("text", "text")  # the exact spelling goes first
    assert detect_format([{"Tokens": [5]}], SourceConfig(path="x", format="tokens")) == ("tokens", "Tokens")
    with pytest.raises(ValueError, match="columns Tokens"):  # a column that is asked for is taken at its word
        detect_format([{"Tokens": [5]}], SourceConfig(path="x", format="tokens", column="tokens"))


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_in_another_case_are_read(tokenizer, tmp_path, streaming):
    Dataset.from_list([{"Tokens": [5, 6, 7]}]).to_parquet(str(tmp_path / "a.parquet"))
    (row,) = documents(tokenizer, SourceConfig(path=str(tmp_path / "a.parquet")), streaming)
    assert (row["status"], row["input_ids"]) == ("ok", [5, 6, 7])
    chats = [
        write_lines(tmp_path / f"{n}.jsonl", [chat])
        for n, chat in enumerate(
            (
                {"instruction": "Add.", "input": "1 2", "output": "3"},
                {"Instruction": "Add.", "INPUT": "1 2", "Output": "3"},
            )
        )
    ]
    usual, other = (documents(tokenizer, SourceConfig(path=path), streaming) for path in chats)
    assert usual == other
    assert usual[0]["status"] == "ok"


def test_paths_that_lead_nowhere_say_so(tokenizer, tmp_path, monkeypatch):
    def refused(path: str, error: type[Exception], match: str) -> None:
        for streaming in (False, True):
            with pytest.raises(error, match=match):
                documents(tokenizer, SourceConfig(path=path), streaming)

    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "list.json").write_text('[{"text": "a"},')
    (tmp_path / "table.parquet").write_bytes(b"no parquet")
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "mixed").mkdir()
    write_lines(tmp_path / "mixed" / "a.jsonl", [{"text": "a"}])
    (tmp_path / "mixed" / "b.txt").write_text("b")
    refused(str(tmp_path / "missing.jsonl"), FileNotFoundError, "no file or directory")
    refused("data/missing.parquet", FileNotFoundError, "no file or directory")
    refused(str(tmp_path / "*.nothing"), FileNotFoundError, "matches no file")
    refused(str(tmp_path / "empty.jsonl"), ValueError, "no rows")
    refused(str(tmp_path / "list.json"), ValueError, "JSON list but is not one")
    refused(str(tmp_path / "table.parquet"), ValueError, "could not be read as parquet")
    refused(str(tmp_path / "picture.png"), ValueError, "files of one kind")
    refused(str(tmp_path / "mixed"), ValueError, ".jsonl, .txt files")

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach 'somebody/something' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    refused("somebody/something", ValueError, "not a file here, and as a hub dataset it gave: Couldn't reach")


def test_hub_names_go_to_load_dataset(tokenizer, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return Dataset.from_list([{"text": "from afar"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = documents(tokenizer, SourceConfig(path="somebody/something", name="en", split="train[:1%]"))
    assert texts(tokenizer, rows) == ["from afar"]
    assert asked == [(("somebody/something", "en"), {"split": "train[:1%]", "streaming": False})]


def test_held_out_library_files_are_exactly_the_named_ones():
    named = standard_library.load_heldout_files(HELDOUT_LIST)
    train, heldout = standard_library.stdlib_files("train", named), standard_library.stdlib_files("heldout", named)
    assert heldout
    assert set(heldout) <= set(named)
    assert not set(train) & set(named)
    assert train == sorted(train)
    assert not any(set(name.split("/")) & standard_library.SKIPPED for name in train + heldout)
    assert "json/decoder.py" in train


def test_library_documents(tokenizer):
    name, text = next(standard_library.stdlib_documents("heldout", ["copyreg.py"]))
    assert name == "copyreg.py"
    assert text.startswith('"""Helper to provide extensibility')
    (row,) = documents(
        tokenizer,
        SourceConfig(path="python-stdlib", split="heldout", fraction=0.01),
        heldout_list=HELDOUT_LIST,
    )
    assert row["num_tokens"] > 1


def test_the_library_needs_its_list(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="needs heldout_list"):
        documents(tokenizer, SourceConfig(path="python-stdlib"))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        documents(tokenizer, SourceConfig(path="python-stdlib"), heldout_list="nowhere.json")
    (tmp_path / "list.json").write_text('{"files": []}')
    with pytest.raises(ValueError, match="heldout_files"):
        documents(tokenizer, SourceConfig(path="python-stdlib"), heldout_list=str(tmp_path / "list.json"))
    with pytest.raises(ValueError, match="'train' and 'heldout'"):
        documents(tokenizer, SourceConfig(path="python-stdlib", split="test"), heldout_list=HELDOUT_LIST)
