"""Regenerated data: what the backbone would say, in the rows' order, whatever the batch."""

import json

import numpy as np
import pytest
import torch
from regenerated_runs import CHATML, CHATS, ENDS, rows, say, write
from tiny_run import train, write_config

from heads.backbone.model import Backbone
from heads.checkpoint import save_load
from heads.data.chat import choose_template, encode_chat
from heads.data.documents import DataConfig, SourceConfig
from heads.families import create
from train.__main__ import main, run_command
from train.data.packing import build_datasets
from train.regenerate.rewriting import GeneratedAnswer, Tally, end_of_turn, rewrite_chat


def test_texts_are_continued_in_order(folder, backbone):
    model, tokenizer = backbone
    found = rows(write(folder, "out.jsonl", "--temperature", "0"))
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    assert [row["line"] for row in found] == list(range(len(texts)))
    for row, text in list(zip(found, texts, strict=True))[::5]:
        prompt = tokenizer(text)["input_ids"][:12]
        answer = say(model, prompt)
        ended = answer[-1] in (*ENDS, model.config.eos_token_id)
        assert row["input_ids"] == prompt + ([*answer[:-1], 256] if ended else answer)
        said = [1] * (len(answer) - 1) + [int(not ended or answer[-1] == 256)]
        assert row["loss_mask"] == [0] * len(prompt) + said


@pytest.mark.parametrize("data", ["text", "chat"])
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_rows_do_not_depend_on_batches(folder, data, temperature):
    flags = ("--temperature", temperature, "--top-p", "0.95")
    contents = {write(folder, f"{batch}.jsonl", *flags, data=data, batch=batch) for batch in (1, 3, 50)}
    assert len(contents) == 1


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_heads_change_no_row(folder, backbone, temperature):
    model, _ = backbone
    save_load.save(create("grounded", Backbone(model), num_heads=2), folder / "heads", dtype=torch.float64)
    flags = ("--temperature", temperature, "--limit", "9")
    plain = write(folder, "plain.jsonl", *flags)
    for batch in (1, 4):
        assert write(folder, f"{batch}.jsonl", *flags, "--heads", str(folder / "heads"), batch=batch) == plain


def test_each_answer_is_written_behind_the_new_ones(folder, backbone):
    model, tokenizer = backbone
    template = choose_template(tokenizer, None)
    lengths = []
    for chat, row in zip(CHATS, rows(write(folder, "out.jsonl", "--temperature", "0", data="chat")), strict=True):
        told = []
        for question in chat:
            told.append({"role": "user", "content": question})
            tokens = say(model, encode_chat(tokenizer, template, told))
            answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            if not answer or tokens[-1] not in ENDS:
                told.pop()
                break
            told.append({"role": "assistant", "content": answer})
        assert row["messages"] == told
        assert "old" not in json.dumps(row)
        lengths.append(len(told))
    assert set(lengths) >= {0, 2, 4}


@pytest.mark.parametrize("tokens", ["768", "767"])
def test_answers_that_no_conversation_has_room_for_are_refused(folder, tokens):
    with pytest.raises(ValueError, match=rf"--max-new-tokens {tokens} and the first question of any .*lower it"):
        write(folder, "out.jsonl", "--max-new-tokens", tokens, data="chat")
    assert not (folder / "out.jsonl").exists()


def test_one_conversation_with_room_is_enough(folder, backbone):
    _, tokenizer = backbone
    template = choose_template(tokenizer, None)
    lengths = [len(encode_chat(tokenizer, template, [{"role": "user", "content": chat[0]}])) for chat in CHATS]
    found = rows(write(folder, "out.jsonl", "--max-new-tokens", str(768 - min(lengths)), data="chat"))
    assert [row["messages"] != [] for row in found] == [length == min(lengths) for length in lengths]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--temperature", "-1"), r"temperature=-1.0 was given; allowed are numbers of at least 0; 0 is greedy\."),
        (("--top-p", "0"), r"top_p=0.0 was given; allowed are numbers above 0 and of at most 1; 1 is all tokens\."),
        (("--max-new-tokens", "760"), "--prompt-tokens 12 and --max-new-tokens 760 are more than the backbone's 768"),
        (("--batch-size", "0"), r"batch_size=0 was given; allowed are integers of at least 1\."),
        (("--limit", "0"), r"limit=0 was given; allowed are integers of at least 1, or null\."),
        (("--heads", "nowhere"), "nowhere"),
        (("--data.streaming", "true"), "regenerate-data reads stored rows"),
        (("--backbone.random_weights", "true"), "has nothing to say"),
    ],
)
def test_what_cannot_be_written_is_a_sentence(folder, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        write(folder, "out.jsonl", *flags)
    assert not (folder / "out.jsonl").exists()


def test_conversations_and_texts_do_not_mix(folder):
    both = [{"path": str(folder / "text.jsonl")}, {"path": str(folder / "chat.jsonl")}]
    config = write_config(folder, "run", data={"train": both})
    with pytest.raises(ValueError, match="a file holds either conversations or texts"):
        run_command(["regenerate-data", "--config", config, "--out", str(folder / "out.jsonl")])


def test_bad_rows_keep_their_place(folder, capsys):
    lines = (folder / "text.jsonl").read_text().splitlines()
    lines[1:3] = ["no json", json.dumps({"text": " "})]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    found = rows(write(folder, "out.jsonl", "--limit", "5"))
    assert [len(row["input_ids"]) > 0 for row in found] == [True, False, False, True, True]
    assert "1 bad rows have empty lines; the first: " in capsys.readouterr().out


REFUSING = (
    "{% for m in messages %}{% if 'no!' in m.content %}{{ raise_exception('it says no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("turn", [0, 2])
def test_a_conversation_that_the_template_refuses_is_a_bad_row(folder, capsys, turn):
    lines = [json.loads(line) for line in (folder / "chat.jsonl").read_text().splitlines()]
    lines[5]["conversations"][turn]["value"] = "no!"  # it has three questions; the first may well be answered
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "t.jinja").write_text(REFUSING)
    flags = ("--data.chat_template", str(folder / "t.jinja"), "--max-new-tokens", "200")
    found = rows(write(folder, "out.jsonl", *flags, data="chat"))
    assert [row["line"] for row in found] == list(range(7))
    assert [row["messages"] == [] for row in found] == [number == 5 for number in range(7)]
    told = capsys.readouterr().out
    assert "1 bad rows have empty lines; the first: " in told
    assert "chat.jsonl line 6: The chat template refuses turns of user" in told


def test_an_answer_that_was_cut_is_not_taught(folder, capsys):
    cut = rows(write(folder, "cut.jsonl", "--temperature", "0", data="chat"))
    whole = rows(write(folder, "whole.jsonl", "--temperature", "0", "--max-new-tokens", "200", data="chat"))
    assert cut != whole
    for short, long in zip(cut, whole, strict=True):
        assert short["messages"] == long["messages"][: len(short["messages"])]
    told = capsys.readouterr().out
    ended = sum(len(short["messages"]) < len(long["messages"]) for short, long in zip(cut, whole, strict=True))
    assert f"{ended} conversations end before an answer that --max-new-tokens 10 cut; raise it" in told


def test_a_conversation_ends_with_an_answer_that_was_written(backbone):
    _, tokenizer = backbone
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    messages = [{"role": "user", "content": "Hi"}, call, {"role": "tool", "content": "3"}]
    tally = Tally()
    rewriting = rewrite_chat(
        [*messages, {"role": "assistant", "content": "old"}],
        tokenizer=tokenizer,
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        fits=lambda prompt: True,
        tally=tally,
    )
    next(rewriting)
    with pytest.raises(StopIteration) as end:
        rewriting.send(GeneratedAnswer([65, 66], cut=True))
    assert end.value.value == {"messages": []}
    assert tally.cut_answers == 1


def test_training_blocks_supervise_what_the_backbone_wrote(folder, backbone):
    _, tokenizer = backbone
    found = rows(write(folder, "out.jsonl", "--prompts-per-text", "2"))
    written = [row for row in found if row["input_ids"]]
    assert 0 < len(written) < len(found)
    data = DataConfig(train=[SourceConfig(path=str(folder / "out.jsonl"))], block_size=16)
    for streaming in (False, True):
        data.streaming = streaming
        packed = build_datasets(data, tokenizer, num_heads=2, vocab_size=257)
        blocks = [(block["input_ids"], block["loss_mask"]) for block in packed.train]
        pairs = {pair for ids, mask in blocks for pair in zip(map(int, ids), map(bool, mask), strict=True)}
        said = {token for row in written for token, one in zip(row["input_ids"], row["loss_mask"], strict=True) if one}
        letters = set(tokenizer("abcdef ")["input_ids"])  # of prompts
        assert {token for token, supervised in pairs if supervised} <= said
        assert {token for token, supervised in pairs if not supervised} <= letters | {256}
        total = sum(sum(row["loss_mask"]) for row in written)
        assert total - 16 < sum(int(np.sum(mask)) for _, mask in blocks) <= total


def test_several_prompts_of_a_text(folder):
    text = "0123456789" * 6
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}) + "\n")
    found = rows(write(folder, "out.jsonl", "--prompts-per-text", "4"))
    assert [row["text"][:12] for row in found[:4]] == [text[i : i + 12] for i in (0, 15, 30, 45)]
    assert [len(row["input_ids"]) > 0 for row in found[4:]] == [True, False, False, False]


def test_training_takes_the_file_as_it_is(folder):
    for data in ("text", "chat"):
        write(folder, f"new-{data}.jsonl", data=data)
        sources = [{"path": str(folder / f"new-{data}.jsonl")}]
        block = {"train": sources, "eval_fraction": 0, "block_size": 32}
        config = write_config(
            folder, f"on-{data}", data=block, trainer={"max_steps": 1, "gradient_accumulation_steps": 1}
        )
        train(config)
        assert (folder / f"on-{data}" / "last" / "heads.json").is_file()


def test_an_answer_ends_where_the_template_ends_it(backbone):
    _, tokenizer = backbone
    assert end_of_turn(tokenizer, CHATML) == [256]
    assert end_of_turn(tokenizer, "{% for m in messages %}{{ m.content }}\n{% endfor %}") == []


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as end:
        main(["regenerate-data", "--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("--out OUT", "0 is greedy", "resumes where it stopped", "docs/data.md"):
        assert words in " ".join(told.split())
