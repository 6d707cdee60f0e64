"""Regenerated data: what the backbone would say, in the rows' order, whatever the batch and wherever a run stopped."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import tiny_model
from tiny_run import ROOT, prepare, train, write_config
from transformers import GenerationConfig

from heads.backbone.loading import BackboneConfig, load_backbone, load_tokenizer
from heads.backbone.model import Backbone
from heads.checkpoint import save_load
from heads.data.chat import choose_template, encode_chat
from heads.data.documents import DataConfig, SourceConfig
from heads.decoding.tree_decoding import TreeDecoding
from heads.families import create
from train.__main__ import main, run_command
from train.data.packing import build_datasets
from train.regenerate.config import RegenerateConfig
from train.regenerate.output import OutputFile, is_finished
from train.regenerate.rewriting import Tally, end_of_turn, rewrite_chat
from train.regenerate.writing import SampleByRow, Writer, sample, uniform_numbers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = (256, *range(0, 256, 8))
"""Of the tiny backbone, whose texts would hardly ever end with one end token; some are cut nevertheless."""
CHATS = [[f"question {'x' * n} {turn}" for turn in range(1 + n % 3)] for n in range(7)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    GenerationConfig(eos_token_id=list(ENDS)).save_pretrained(tmp_path / "base")
    turns = [
        [{"from": who, "value": text} for q in chat for who, text in (("human", q), ("gpt", "old"))] for chat in CHATS
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in turns))
    return tmp_path


def write(folder, out, *flags, data="text", batch=4):
    """The command in this process, in float64: rows do not depend on what they are batched with."""
    train = [{"path": str(folder / f"{data}.jsonl")}]
    config = write_config(folder, "run", backbone={"dtype": "float64"}, data={"train": train})
    sizes = ("--batch-size", str(batch), "--prompt-tokens", "12", "--max-new-tokens", "10")
    run_command(["regenerate-data", "--config", config, "--out", str(folder / out), *sizes, *flags])
    return (folder / out).read_bytes()


def rows(content):
    return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
def backbone(folder):
    config = BackboneConfig(name_or_path=str(folder / "base"), dtype="float64")
    return load_backbone(config, "cpu"), load_tokenizer(config)


@torch.no_grad()
def say(model, prompt, count=10):
    """The plain reference: one prompt, plain greedy steps, no cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] in ENDS or tokens[-1] == model.config.eos_token_id:
            break
    return tokens[len(prompt) :]


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


@pytest.mark.parametrize("data", ["text", "chat"])
def test_a_killed_run_goes_on_to_the_same_bytes(folder, data):
    flags = ("--limit", "14", "--backbone.dtype", "float32")  # rounding tells batches apart
    whole = write(folder, "out.jsonl", *flags, data=data, batch=2)
    lines = whole.splitlines(keepends=True)
    for kept, rest in ((0, 5), (1, 0), (5, 9), (len(lines) - 1, 3), (len(lines), 0)):
        following = lines[kept][:rest] if kept < len(lines) else b""
        (folder / "out.jsonl").write_bytes(b"".join(lines[:kept]) + following)
        assert write(folder, "out.jsonl", *flags, data=data, batch=2) == whole


def test_a_kill_between_lines_of_a_window_loses_nothing(folder, monkeypatch):
    whole = write(folder, "whole.jsonl", batch=2)
    append = OutputFile.append

    def killed(self, made):
        append(self, made)
        if self.lines >= 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputFile, "append", killed)
    with pytest.raises(SystemExit, match="130"):
        write(folder, "out.jsonl", batch=2)
    monkeypatch.undo()
    prefix = (folder / "out.jsonl").read_bytes()
    assert whole.startswith(prefix)
    assert prefix.count(b"\n") == 16
    assert write(folder, "out.jsonl", batch=2) == whole


def test_other_settings_and_other_files_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    with pytest.raises(ValueError, match=r"begun with other settings: temperature 0.7 \(now 0.0\); give those again"):
        write(folder, "out.jsonl", "--temperature", "0")
    with pytest.raises(ValueError, match=r"begun with other settings: .*rows"):
        write(folder, "out.jsonl", data="chat")
    (folder / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="this command did not write it; give another --out"):
        write(folder, "mine.jsonl")
    assert (folder / "mine.jsonl").read_text() == "{}\n"
    with pytest.raises(ValueError, match=r"give a name that ends in \.jsonl"):
        write(folder, "out.txt")
    assert len(rows(write(folder, "out.jsonl", "--limit", "3"))) == 3  # more rows of the same


def copy_weights(folder, seed):
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=257, seed=seed).save_pretrained(folder / "base")
    GenerationConfig(eos_token_id=list(ENDS)).save_pretrained(folder / "base")


def test_other_weights_in_the_same_folder_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    copy_weights(folder, seed=5)
    with pytest.raises(ValueError, match=r"begun with other settings: weights '\w+' \(now '\w+'\); give those again"):
        write(folder, "out.jsonl")
    copy_weights(folder, seed=0)
    write(folder, "out.jsonl", "--limit", "3")
    GenerationConfig(eos_token_id=[256]).save_pretrained(folder / "base")
    with pytest.raises(ValueError, match=r"begun with other settings: ends \[256, 0, 8, .*\(now \[256"):
        write(folder, "out.jsonl")


def test_the_dtype_that_auto_means_is_what_counts(folder):
    write(folder, "out.jsonl", "--limit", "2", "--backbone.dtype", "auto")
    write(folder, "out.jsonl", "--limit", "3", "--backbone.dtype", "float32")  # what it is on CPUs
    with pytest.raises(ValueError, match=r"dtype 'float32' \(now 'float64'\)"):
        write(folder, "out.jsonl")


DAMAGED = ("[]", '"x"', "{", "[" * 100_000, '{"version": 2, "finished_bytes": 3, "settings": 0}')


@pytest.mark.parametrize("content", DAMAGED, ids=["list", "text", "cut", "deep", "settings"])
def test_damaged_settings_are_told_of(folder, content):
    write(folder, "out.jsonl", "--limit", "2")
    (folder / "out.jsonl.settings").write_text(content)
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings is damaged; remove it together with out\.jsonl"):
        write(folder, "out.jsonl")
    assert not is_finished(folder / "out.jsonl")


def test_settings_of_an_older_version_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    content = json.loads((folder / "out.jsonl.settings").read_text())
    for older in (content["settings"], {**content, "version": 1}):
        (folder / "out.jsonl.settings").write_text(json.dumps(older))
        with pytest.raises(ValueError, match=r"begun by another version of this command.*give another --out"):
            write(folder, "out.jsonl")


@pytest.mark.parametrize(
    ("order", "place", "number"), [((0, 0, 1), 2, "0"), ((1, 0), 1, "1"), ((0, None), 2, "None"), ((0, 2), 2, "2")]
)
def test_lines_that_are_not_in_their_places_are_told_of(folder, order, place, number):
    lines = write(folder, "out.jsonl", "--limit", "3").splitlines(keepends=True)
    changed = b"".join(b"{}\n" if i is None else lines[i] for i in order) + b'{"li'
    (folder / "out.jsonl").write_bytes(changed)
    with pytest.raises(
        ValueError, match=rf"out\.jsonl was changed .* line {place} of the file has the number {number}, "
    ):
        write(folder, "out.jsonl")
    assert (folder / "out.jsonl").read_bytes() == changed


def test_one_process_writes_a_file(folder):
    settings = {"seed": 0}
    with OutputFile(folder / "out.jsonl", settings) as first:
        script = "import sys; from train.regenerate.output import OutputFile; OutputFile(sys.argv[1], {'seed': 0})"
        other = subprocess.run(
            [sys.executable, "-c", script, first.path], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert "out.jsonl is being written by another process; wait until that has ended" in other.stderr
        first.append([{"line": 0}])
    with OutputFile(folder / "out.jsonl", settings) as second:
        assert second.lines == 1


def test_a_file_is_finished_with_its_last_line(folder):
    path = folder / "out.jsonl"
    assert not is_finished(path)
    write(folder, "out.jsonl", "--limit", "5")
    assert not is_finished(path)
    whole = write(folder, "out.jsonl")
    assert is_finished(path)
    assert json.loads((folder / "out.jsonl.settings").read_text())["settings"]["lines"] == whole.count(b"\n") == 44
    path.write_bytes(whole[:-1])
    assert not is_finished(path)
    write(folder, "out.jsonl", "--limit", "2")  # the last line stays away
    assert not is_finished(path)
    assert write(folder, "out.jsonl") == whole
    assert is_finished(path)
    (folder / "out.jsonl.settings").unlink()
    assert not is_finished(path)


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
        (("--temperature", "-1"), "--temperature -1.0 was given; allowed are 0"),
        (("--top-p", "0"), "--top-p 0.0 was given; allowed are"),
        (("--max-new-tokens", "760"), "--prompt-tokens 12 and --max-new-tokens 760 are more than the backbone's 768"),
        (("--batch-size", "0"), "--batch-size 0 was given"),
        (("--limit", "0"), "--limit 0 was given"),
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


def test_a_full_disk_leaves_whole_lines(folder, monkeypatch):
    output = OutputFile(folder / "out.jsonl", {"seed": 0})
    output.append([{"line": 0}])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*its 1 lines are whole: free space"):
        output.append([{"line": 1}, {"line": 2}])
    assert (folder / "out.jsonl").read_bytes() == b'{"line": 0}\n'


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
        ends=[256],
        fits=lambda prompt: True,
        tally=tally,
    )
    next(rewriting)
    with pytest.raises(StopIteration) as end:
        rewriting.send([65, 66])  # no end
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


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.1, 0.45, 0.05, 0.4], dtype=torch.float64)
    uniforms = uniform_numbers((0, 1), 20_000)
    tokens = sample(probs.expand(len(uniforms), 4), uniforms, 1.0)
    shares = tokens.bincount(minlength=4) / len(tokens)
    assert torch.allclose(shares.double(), probs, atol=0.015)  # four standard deviations of a share of one half
    tokens = sample(probs.expand(len(uniforms), 4), uniforms, 0.8)  # 0.45 and 0.4 reach it
    shares = tokens.bincount(minlength=4) / len(tokens)
    assert torch.allclose(shares.double(), torch.tensor([0, 0.45, 0, 0.4], dtype=torch.float64) / 0.85, atol=0.015)
    assert sample(probs[None], torch.tensor([0.999]), 1e-9).item() == 1
    assert torch.equal(uniform_numbers((0, 1), 5), uniforms[:5])
    assert not torch.equal(uniform_numbers((0, 2), 5), uniforms[:5])


def test_a_backbone_that_overflows_is_told_of():
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.inf, 2.0]])
    processor = SampleByRow(torch.zeros(2, 1), prompt_length=4, temperature=0.7, top_p=0.9)
    with pytest.raises(ValueError, match=r"NaN; look for damaged weights, and for overflow: give --backbone\.dtype"):
        processor(torch.zeros(2, 4, dtype=torch.long), scores)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_damaged_weights_are_told_of_at_any_temperature(temperature):
    model = tiny_model("llama", dtype=torch.float32)
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    writer = Writer(model, RegenerateConfig(temperature=temperature, max_new_tokens=3), [1])
    with pytest.raises(ValueError, match="The backbone's probabilities are NaN"):
        writer.write([[3, 4, 5], [6, 7]], [(0,), (1,)])


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_in_any_row_of_any_batch_is_told_of(temperature, heads):
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32)
    decoding = TreeDecoding(create("grounded", Backbone(model), num_heads=2)) if heads else None
    model.get_input_embeddings().weight.data[7] = torch.nan
    writer = Writer(model, RegenerateConfig(temperature=temperature, max_new_tokens=3, batch_size=2), [1], decoding)
    writer.write([[3, 4, 5], [6, 8]], [(0,), (1,)])
    with pytest.raises(ValueError, match="The backbone's probabilities are NaN"):
        writer.write([[3, 4, 5], [6, 7]], [(2,), (3,)])


RECOMMENDED = {
    "repetition_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 3.0,
    "min_new_tokens": 20,
    "suppress_tokens": [5],
    "bad_words_ids": [[13]],
    "exponential_decay_length_penalty": (1, 3.0),
    "forced_eos_token_id": 1,
    "sequence_bias": [[[5], -50.0]],
    "guidance_scale": 2.0,
    "max_time": 0.0001,
    "num_beams": 4,
}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_what_the_folder_recommends_does_not_shape_the_text(name):
    prompts, keys = [[3, 4, 5], [6, 7]], [(0,), (1,)]
    texts = []
    for settings in ({}, {name: RECOMMENDED[name]}):
        model = tiny_model("llama", attn="sdpa", dtype=torch.float64)
        for setting in settings:
            setattr(model.generation_config, setting, settings[setting])
        own = model.generation_config
        texts.append(Writer(model, RegenerateConfig(temperature=0, max_new_tokens=24), [1]).write(prompts, keys))
        assert model.generation_config is own
    assert texts[0] == texts[1]
    assert {5, 13} <= set(texts[0][0])


def test_an_answer_ends_where_the_template_ends_it(backbone):
    _, tokenizer = backbone
    assert end_of_turn(tokenizer, CHATML) == [256]
    assert end_of_turn(tokenizer, "{% for m in messages %}{{ m.content }}\n{% endfor %}") == []


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as end:
        main(["regenerate-data", "--help"])
    told = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("--out OUT", "0 is greedy", "goes on where it stopped", "docs/data.md"):
        assert words in " ".join(told.split())
